"""Load the objects that a run file names: datasets, reward functions, tools, model configuration."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from groupwise import rewards
from groupwise.commands.cli.run_file import RunArguments
from groupwise.commands.iterative.iterative_config import IterativeConfig
from groupwise.errors import ConfigError, boundary, nearest_name
from groupwise.records import RewardFunction

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import LoraConfig

_READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_datasets(run: RunArguments) -> tuple[Dataset | None, Dataset | None]:
    """Load the datasets for training and evaluation; None if the run file has none.

    Raises:
        ConfigError: a dataset cannot be loaded.
    """
    if run.dataset is None:
        return None, None
    train = load_rows(run.dataset, run.dataset_split, run.dataset_config)
    if run.eval_dataset is None and run.eval_split is None:
        return train, None
    source = run.eval_dataset or run.dataset
    return train, load_rows(source, run.eval_split or "test", run.dataset_config)


def load_rows(source: str, split: str, config_name: str | None = None) -> Dataset:
    """Load a split of a hub dataset or directory, or all rows of a file.

    Raises:
        ConfigError: naming the source and the cause.
    """
    from datasets import load_dataset, load_from_disk

    path = Path(source).expanduser()
    with boundary(ConfigError, f"dataset {source!r} (split {split!r})"):
        if path.suffix in _READERS:
            if not path.is_file():
                raise FileNotFoundError("no such file")
            try:
                return load_dataset(_READERS[path.suffix], data_files=str(path), split="train")
            except Exception as error:
                raise ValueError(f"{path}{_broken_line(path)}: {_origin(error)}") from error
        if path.is_file():
            raise ValueError(f"file type is not supported; allowed: {', '.join(_READERS)}")
        if (path / "dataset_dict.json").is_file():
            return load_from_disk(str(path))[split]
        if (path / "state.json").is_file():
            return load_from_disk(str(path))
        return load_dataset(str(path) if path.is_dir() else source, config_name, split=split)


def _origin(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _origin(error.__cause__)


def _broken_line(path: Path) -> str:
    """Return the place of the first line of a JSONL file that is no JSON; empty without one."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.suffix == ".jsonl" else []
    for number, line in enumerate(lines, start=1):
        try:
            json.loads(line.strip() or "0")
        except ValueError as error:
            return f", line {number}: {error}"
    return ""


def resolve_reward(spec: object) -> RewardFunction | str:
    """Return the reward of ``module:function``, a name in ``groupwise.rewards``, or ``{name: arguments}``."""
    if isinstance(spec, dict):
        if len(spec) != 1:
            raise ConfigError(f"reward {spec!r} has {len(spec)} keys; write one name and its arguments")
        ((name, arguments),) = spec.items()
        factory = import_object(name) if ":" in name else _from_library(name)
        with boundary(ConfigError, f"reward {name!r}", arguments=arguments):
            return factory(**(arguments or {}))
    if not isinstance(spec, str):
        raise ConfigError(f"reward {spec!r} is of type {type(spec).__name__}; write a name")
    if ":" in spec:
        return import_object(spec)
    if "/" in spec or os.path.isdir(spec):
        return spec  # a reward model
    if spec in rewards.__all__ and (spec.startswith("get_") or spec == "ProcessRewardModel"):
        raise ConfigError(f"reward {spec!r} takes arguments; write {{{spec}: {{argument: value}}}}")
    return _from_library(spec)


def _from_library(name: str) -> Callable[..., Any]:
    known = [item for item in rewards.__all__ if "reward" in item.lower() or "punishment" in item]
    if name not in known:
        module, _, function = name.rpartition(".")
        nearest = nearest_name(name, known)
        for found in (f"{name}:function", f"{module}:{function}"):
            if Path(f"{found.partition(':')[0].replace('.', '/')}.py").is_file():
                nearest = found
        raise ConfigError(
            f"reward {name!r} is not in groupwise.rewards; allowed: {', '.join(known)}, module:function, or "
            f"the id of a reward model; nearest: {nearest!r}"
        )
    return getattr(rewards, name)


def import_object(path: str) -> Any:
    """Import ``module:name``; modules in the working directory are found too.

    Raises:
        ConfigError: no such module or name, or importing the module fails.
    """
    module_name, _, name = path.replace(".py:", ":").partition(":")
    if not module_name or not name:
        raise ConfigError(f"{path!r} is not an import path; write module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with boundary(ConfigError, f"importing {path!r}"):
            module = importlib.import_module(module_name)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and module_name.startswith(cause.name or "?"):
            raise ConfigError(
                f"{path!r}: no module {cause.name!r} in {os.getcwd()} or among the installed packages"
            ) from cause
        raise
    if not hasattr(module, name):
        public = [item for item in vars(module) if not item.startswith("_")] or [""]
        nearest = nearest_name(name, public)
        raise ConfigError(f"{path!r}: module {module_name!r} has no {name!r}; nearest: {nearest!r}")
    return getattr(module, name)


def trainer_arguments(run: RunArguments) -> dict[str, Callable[[], Any]]:
    """Return functions that load the objects named in a run file, by the trainer's argument."""
    return {
        "reward_funcs": lambda: run.rewards and [resolve_reward(spec) for spec in run.rewards],
        "tools": lambda: run.tools and [import_object(path) for path in run.tools],
        "rollout_func": lambda: run.rollout_func and import_object(run.rollout_func),
        "environment_factory": lambda: run.environment and import_object(run.environment),
        "peft_config": lambda: lora_config(run),
    }


def lora_config(run: RunArguments) -> LoraConfig | None:
    """Return the configuration of the adapter, or None without one."""
    if not isinstance(run.lora, dict):
        return None
    try:
        from peft import LoraConfig
    except ImportError as missing:
        raise ConfigError("lora needs PEFT: pip install 'groupwise[peft]'") from missing
    known = [field.name for field in fields(LoraConfig)]
    for name in run.lora:
        if name not in known:
            raise ConfigError(f"lora has the unknown key {name!r}; nearest: {nearest_name(name, known)!r}")
    with boundary(ConfigError, "lora", arguments=run.lora):
        return LoraConfig(**{"task_type": "CAUSAL_LM", **run.lora})


def iterative_arguments(run: RunArguments) -> dict[str, Any]:
    """Return the arguments of ``IterativeGRPO`` that ``GRPOTrainer`` does not have.

    Raises:
        ConfigError: unknown keys, invalid values, or a label function that cannot be imported.
    """
    given = dict(cast("dict[str, Any]", run.iterative))
    label_func = given.pop("label_func", None)
    known = [field.name for field in fields(IterativeConfig)]
    for name in given:
        if name not in known:
            nearest = nearest_name(name, [*known, "label_func"])
            raise ConfigError(f"iterative has the unknown key {name!r}; nearest: {nearest!r}")
    with boundary(ConfigError, "iterative", arguments=given):
        iterative = IterativeConfig(**given)
    return {"iterative": iterative, "label_func": label_func and resolve_reward(label_func)}
