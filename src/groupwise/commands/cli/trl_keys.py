"""Keys of ``trl grpo`` in run files and flags: a setting here, a part of one, or refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from transformers.hf_argparser import string_to_bool

from groupwise.compat.trl import reason_not_a_setting
from groupwise.errors import ConfigError


class Key(NamedTuple):
    """Counterpart of a key of ``trl grpo``.

    Attributes:
        kind: type of the value; list: several strings.
        setting: setting here; empty: there is none, and the key must be false or empty, TRL's defaults.
        part: key within the setting, if the setting is a mapping.
        default: TRL's default of the part.
    """

    kind: Callable[[str], Any]
    setting: str = ""
    part: str = ""
    default: object = None


_LOAD, _QUANTIZE = "model_init_kwargs", "quantization_config"

#: Fields of TRL's ScriptArguments, GRPOScriptArguments, ModelConfig and DatasetMixtureConfig with another
#: name or form here, and ``torch_dtype``, the old name of ``dtype``.
TRL_KEYS = {
    "model_name_or_path": Key(str, "model"),
    "model_revision": Key(str, _LOAD, "revision"),
    "dtype": Key(str, _LOAD, "dtype"),
    "torch_dtype": Key(str, _LOAD, "dtype"),
    "attn_implementation": Key(str, _LOAD, "attn_implementation"),
    "dataset_name": Key(str, "dataset"),
    "dataset_train_split": Key(str, "dataset_split"),
    "dataset_test_split": Key(str, "eval_split"),
    "reward_model_name_or_path": Key(str, "rewards"),
    "reward_funcs": Key(list, "rewards"),
    "use_peft": Key(bool, "lora"),
    "lora_r": Key(int, "lora", "r", 16),
    "lora_alpha": Key(int, "lora", "lora_alpha", 32),
    "lora_dropout": Key(float, "lora", "lora_dropout", 0.05),
    "lora_target_modules": Key(list, "lora", "target_modules"),
    "lora_target_parameters": Key(list, "lora", "target_parameters"),
    "lora_modules_to_save": Key(list, "lora", "modules_to_save"),
    "lora_task_type": Key(str, "lora", "task_type", "CAUSAL_LM"),
    "use_rslora": Key(bool, "lora", "use_rslora"),
    "use_dora": Key(bool, "lora", "use_dora"),
    "load_in_8bit": Key(bool, _QUANTIZE, "load_in_8bit"),
    "load_in_4bit": Key(bool, _QUANTIZE, "load_in_4bit"),
    "bnb_4bit_quant_type": Key(str, _QUANTIZE, "bnb_4bit_quant_type", "nf4"),
    "use_bnb_nested_quant": Key(bool, _QUANTIZE, "bnb_4bit_use_double_quant"),
    "bnb_4bit_quant_storage": Key(str, _QUANTIZE, "bnb_4bit_quant_storage"),
    **{name: Key(bool) for name in ("dataset_streaming", "ignore_bias_buffers", "streaming")},
    "test_split_size": Key(float),
}

#: TRL's keys that only have another name here.
RENAMED = {
    name: key.setting
    for name, key in TRL_KEYS.items()
    if key.setting in ("model", "dataset", "dataset_split", "eval_split")
}

#: What switches on the settings that the other keys only fill.
_SWITCHES = {"lora": "use_peft", _QUANTIZE: "load_in_4bit or load_in_8bit", "eval_split": "eval_strategy"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each of TRL's keys; the parsed namespace lacks those that are not given."""
    group = parser.add_argument_group("keys of trl grpo")
    for name, key in TRL_KEYS.items():
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        options: dict[str, Any] = {"type": key.kind}
        if key.kind is bool:
            options = {"type": string_to_bool, "nargs": "?", "const": True}
        elif key.kind is list:
            options = {"nargs": "+"}
        counterpart = f"{key.setting}[{key.part}]" if key.part else key.setting
        text = f"Here: {counterpart}." if counterpart else "Not supported."
        dest = RENAMED.get(name, name)
        group.add_argument(*flags, dest=dest, default=argparse.SUPPRESS, help=text, **options)


def reason_to_refuse(name: str) -> str:
    """Return what to do instead of a name that is no setting; empty for names of no known origin."""
    if name in TRL_KEYS:
        return 'it has no counterpart; see "Coming from TRL" in the documentation'
    return reason_not_a_setting(name)


def translate(values: dict[str, Any], used: Collection[str]) -> list[str]:
    """Move the values of TRL's keys to the settings that they are here.

    Args:
        values: parsed value by name of a setting or of a key; changed in place.
        used: names that the file or the flags contain.

    Returns:
        One sentence for each setting that keys of TRL fill, and for each key without effect.

    Raises:
        ConfigError: TRL's keys contradict each other, or a setting that is given too.
    """
    found = {name: values.pop(name, None) for name in TRL_KEYS.keys() - RENAMED.keys()}
    given = {name: found[name] for name in TRL_KEYS if found.get(name) is not None}
    filled = _filled(given)
    for setting, value in filled.items():
        if value:
            values[setting] = _joined(setting, values[setting], value)
    if "dataset_name" in used and values["eval_dataset"] is None:
        # trl grpo evaluates on one split, test by default, and does not read it unless it evaluates
        if values["eval_strategy"] != "no":
            values["eval_split"] = values["eval_split"] or "test"
        elif "dataset_test_split" in used:
            values["eval_split"] = None
    settings = {**values, _QUANTIZE: filled[_LOAD].get(_QUANTIZE)}
    keys: dict[str, list[str]] = {}
    for name, key in TRL_KEYS.items():
        if name in used and given.get(name) is not False and key.setting:  # else refused, or off
            keys.setdefault(key.setting, []).append(name)
    return [
        f"{', '.join(names)}: no effect without {_SWITCHES[setting]}"
        if settings[setting] is None and setting in _SWITCHES
        else f"{', '.join(names)}: {setting}={settings[setting]!r}"
        for setting, names in keys.items()
    ]


def _filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that TRL's keys fill: loading options, adapter and rewards; empty without a key."""
    parts: dict[str, dict[str, Any]] = {_LOAD: {}, "lora": {}, _QUANTIZE: {}}
    for name, key in TRL_KEYS.items():
        value = given.get(name, key.default)
        if key.part and value is not None:
            parts[key.setting] = _joined(key.setting, parts[key.setting], {key.part: value})
    load, adapter, quantization = parts.values()
    if given.get("load_in_4bit"):
        if load.get("dtype", "auto") != "auto":
            quantization["bnb_4bit_compute_dtype"] = load["dtype"]
        load[_QUANTIZE] = quantization
    elif given.get("load_in_8bit"):
        load[_QUANTIZE] = {"load_in_8bit": True}
    targets = adapter.get("target_modules")
    if isinstance(targets, list) and len(targets) == 1:
        (adapter["target_modules"],) = targets  # all-linear, or a pattern
    model, functions = given.get("reward_model_name_or_path"), given.get("reward_funcs", [])
    rewards = [] if model is None else [model]  # TRL's order: the reward model is first
    rewards += map(_reward, functions if isinstance(functions, list) else [functions])
    return {_LOAD: load, "lora": adapter if given.get("use_peft") else {}, "rewards": rewards}


def _reward(name: Any) -> Any:
    """Return a reward of ``reward_funcs`` as ``rewards`` names it."""
    if not isinstance(name, str):
        return name  # arguments, as in rewards
    if name == "get_soft_overlong_punishment":
        return {name: {"max_completion_len": 1280, "soft_punish_cache": 256}}  # the only ones in trl grpo
    module, _, function = name.rpartition(".")
    return f"{module}:{function}" if module and not {":", "/"} & {*name} else name


def _joined(setting: str, own: Any, made: Any) -> Any:
    """Return the value of a setting that is given by its own name, by TRL's keys, or by both in parts."""
    if own is None:
        return made
    mappings = isinstance(own, dict) and isinstance(made, dict)
    if not mappings or any(own[part] != made[part] for part in own.keys() & made.keys()):
        raise ConfigError(
            f"{setting}={own!r} and {made!r} of TRL's keys contradict each other; keep one of them"
        )
    return {**own, **made}
