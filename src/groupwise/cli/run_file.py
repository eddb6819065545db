"""Run files: settings from a YAML file and flags, parsed by ``HfArgumentParser``. Flags override the file."""

# ruff: noqa: RUF009 - `_opt` returns a `dataclasses.field`
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from groupwise.config.grpo_config import GRPOConfig, Json
from groupwise.errors import ConfigError, GroupwiseError, boundary, nearest_name


def _opt(doc: str, default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": doc})


@dataclass
class RunArguments:
    """Model, data, rewards and tools of a run; everything else is in ``GRPOConfig``."""

    model: str = _opt("Model to train: hub id or directory.", "")
    dataset: str | None = _opt("Prompts: hub id, directory, or a .json, .jsonl, .csv or .parquet file.")
    dataset_config: str | None = _opt("Configuration of a hub dataset.")
    dataset_split: str = _opt("Split to train on.", "train")
    eval_dataset: str | None = _opt("Prompts for evaluation, given like dataset.")
    eval_split: str | None = _opt(
        "Split for evaluation, of eval_dataset or else of dataset. None: test, if there is an eval_dataset."
    )
    rewards: list[str] | None = _opt(
        "Reward functions: module:function, a name in groupwise.rewards, {name: {argument: value}} to create "
        "one with arguments, or the id of a reward model."
    )
    tools: list[str] | None = _opt("Tools of an agent: module:function.")
    rollout_func: str | None = _opt("Custom generation: module:function.")
    environment: str | None = _opt("Environment factory of an agent: module:function.")
    lora: Json = _opt("Train an adapter: arguments (dict or JSON) of peft.LoraConfig.")
    iterative: Json = _opt(
        "Iterative GRPO: arguments (dict or JSON) of groupwise.IterativeConfig, and label_func "
        "(module:function, or a name in groupwise.rewards) to train the reward model after each iteration."
    )


#: Names in TRL scripts.
_TRL_NAMES = {
    "model_name_or_path": "model",
    "dataset_name": "dataset",
    "train_dataset": "dataset",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_split",
    "reward_funcs": "rewards",
    "environment_factory": "environment",
    "peft_config": "lora",
    "use_peft": "lora",
}


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
    arguments: Sequence[str], command: str, config_class: type[GRPOConfig] = GRPOConfig
) -> tuple[RunArguments, GRPOConfig]:
    """Parse flags and the YAML file of ``--config``.

    Raises:
        ConfigError: unreadable file, unknown key or flag (with the nearest name), or invalid settings.
    """
    parser = _Parser(
        [RunArguments, config_class],  # type: ignore[list-item]
        prog=f"groupwise {command}",
        usage=f"groupwise {command} --config run.yaml [--field value ...]",  # not 250 flags
        allow_abbrev=False,
        description="Every setting can be a key of the YAML file or a flag; flags override the file.",
    )
    known = sorted(field.name for cls in (RunArguments, config_class) for field in fields(cls) if field.init)
    parser.add_argument("--config", help="YAML file with settings.")
    files = _Parser(allow_abbrev=False, add_help=False)
    files.add_argument("--config")
    path = files.parse_known_args(list(arguments))[0].config
    if path is not None:
        settings = read_yaml(path)
        for key in settings:
            if key not in known:
                raise ConfigError(f"{path}: unknown key {key!r}; nearest: {_nearest(key, known)!r}")
        parser.set_defaults(**settings)
    with as_config_error("settings"):
        run, config, _, unknown = parser.parse_args_into_dataclasses(
            args=list(arguments), return_remaining_strings=True, look_for_args_file=False
        )
    for flag in unknown:
        if flag.startswith("--"):
            name = flag[2:].split("=")[0].replace("-", "_")
            raise ConfigError(f"unknown flag {flag!r}; nearest: '--{_nearest(name, known)}'")
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not the value of a flag; write --field value")
    _normalize(run)
    return run, config


def read_yaml(path: str) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: no such file, invalid YAML, or not a mapping.
    """
    if not Path(path).is_file():
        raise ConfigError(f"--config {path}: no such file")
    with boundary(ConfigError, f"reading {path}"):
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains {type(content).__name__}; it must contain 'setting: value' lines")
    return content


def _nearest(name: str, known: Sequence[str]) -> str:
    return _TRL_NAMES.get(name) or nearest_name(name, known)


def _normalize(run: RunArguments) -> None:
    """Convert single values to lists and JSON text to dicts; check the required arguments."""
    for name in ("rewards", "tools"):
        value = getattr(run, name)
        if value is not None:
            values = list(value) if isinstance(value, (list, tuple)) else [value]
            setattr(run, name, [_from_json(item) for item in values])
    for name, example in (("lora", "{r: 16, lora_alpha: 32}"), ("iterative", "{iterations: 3}")):
        value = _from_json(getattr(run, name))
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{name}={value!r} is not a mapping; write for example {example}")
        setattr(run, name, value)
    if not run.model or (run.dataset is None and run.environment is None):
        missing = "dataset" if run.model else "model"
        raise ConfigError(f"{missing} is missing; set it in the YAML file or with --{missing}")


def _from_json(value: object) -> Any:
    if not (isinstance(value, str) and value.lstrip().startswith("{")):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{value!r} is not valid JSON: {error}") from error
