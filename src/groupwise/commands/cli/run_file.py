"""Run files: settings from a YAML file and flags, parsed by ``HfArgumentParser``. Flags override the file."""

# ruff: noqa: RUF009 - `_opt` returns a `dataclasses.field`
from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from groupwise.commands.cli.trl_keys import RENAMED, TRL_KEYS, add_flags, reason_to_refuse, translate
from groupwise.config.fields import Json
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.redact import redact
from groupwise.config.settings import refuse_unknown
from groupwise.data.dataset_checks import check_sources
from groupwise.errors import ConfigError, GroupwiseError, boundary, shortened
from groupwise.hf.arguments import warn_of_defaults


def _opt(doc: str, default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": doc})


@dataclass
class RunArguments:
    """Model, data, rewards and tools of a run; everything else is in ``GRPOConfig``."""

    model: str = _opt("Model to train: hub id or directory.", "")
    dataset: str | None = _opt("Prompts: hub id, directory, or a .json, .jsonl, .csv or .parquet file.")
    datasets: list[str] | None = _opt(
        "Several datasets, concatenated, instead of dataset: for each a mapping of path and TRL's keys "
        "name, data_dir, data_files, split, columns and fraction; with source, a mixture of sources."
    )
    dataset_config: str | None = _opt("Configuration of a hub dataset.")
    dataset_split: str = _opt("Split to train on.", "train")
    eval_dataset: str | None = _opt("Prompts for evaluation, given like dataset.")
    eval_split: str | None = _opt(
        "Split for evaluation, of eval_dataset or else of dataset. None: test, if there is an eval_dataset."
    )
    rewards: list[str] | None = _opt(
        "Reward functions: module:function, a name in groupwise.rewards, {name: {argument: value}} to create "
        "one with arguments, or the id of a reward model. By source of datasets: a mapping of lists."
    )
    tools: list[str] | None = _opt("Tools of an agent: module:function.")
    rollout_func: str | None = _opt("Custom generation: module:function.")
    environment: str | None = _opt("Environment factory of an agent: module:function.")
    chat_template: str | None = _opt(
        "Chat template of the tokenizer: a file, or the hub id or directory of a tokenizer that has it."
    )
    lora: Json = _opt("Train an adapter: arguments (dict or JSON) of peft.LoraConfig.")
    iterative: Json = _opt(
        "Iterative GRPO: arguments (dict or JSON) of groupwise.IterativeConfig, and label_func "
        "(module:function, or a name in groupwise.rewards) to train the reward model after each iteration."
    )


class _Loader(yaml.SafeLoader):
    """Loader that refuses a key which a mapping has twice; YAML's own keeps the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value) for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if names[place] in names[:place]:
                problem = f"the key {key.value!r} is given twice; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


class _Parser(HfArgumentParser):
    """Parser that raises ConfigError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@contextmanager
def as_config_error(where: str) -> Iterator[None]:
    """Convert errors of libraries about settings and files to ConfigError."""
    try:
        yield
    except GroupwiseError:
        raise
    except (ValueError, OSError, ImportError) as cause:
        raise ConfigError(f"{where}: {cause}") from cause


def read_run(
    arguments: Sequence[str],
    command: str,
    config_class: type[GRPOConfig] = GRPOConfig,
    settings: dict[str, Any] | None = None,
) -> tuple[RunArguments, GRPOConfig]:
    """Parse flags and the YAML file of ``--config``; both may have the keys of ``trl grpo``.

    Args:
        settings: content of the file, if it was read before.

    Raises:
        ConfigError: unreadable file, unknown keys or flags (all of them), or invalid settings.
    """
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        arguments = ["--config", *arguments]
    parser = _Parser(
        [RunArguments, config_class],  # type: ignore[list-item]
        prog=f"groupwise {command}",
        usage=f"groupwise {command} run.yaml [--field value ...]",  # not 250 flags
        allow_abbrev=False,
        description="Every setting can be a key of the YAML file or a flag; flags override the file.",
    )
    parser.add_argument("--config", help="YAML file with settings.")
    add_flags(parser)
    flags, extra = parser.parse_known_args(list(arguments))
    if settings is None:
        settings = {} if flags.config is None else read_yaml(flags.config)
    names = [flag[2:].split("=")[0].replace("-", "_") for flag in arguments if flag.startswith("--")]
    known = [field.name for cls in (RunArguments, config_class) for field in fields(cls) if field.init]
    _check_names(settings, vars(flags), extra, known)
    for name in RENAMED.keys() & settings.keys():
        if RENAMED[name] in settings:
            raise ConfigError(f"the run file has {RENAMED[name]} and {name}, TRL's name of it; keep one")
        settings[RENAMED[name]] = settings[name]
    parser.set_defaults(**settings)
    with as_config_error("settings"):
        values = vars(parser.parse_args(list(arguments)))
        values["model_init_kwargs"] = _from_json(values["model_init_kwargs"])
        translated = translate(values, {*settings, *names})
        run, config = parser.parse_dict(values, allow_extra_keys=True)
    _normalize(run)
    for name, value in (("rewards", rewards_by_source(run)), ("dataset_weights", config.dataset_weights)):
        if value is not None:
            check_sources(name, value, sources_of(run))
    if translated and os.environ.get("RANK", "0") == "0":
        lines = "\n  ".join(["groupwise: keys of trl grpo, and what they are here:", *translated])
        print(redact(lines), file=sys.stderr)
        warn_of_defaults(config, {*settings, *names})
    return run, config


def sources_of(run: RunArguments) -> dict[Any, None]:
    """Return the sources of ``datasets`` as keys; empty without."""
    entries: list[Any] = [entry for entry in run.datasets or () if isinstance(entry, dict)]
    return {entry["source"]: None for entry in entries if entry.get("source") is not None}


def rewards_by_source(run: RunArguments) -> dict[Any, list[Any]] | None:
    """Return the rewards of each source, or None if they are of all rows."""
    given: Any = run.rewards[0] if run.rewards and len(run.rewards) == 1 else None
    if not isinstance(given, dict):
        return None
    # Of {name: arguments}, which creates one reward, the value is a mapping or None.
    has_lists = any(isinstance(each, (list, str)) for each in given.values())
    if not has_lists and sources_of(run).keys().isdisjoint(given):
        return None
    return {source: each if isinstance(each, list) else [each] for source, each in given.items()}


def read_yaml(path: str) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: no such file, invalid YAML, or not a mapping.
    """
    if not Path(path).is_file():
        raise ConfigError(f"--config {path}: no such file")
    with boundary(ConfigError, f"reading {path}"), open(path, encoding="utf-8") as file:
        content = yaml.load(file, _Loader)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains {type(content).__name__}; it must contain 'setting: value' lines")
    return content


def _check_names(
    settings: Mapping[str, Any], flags: Mapping[str, Any], extra: Sequence[str], known: Sequence[str]
) -> None:
    """Check the names of all keys and flags.

    Args:
        settings: content of the YAML file.
        flags: values of the flags that the parser has, by name.
        extra: arguments that the parser does not have.
        known: names of the settings.

    Raises:
        ConfigError: one line for each name that is unknown or refused.
    """
    given = {f"key {name!r}": (str(name), value) for name, value in settings.items()}
    given |= {f"flag '--{name}'": (name, value) for name, value in flags.items() if name in TRL_KEYS}
    for flag in (text.split("=")[0] for text in extra if text.startswith("--")):
        given[f"flag {flag!r}"] = (flag[2:].replace("-", "_"), True)
    wrong = {}
    for text, (name, value) in given.items():
        key = TRL_KEYS.get(name)
        if name not in known and (key is None or (not key.setting and value)):
            wrong[text] = name, reason_to_refuse(name)
    refuse_unknown(wrong, [*known, *TRL_KEYS])
    if extra:
        raise ConfigError(f"{extra[0]!r} is not the value of a flag; write FILE --field value")


def _normalize(run: RunArguments) -> None:
    """Convert single values to lists and JSON text to dicts; check the required arguments."""
    for name in ("rewards", "tools", "datasets"):
        value = getattr(run, name)
        if value is not None:
            values = list(value) if isinstance(value, (list, tuple)) else [value]
            setattr(run, name, [_from_json(item) for item in values])
    for name, example in (("lora", "{r: 16, lora_alpha: 32}"), ("iterative", "{iterations: 3}")):
        value = _from_json(getattr(run, name))
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{name}={shortened(value)} is not a mapping; write for example {example}")
        setattr(run, name, value)
    for name, default in (("dataset", None), ("dataset_split", "train")):
        if run.datasets and (value := getattr(run, name)) != default:
            raise ConfigError(f"{name}={value!r} and datasets are both given; keep one of them")
    if not run.model or (run.dataset is None and not run.datasets and run.environment is None):
        missing = "dataset" if run.model else "model"
        raise ConfigError(f"{missing} is missing; set it in the YAML file or with --{missing}")


def _from_json(value: object) -> Any:
    if not (isinstance(value, str) and value.lstrip().startswith("{")):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{value!r} is not valid JSON: {error}") from error
