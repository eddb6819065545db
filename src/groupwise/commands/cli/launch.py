"""Launch options of ``groupwise train``: start its processes through accelerate's launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from groupwise.errors import ConfigError, nearest_name

#: Configurations of the package, by name.
CONFIGS = {path.stem: path for path in sorted((Path(__file__).parent / "accelerate").glob("*.yaml"))}
_OPTIONS: dict[str, tuple[type, str]] = {
    "accelerate_config": (str, f"{', '.join(CONFIGS)} or a YAML file; ddp, if only others are given"),
    "num_processes": (int, "processes on all machines (default: that of the configuration)"),
    "num_machines": (int, "machines (default: that of the configuration)"),
    "machine_rank": (int, "number of this machine, from 0"),
    "main_process_ip": (str, "address of machine 0"),
    "main_process_port": (int, "port on machine 0; on a single machine, 0 is a free one"),
}


def run(arguments: Sequence[str]) -> int:
    """Train in this process or, with launch options, in processes that accelerate starts.

    Returns:
        Exit code; of a launch, that of the process that failed first, or 128 + N after signal N.
    """
    parser = argparse.ArgumentParser(usage="groupwise train [flags]", add_help=False, allow_abbrev=False)
    for name, (kind, text) in _OPTIONS.items():
        parser.add_argument(*{f"--{name}": 0, f"--{name.replace('_', '-')}": 0}, type=kind, help=text)
    options, rest = parser.parse_known_args(list(arguments))
    given = {name: value for name, value in vars(options).items() if value is not None}
    if {"-h", "--help"} & {*rest}:
        print(parser.format_help())
    elif given:
        return _launch(given, rest)
    from groupwise.commands.cli import train

    return train.run(rest)


def _launch(options: dict[str, object], arguments: Sequence[str]) -> int:
    """Train in processes that get the other arguments, without the options of the launch: they start none."""
    if rank := os.environ.get("RANK"):
        launcher = f"a launcher started this process (RANK={rank}); give the option to that launcher"
        raise ConfigError(f"--{next(iter(options))}: {launcher}, or start groupwise train without one")
    for name in options.keys() & {"num_processes", "num_machines"}:
        if int(str(options[name])) < 1:
            raise ConfigError(f"--{name} {options[name]}: allowed: 1 or more")
    config = str(options.pop("accelerate_config", "ddp"))
    if config not in CONFIGS and not Path(config).is_file():
        allowed = f"{', '.join(CONFIGS)}, or a path of a YAML file; nearest: {nearest_name(config, CONFIGS)}"
        raise ConfigError(f"--accelerate_config {config}: no such configuration or file; allowed: {allowed}")
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    program = ["-m", "groupwise.cli", "train", *arguments]
    command = ["--config_file", str(CONFIGS.get(config, config)), *flags, *program]
    try:
        launch_command(launch_command_parser().parse_args(command))
    except ChildFailedError as error:
        first, failure = error.get_first_failure()
        print(f"groupwise: rank {first} ended with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"launching with --accelerate_config {config}: {error}") from error
    return 0
