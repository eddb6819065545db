"""Load the objects that a run file names: datasets, reward functions, tools, model configuration."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import AutoTokenizer

from groupwise import rewards
from groupwise.commands.cli.run_file import RunArguments, rewards_by_source
from groupwise.commands.iterative.iterative_config import IterativeConfig
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import check_names
from groupwise.errors import ConfigError, boundary, nearest_name
from groupwise.policy.loading import load_processing_class
from groupwise.records import RewardFunction
from groupwise.tokenization.text import text_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import LoraConfig

    from groupwise.tokenization.text import ProcessingClass

#: Keys of an entry of ``datasets``: those of TRL's DatasetConfig, and the name of a source of a mixture.
_ENTRY = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction", "source")

_READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_datasets(run: RunArguments) -> tuple[Dataset | dict[str, Dataset] | None, Dataset | None]:
    """Load the datasets for training, by source if they have sources, and evaluation; None without.

    Raises:
        ConfigError: a dataset cannot be loaded.
    """
    if run.datasets:
        train: Any = _concatenated(run.datasets)
    elif run.dataset is None:
        return None, None
    else:
        train = load_rows(run.dataset, run.dataset_split, run.dataset_config)
    if run.eval_dataset is None and run.eval_split is None:
        return train, None
    source = run.eval_dataset or run.dataset
    if source is None:
        raise ConfigError(f"eval_split={run.eval_split!r} is of no dataset of datasets; set eval_dataset")
    path, split = Path(source).expanduser(), run.eval_split or "test"
    is_one = run.eval_dataset is None and (path.is_file() or (path / "state.json").is_file())
    if is_one and not split.startswith("train"):
        raise ConfigError(f"eval_split={split!r} is not in {source!r}, which is all train; set eval_dataset")
    return train, load_rows(source, split, run.dataset_config)


def _concatenated(entries: list[Any]) -> Dataset | dict[str, Dataset]:
    """Load the datasets of TRL's list, one after the other; a column that one lacks is None in its rows.

    With fractions, each gives its first rows: as many in all as leave every fraction right. With sources,
    those of each are one dataset, by its name.

    Raises:
        ConfigError: naming the entry, counted from 0, and what is wrong with it.
    """
    from datasets import concatenate_datasets

    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            raise ConfigError(f"datasets[{index}] is {entry!r}; write a mapping with a path")
        check_names(f"datasets[{index}]", map(str, entry), _ENTRY, "groupwise")
    fractions = [entry.get("fraction") for entry in entries]
    if set(fractions) != {None}:
        for index, fraction in enumerate(fractions):
            if not isinstance(fraction, (int, float)) or not 0 < fraction < math.inf:
                raise ConfigError(f"datasets[{index}] has fraction={fraction!r}; give all a number above 0")
    sources = [entry.get("source") for entry in entries]
    if None in sources and any(sources):
        raise ConfigError(f"datasets[{sources.index(None)}] has no source; give all a source, or none")
    parts = []
    for entry in entries:
        files = {name: entry[name] for name in ("data_dir", "data_files") if entry.get(name) is not None}
        part = load_rows(entry["path"], entry.get("split") or "train", entry.get("name"), **files)
        if (columns := entry.get("columns")) is not None:
            with boundary(ConfigError, f"dataset {entry['path']!r} (columns {columns!r})"):
                part = part.select_columns(columns)
        parts.append(part)
    total = min((len(part) / share for part, share in zip(parts, fractions, strict=True) if share), default=0)
    parts = [
        part.select(range(round(share * total))) if share else part
        for part, share in zip(parts, fractions, strict=True)
    ]
    with boundary(ConfigError, "datasets: their columns have different types"):
        named: dict[Any, list[Any]] = {}
        for source, part in zip(sources, parts, strict=True):
            named.setdefault(source, []).append(part)
        mixture = {source: concatenate_datasets(group) for source, group in named.items()}
        return mixture.get(None, mixture)  # type: ignore[call-overload]


def load_rows(source: str, split: str, config_name: str | None = None, **files: Any) -> Dataset:
    """Load a split of a hub dataset or directory, or all rows of a file.

    Args:
        files: ``data_dir`` and ``data_files`` of ``datasets.load_dataset``.

    Raises:
        ConfigError: naming the source and the cause.
    """
    from datasets import load_dataset, load_from_disk

    path = Path(source).expanduser()
    with boundary(ConfigError, f"dataset {source!r} (split {split!r})"):
        if files:
            return load_dataset(source, config_name, split=split, **files)
        if path.suffix in _READERS:
            if not path.is_file():
                raise FileNotFoundError("no such file")
            try:
                rows = {split.partition("[")[0]: str(path)}  # by the name of its only split
                return load_dataset(_READERS[path.suffix], data_files=rows, split=split)
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


def resolve_rewards(run: RunArguments) -> Any:
    """Return the list of rewards, or lists by source if the run file has a mapping of them; None without."""
    if (by_source := rewards_by_source(run)) is None:
        return run.rewards and [resolve_reward(spec) for spec in run.rewards]
    return {source: [resolve_reward(spec) for spec in specs] for source, specs in by_source.items()}


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
    with boundary(ConfigError, f"importing {path!r} from {os.getcwd()} or the installed packages"):
        module = importlib.import_module(module_name)
    if not hasattr(module, name):
        public = [item for item in vars(module) if not item.startswith("_")] or [""]
        nearest = nearest_name(name, public)
        raise ConfigError(f"{path!r}: module {module_name!r} has no {name!r}; nearest: {nearest!r}")
    return getattr(module, name)


def trainer_arguments(run: RunArguments, config: GRPOConfig) -> dict[str, Callable[[], Any]]:
    """Return functions that load the objects named in a run file, by the trainer's argument."""
    return {
        "reward_funcs": lambda: resolve_rewards(run),
        "tools": lambda: run.tools and [import_object(path) for path in run.tools],
        "rollout_func": lambda: run.rollout_func and import_object(run.rollout_func),
        "environment_factory": lambda: run.environment and import_object(run.environment),
        "peft_config": lambda: lora_config(run),
        "processing_class": lambda: run.chat_template and _with_chat_template(run, config),
    }


def _with_chat_template(run: RunArguments, config: GRPOConfig) -> ProcessingClass:
    """Return the model's tokenizer or processor with the run's chat template; it is saved with both."""
    processor, name = load_processing_class(None, run.model, config), str(run.chat_template)
    path = Path(name).expanduser()
    with boundary(ConfigError, f"chat_template {name!r} (a file, or the hub id or directory of a tokenizer)"):
        text = path.read_text(encoding="utf-8") if path.is_file() else None
        template = text or AutoTokenizer.from_pretrained(name).chat_template
    if not template:
        raise ConfigError(f"chat_template={name!r} has no chat template; name a file or another tokenizer")
    processor.chat_template = text_tokenizer(processor).chat_template = template
    return processor


def lora_config(run: RunArguments) -> LoraConfig | None:
    """Return the configuration of the adapter, or None without one."""
    if not isinstance(run.lora, dict):
        return None
    try:
        from peft import LoraConfig
    except ImportError as missing:
        raise ConfigError("lora needs PEFT: pip install 'groupwise[peft]'") from missing
    check_names("lora", run.lora, [field.name for field in fields(LoraConfig)], "PEFT")
    with boundary(ConfigError, "lora", arguments=run.lora):
        return LoraConfig(**{"task_type": "CAUSAL_LM", **run.lora})


def iterative_arguments(run: RunArguments) -> dict[str, Any]:
    """Return the arguments of ``IterativeGRPO`` that ``GRPOTrainer`` does not have.

    Raises:
        ConfigError: unknown keys, invalid values, or a label function that cannot be imported.
    """
    given = dict(cast("dict[str, Any]", run.iterative))
    known = [*(field.name for field in fields(IterativeConfig)), "label_func"]
    check_names("iterative", given, known, "groupwise")
    label_func = given.pop("label_func", None)
    with boundary(ConfigError, "iterative", arguments=given):
        iterative = IterativeConfig(**given)
    return {"iterative": iterative, "label_func": label_func and resolve_reward(label_func)}
