"""``groupwise sweep``: train several configurations on one base model, and control a running sweep."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from groupwise.commands.sweeps.commands import send_command
from groupwise.errors import ConfigError, log_boundary

if TYPE_CHECKING:
    from groupwise.commands.sweeps.scheduler import Sweep

logger = logging.getLogger(__name__)

#: Keys that are the same for all runs, because they share model, data and directory.
_COMMON = (
    *("model", "dataset", "datasets", "dataset_config", "dataset_split", "eval_dataset", "eval_split"),
    *("output_dir", "model_init_kwargs", "trust_remote_code", "resume_from_checkpoint"),
)
_UNSUPPORTED = ("tools", "rollout_func", "environment", "iterative", "chat_template")


def run(arguments: Sequence[str]) -> int:
    """Train the runs of a file, or send a command to the sweep in a directory."""
    parser = argparse.ArgumentParser(
        prog="groupwise sweep",
        usage="groupwise sweep --config sweep.yaml [--field value ...]\n"
        "       groupwise sweep DIR --stop NAME | --resume NAME | --clone NAME NEW [--set SETTING=VALUE ...]",
        description="Train several configurations side by side on one base model. The file has the keys of "
        "groupwise train, and runs: {name: {setting: value}} with the differences; flags act on all runs.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", nargs="?", metavar="DIR", help="directory of a running sweep")
    parser.add_argument("--stop", metavar="NAME", help="stop a run after its optimizer step")
    parser.add_argument("--resume", metavar="NAME", help="continue a stopped run")
    parser.add_argument("--clone", nargs=2, metavar=("NAME", "NEW"), help="start a copy of a run at its step")
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING=VALUE", help="changes of the copy")
    commands = ("stop", "resume", "clone")
    own = {"--help", *(f"--{name}" for name in commands)}
    if not arguments or (arguments[0].startswith("--") and own.isdisjoint(arguments)):
        return _train(arguments)
    options = parser.parse_args(arguments)
    given = {name: value for name in commands if (value := getattr(options, name))}
    if options.directory is None or len(given) != 1:
        raise ConfigError(
            "give the directory of a running sweep and one command, such as groupwise sweep out --stop low; "
            "groupwise sweep --config sweep.yaml starts a sweep"
        )
    if options.set and "clone" not in given:
        raise ConfigError("--set has the changes of a clone: groupwise sweep out --clone NAME NEW --set …")
    ((action, name),) = given.items()
    command = {"action": action, "name": name}
    if action == "clone":
        changes = dict(_change(text) for text in options.set)
        command = {"action": action, "name": name[0], "new_name": name[1], "changes": changes}
    print(send_command(Path(options.directory), command))
    return 0


def _change(text: str) -> tuple[str, Any]:
    """Parse ``setting=value``; numbers, lists and dictionaries are written as in YAML, 1e-5 too."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write setting=value")
    parsed = yaml.safe_load(value)
    with contextlib.suppress(ValueError):
        parsed = float(parsed) if isinstance(parsed, str) else parsed  # YAML 1.1 reads 1e-5 as a text
    return name, parsed


def _train(arguments: Sequence[str]) -> int:
    from groupwise.reporting.metrics_file import METRICS_FILE

    sweep, resume, dataset = make_sweep(arguments)
    runs = sweep.run(resume_from_checkpoint=resume)
    for run in runs.values():
        if run.status == "finished" and run.trainer is not None:
            with log_boundary(logger, f"the model card of run {run.name!r}"):
                run.trainer.create_model_card(dataset_name=dataset)
    logged = [name for name in runs if (sweep.directory / name / METRICS_FILE).exists()]
    paths = [os.path.relpath(sweep.directory / name) for name in (*logged, "report.html")]
    print("\n" + shlex.join(["groupwise", "report", *paths[:-1], "--output", paths[-1]]))
    return int(any(run.status == "failed" for run in runs.values()))


def make_sweep(arguments: Sequence[str]) -> tuple[Sweep, bool, str | None]:
    """Build the sweep of a file and flags; returns also whether it resumes, and the dataset's name.

    Raises:
        ConfigError: the file has no runs, or a run has a setting that cannot be trained with.
    """
    from groupwise.commands.cli.run_file import as_config_error, read_run, read_yaml
    from groupwise.commands.cli.sources import load_datasets, lora_config, resolve_rewards
    from groupwise.commands.sweeps.scheduler import Sweep
    from groupwise.policy.introspection import load_config

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--output_dir", "--output-dir")
    own, flags = parser.parse_known_args(list(arguments))
    if own.config is None:
        raise ConfigError("--config is missing; write groupwise sweep --config sweep.yaml")
    settings = read_yaml(own.config)
    runs = settings.pop("runs", None)
    if not isinstance(runs, dict) or not all(isinstance(changes or {}, dict) for changes in runs.values()):
        raise ConfigError(f"{own.config} has no runs; write runs: {{low: {{learning_rate: 1e-6}}, ...}}")
    directory = Path(own.output_dir or settings.pop("output_dir", None) or "sweep")
    parsed = {
        str(name): read_run(flags, "sweep", settings=_of_run(settings, str(name), changes or {}, directory))
        for name, changes in runs.items()
    }
    for name, (run, _) in parsed.items():
        for key in _UNSUPPORTED:
            if getattr(run, key) is not None:
                raise ConfigError(f"run {name!r} has {key}, which a sweep does not support")
    common, config = next(iter(parsed.values()))
    resume = str(config.resume_from_checkpoint or False).lower()
    if resume not in ("true", "false"):
        raise ConfigError(
            f"resume_from_checkpoint={config.resume_from_checkpoint!r}: every run of a sweep continues from "
            "its own newest checkpoint; allowed: true, false"
        )
    load_config(common.model, config)
    train_dataset, eval_dataset = load_datasets(common)
    with as_config_error("setting up"):
        sweep = Sweep(
            common.model,
            {name: resolve_rewards(run) for name, (run, _) in parsed.items()},
            {name: args for name, (_, args) in parsed.items()},
            train_dataset,
            eval_dataset,
            peft_config={name: lora_config(run) for name, (run, _) in parsed.items()},
        )
    return sweep, resume == "true", common.dataset


def _of_run(settings: dict[str, Any], name: str, changes: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the settings of one run, with an output directory of its own."""
    from groupwise.commands.cli.trl_keys import RENAMED

    for key in changes:
        if RENAMED.get(key, key) in _COMMON:
            raise ConfigError(f"run {name!r} has the key {key!r}, which runs of a sweep have in common")
    return {"run_name": name, **settings, **changes, "output_dir": str(directory / name)}
