"""What names in a run stand for: datasets, reward functions, tools."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupwise import rewards
from groupwise.cli.run_file import RunArguments
from groupwise.errors import ConfigError, boundary

_READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_datasets(run: RunArguments) -> tuple[Any, Any]:
    """The datasets for training and evaluation; None where a run has none.

    Raises:
        ConfigError: one cannot be loaded.
    """
    if run.dataset is None:
        return None, None
    train = load_rows(run.dataset, run.dataset_split, run.dataset_config)
    if run.eval_dataset is None and run.eval_split is None:
        return train, None
    source = run.eval_dataset or run.dataset
    return train, load_rows(source, run.eval_split or "test", run.dataset_config)


def load_rows(source: str, split: str, config_name: str | None = None) -> Any:
    """A split of a hub dataset or directory, or all rows of a file.

    Raises:
        ConfigError: naming the source and the cause.
    """
    from datasets import load_dataset, load_from_disk

    path = Path(source).expanduser()
    with boundary(ConfigError, f"dataset {source!r} (split {split!r})"):
        if path.suffix in _READERS:
            if not path.is_file():
                raise FileNotFoundError("there is no such file")
            return load_dataset(_READERS[path.suffix], data_files=str(path), split="train")
        if path.is_file():
            raise ValueError(f"files of this kind are not read; allowed: {', '.join(_READERS)}")
        if (path / "dataset_dict.json").is_file():
            return load_from_disk(str(path))[split]
        if (path / "state.json").is_file():
            return load_from_disk(str(path))
        return load_dataset(str(path) if path.is_dir() else source, config_name, split=split)


def resolve_rewards(run: RunArguments) -> list[Any] | None:
    """The reward functions of a run; ids of reward models stay names.

    Raises:
        ConfigError: a name that stands for nothing.
    """
    return None if run.rewards is None else [resolve_reward(spec) for spec in run.rewards]


def resolve_reward(spec: Any) -> Any:
    """One reward: ``module:function``, a name in ``groupwise.rewards``, or ``{name: arguments}``."""
    if isinstance(spec, dict):
        if len(spec) != 1:
            raise ConfigError(f"reward {spec!r} has {len(spec)} keys; write one name with its arguments")
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
    if spec.startswith("get_") and spec in rewards.__all__:
        raise ConfigError(f"reward {spec!r} is made with arguments; write {{{spec}: {{argument: value}}}}")
    return _from_library(spec)


def _from_library(name: str) -> Callable[..., Any]:
    known = [item for item in rewards.__all__ if "reward" in item or "punishment" in item]
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
        raise ConfigError(
            f"reward {name!r} is not in groupwise.rewards; allowed: {', '.join(known)}, module:function, or "
            f"the id of a reward model; nearest: {nearest!r}"
        )
    return getattr(rewards, name)


def import_object(path: str) -> Any:
    """What ``module:name`` stands for, with modules found from the working directory too.

    Raises:
        ConfigError: no such module or name, or the module fails.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{path!r} is no import path; write module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with boundary(ConfigError, f"importing {path!r}"):
            module = importlib.import_module(module_name)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and module_name.startswith(cause.name or "?"):
            raise ConfigError(
                f"{path!r}: there is no module {cause.name!r}; modules are found in {os.getcwd()} and among "
                "the installed packages"
            ) from cause
        raise
    if not hasattr(module, name):
        public = [item for item in vars(module) if not item.startswith("_")] or [""]
        nearest = difflib.get_close_matches(name, public, n=1, cutoff=0)[0]
        raise ConfigError(f"{path!r}: module {module_name!r} has no {name!r}; nearest: {nearest!r}")
    return getattr(module, name)


def lora_config(run: RunArguments) -> Any:
    """The adapter's configuration, or None."""
    if run.lora is None:
        return None
    try:
        from peft import LoraConfig
    except ImportError as missing:
        raise ConfigError("lora needs PEFT: pip install 'groupwise[peft]'") from missing
    options: Any = {"task_type": "CAUSAL_LM", **run.lora}  # type: ignore[dict-item]
    with boundary(ConfigError, "lora", arguments=run.lora):
        return LoraConfig(**options)


def check_model(run: RunArguments, trust_remote_code: bool, options: dict[str, Any] | None) -> Any:
    """The model's configuration, which is read before anything heavy is loaded.

    Raises:
        ConfigError: there is no such model, or it may not be read.
    """
    from transformers import AutoConfig

    named = {name: value for name, value in (options or {}).items() if name in ("revision", "token")}
    with boundary(ConfigError, f"model {run.model!r}"):
        return AutoConfig.from_pretrained(run.model, trust_remote_code=trust_remote_code, **named)
