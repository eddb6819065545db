"""``groupwise train`` with ``--accelerate_config`` or ``--num_processes``: start it by accelerate's launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from groupwise.errors import ConfigError, nearest_name

#: Configurations of the package, by name.
CONFIGS = {path.stem: path for path in sorted((Path(__file__).parent / "accelerate").glob("*.yaml"))}
#: Set in the processes that this module starts: they train and start none.
_STARTED = "GROUPWISE_STARTED_BY_TRAIN"


def run(arguments: Sequence[str]) -> int:
    """Train in this process; with launch options, in processes started by accelerate.

    Returns:
        Exit code; of a launch, that of the process that failed first, 128 + N if signal N ended it.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(list(arguments))
    given = {name: value for name, value in vars(options).items() if value is not None}
    started = os.environ.pop(_STARTED, None)
    if given and started is None and not {"-h", "--help"} & {*rest}:
        return _launch(given, arguments)
    if {"-h", "--help"} & {*rest}:
        print(parser.format_help())
    from groupwise.commands.cli import train

    return train.run(rest, [text for name in given for text in (f"--{name}", str(given[name]))])


def config_file(name: str) -> str:
    """Return the path of an accelerate configuration: one of the package by name, or a YAML file.

    Raises:
        ConfigError: neither a name nor a file.
    """
    if name in CONFIGS:
        return str(CONFIGS[name])
    if Path(name).is_file():
        return name
    raise ConfigError(
        f"--accelerate_config {name}: no such configuration or file; allowed: {', '.join(CONFIGS)}, or the "
        f"path of a YAML file; nearest: {nearest_name(name, CONFIGS)}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("groupwise train", "launch options:", add_help=False, allow_abbrev=False)

    def add(name: str, help: str, kind: type = int) -> None:
        parser.add_argument(
            *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), type=kind, help=help
        )

    add("accelerate_config", f"{', '.join(CONFIGS)}, or a YAML file (ddp, if another option is given)", str)
    add("num_processes", "processes on all machines (default: that of the configuration)")
    add("num_machines", "machines (default: that of the configuration)")
    add("machine_rank", "number of this machine, from 0")
    add("main_process_ip", "address of machine 0", str)
    add("main_process_port", "port on machine 0; 0: a free one, on a single machine")
    return parser


def _launch(options: dict[str, object], arguments: Sequence[str]) -> int:
    if "RANK" in os.environ:
        raise ConfigError(
            f"--{next(iter(options))}: a launcher started this process (RANK={os.environ['RANK']}); give the "
            "option to that launcher, or start groupwise train without one"
        )
    for name in ("num_processes", "num_machines"):
        if int(str(options.get(name, 1))) < 1:
            raise ConfigError(f"--{name} {options[name]}: allowed: 1 or more")
    path = config_file(str(options.pop("accelerate_config", "ddp")))
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command = [
        "--config_file",
        path,
        *(text for name in options for text in (f"--{name}", str(options[name]))),
    ]
    parsed = launch_command_parser().parse_args([*command, "-m", "groupwise.cli", "train", *arguments])
    try:
        with patch_environment(**{_STARTED: "1"}):
            launch_command(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"groupwise: rank {rank} ended with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"launching with {path}: {error}") from error
    return 0
