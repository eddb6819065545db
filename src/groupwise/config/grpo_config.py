"""The configuration of a GRPO run: settings that are left open are resolved when it is built, then checked.

Open are parsed text, old names, precision, derived batch sizes and the kernels of Liger.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import logging
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.utils import is_torch_xla_available

from groupwise.compat.torch import has_native_bf16_cpu
from groupwise.compat.trl import is_trl_default, reason_not_a_setting
from groupwise.config.fields import GRPOFields
from groupwise.config.redact import masked
from groupwise.config.sampling import SAMPLING_FIELDS
from groupwise.config.settings import default_of, refuse_unknown
from groupwise.config.validation import check
from groupwise.errors import ConfigError, shortened, warn_once

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


@dataclass(repr=False)
class GRPOConfig(GRPOFields):
    """Settings of :class:`groupwise.GRPOTrainer`: those of ``TrainingArguments`` and those of GRPO.

    Parse it with ``HfArgumentParser`` from flags, YAML or dicts; dict and list fields also accept JSON text.
    Building a configuration resolves settings that are left open, then validates all of them at once.
    ``dataclasses.replace``, and a configuration built from ``to_dict()``, derive ``epsilon_high``,
    ``num_generations_eval``, ``steps_per_generation`` and ``generation_batch_size`` again if they were
    open; a resolved ``bf16`` is kept.

    Attributes:
        given: names of the arguments; all fields for a parsed or replaced configuration.

    Raises:
        ConfigError: one line per violated constraint.
    """

    given = frozenset[str]()  # not annotated: no field

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse unknown names, which the generated constructor would report without the nearest one."""
        known = inspect.signature(cls.__init__).parameters  # also of a subclass with its own constructor
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            unknown = {
                name: reason_not_a_setting(name, in_file=False) for name in kwargs if name not in known
            }
            refuse_unknown({f"argument {name!r}": (name, reason) for name, reason in unknown.items()}, known)
        made = super().__new__(cls)
        made.given = frozenset(kwargs)
        return made

    def __post_init__(self) -> None:
        reopen_derived(self, self.__dataclass_fields__)
        parse_strings(self)
        move_old_names(self)
        resolve_precision(self)
        resolve_trackers(self)
        # transformers 5.24 renamed both fields, and warns about the old names even for our defaults.
        if getattr(self, "activation_checkpointing", True) is None:
            self.activation_checkpointing = DerivedInt(self.gradient_checkpointing)
        if getattr(self, "activation_checkpointing_kwargs", {}) is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        if self.deepspeed and importlib.util.find_spec("deepspeed") is None:  # transformers: a TypeError
            raise ConfigError("deepspeed needs the package DeepSpeed: pip install 'groupwise[deepspeed]'")
        super().__post_init__()
        if isinstance(self.gradient_checkpointing, DerivedInt):  # copied back from the new field
            self.gradient_checkpointing = bool(self.gradient_checkpointing)
        # Trainer reads it at every save; rewards, tools and scripts may change the working directory.
        self.output_dir = os.path.abspath(str(self.output_dir))
        resolve(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict; ``TrainingArguments`` rewrites nested dicts, so this reads a copy."""
        return super(GRPOConfig, copy.copy(self)).to_dict()

    def __repr__(self) -> str:
        """Return the fields without tokens, also those within dicts."""
        return super(GRPOConfig, copy.copy(self)).__repr__()  # __getstate__ makes the copy

    __str__ = __repr__

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, without tokens: ``training_args.bin`` is pushed to the Hub."""
        return masked(vars(self))


class DerivedInt(int):
    """Value of an open field that follows from other fields; a configuration built from it derives it again.

    ``dataclasses.replace`` passes all values of the old configuration to the constructor, as if given.
    """


class DerivedFloat(float):
    """As :class:`DerivedInt`."""


def resolve(config: GRPOFields) -> None:
    """Derive settings that are open from the others, and check all; again when a trainer is built.

    Raises:
        ConfigError: one line per violated constraint.
    """
    reopen_derived(config, config.SETTINGS)
    resolve_sampling(config)
    resolve_defaults(config)
    resolve_batch_sizes(config)
    check(config)
    for name, setting in config.SETTINGS.items():
        if setting.ignored:  # the check has logged a warning
            setattr(config, name, default_of(config, name))
    resolve_liger(config)


def reopen_derived(config: GRPOFields, names: Iterable[str]) -> None:
    """Set derived values, and the token placeholder of ``to_dict``, to None."""
    for name in names:
        if isinstance(getattr(config, name), DerivedInt | DerivedFloat):
            setattr(config, name, None)
    if config.hub_token == "<HUB_TOKEN>":
        config.hub_token = None


def parse_strings(config: GRPOFields) -> None:
    """Parse strings (YAML, shell) to the type of their field; invalid ones are kept for the validation."""
    for name, setting in config.SETTINGS.items():
        value = getattr(config, name)
        if isinstance(value, str):
            setattr(config, name, _parse(value, setting.types))
        elif value is False and "off" in setting.choices:  # YAML reads off and no as False
            setattr(config, name, "off")
    for name in ("eval_strategy", "logging_strategy", "save_strategy"):
        if getattr(config, name) is False:
            setattr(config, name, "no")
    if isinstance(config.reward_weights, list):
        weights = [_parse(weight, frozenset({float})) for weight in config.reward_weights]
        config.reward_weights = cast("list[float]", weights)


def _parse(value: object, kinds: frozenset[type]) -> object:
    if not isinstance(value, str) or not kinds & {dict, list, bool, int, float}:
        return value
    if kinds & {dict, list}:
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    if bool in kinds:
        return {"true": True, "false": False}.get(value.lower(), value)
    try:
        return int(value) if int in kinds else float(value)
    except ValueError:
        return value


def move_old_names(config: GRPOFields) -> None:
    """Move the value of an old name to the new one, unless the new one is set to something else."""
    for old, setting in config.SETTINGS.items():
        new, value = setting.renamed_to, getattr(config, old)
        if new is None or value is None:
            continue
        if is_trl_default(old, value):  # in every configuration that TRL wrote
            setattr(config, old, None)
            continue
        warnings.warn(
            f"{old} is the old name of {new} and will be removed in the next release",
            FutureWarning,
            stacklevel=4,
        )
        if getattr(config, new) in (default_of(config, new), value):
            setattr(config, new, value)
            setattr(config, old, None)


def _device_type(use_cpu: bool) -> str:
    """Return the type of the device that ``Trainer`` will use, without initializing it."""
    if use_cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes"):
        return "cpu"
    if is_torch_xla_available():
        return "xla"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def computes_bf16_natively(device_type: str) -> bool:
    """Return True if the hardware computes bfloat16 instead of emulating it; False for unknown devices.

    CUDA: the current device. CPU: AVX512_BF16 or AMX.
    """
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type == "cpu":
        return has_native_bf16_cpu()
    return False


def resolve_precision(config: GRPOFields) -> None:
    """Resolve ``bf16=None``; call it before ``TrainingArguments`` derives ``mixed_precision`` from it."""
    # `accelerate launch --mixed_precision` sets only the environment of this process
    launched_with = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    device_type = _device_type(config.use_cpu)
    if config.bf16 is not None:
        config.use_cpu |= config.bf16 is True and device_type == "cpu"  # else TrainingArguments refuses bf16
        if not (config.bf16 or config.fp16) and launched_with != "no":
            warn_once(
                logger,
                "bf16=False does not turn off mixed_precision=%s of accelerate, in which the run trains; for "
                "float32, launch with --mixed_precision no, or write mixed_precision: 'no' in its file",
                launched_with,
            )
        return
    if config.fp16 or launched_with not in ("no", "bf16"):
        config.bf16 = False
        return
    config.bf16 = launched_with == "bf16" or computes_bf16_natively(device_type)
    if not config.bf16:
        warn_once(
            logger,
            "bf16 is off, training in float32: the %s device does not compute bfloat16 natively%s",
            device_type,
            "; fp16=True trains in half precision on it" if device_type == "cuda" else "",
        )
    elif device_type == "cpu":
        config.use_cpu = True  # TrainingArguments accepts bf16 on a CPU only with use_cpu


def resolve_trackers(config: GRPOFields) -> None:
    """Resolve ``report_to=None``; call it before ``TrainingArguments``, which has no such value."""
    if config.report_to is not None:
        return
    under_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    if under_ci or importlib.util.find_spec("trackio") is None:
        config.report_to = "none"
        return
    config.report_to = ["trackio"]
    if getattr(config, "trackio_static_space_id", False) is None:
        config.trackio_static_space_id = False  # with push_to_hub, None would upload the metrics too


def resolve_sampling(config: GRPOFields) -> None:
    """Move sampler arguments to the fields of the same meaning, which the trainer's log-probs use.

    Warns if a field is set to something else.
    """
    if not isinstance(config.generation_kwargs, dict):
        return
    others = dict(config.generation_kwargs)  # the caller's stay as they are
    for key, name in SAMPLING_FIELDS.items():
        if key not in others:
            continue
        value, given = others.pop(key), getattr(config, name)
        same = (value or 0) == (given or 0)  # None and 0 both mean off
        if not same and given != default_of(config, name):
            warn_once(logger, f"generation_kwargs[{key!r}]={shortened(value)} overrides {name}={given!r}")
        setattr(config, name, value)
    config.generation_kwargs = others or None


def resolve_defaults(config: GRPOFields) -> None:
    """Resolve settings from valid values only: an invalid value is reported once, under its own name."""
    if config.epsilon_high is None and _is_valid(config, "epsilon"):
        config.epsilon_high = DerivedFloat(config.epsilon)
    if config.num_generations_eval is None and _is_valid(config, "num_generations"):
        config.num_generations_eval = DerivedInt(config.num_generations)
    if config.top_k in (None, -1):  # -1: vLLM's value for off
        config.top_k = 0
    padding = str(config.pad_to_multiple_of).lower()
    if padding in ("auto", "none", "null"):
        # Neuron compiles once per shape; other devices gain nothing from padding.
        config.pad_to_multiple_of = 128 if padding == "auto" and config.device.type == "neuron" else None
    scale = str(config.scale_rewards).lower()
    if scale in ("true", "false"):
        config.scale_rewards = "group" if scale == "true" else "none"


def resolve_batch_sizes(config: GRPOFields) -> None:
    """Derive ``generation_batch_size`` or ``steps_per_generation`` from the other."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if not all(_is_valid(config, name) for name in (*names, "generation_batch_size", "steps_per_generation")):
        return
    if config.steps_per_generation is None and config.generation_batch_size is None:
        config.steps_per_generation = DerivedInt(config.gradient_accumulation_steps)
    micro_batch = config.completions_per_micro_batch
    size, steps = config.generation_batch_size, config.steps_per_generation
    if size is None and steps is not None:
        config.generation_batch_size = DerivedInt(micro_batch * steps)
    elif size is not None and steps is None and size % micro_batch == 0:
        config.steps_per_generation = DerivedInt(size // micro_batch)


def resolve_liger(config: GRPOFields) -> None:
    """Select the layer kernels of Liger, which ``Trainer`` applies to the model.

    They need Triton: all stay off unless the device is a GPU. Liger's cross-entropy stays off, because it
    replaces the model's forward.
    """
    if not config.use_liger_kernel:
        return
    given = config.liger_kernel_config or {}
    if config.device.type == "cuda":
        config.liger_kernel_config = {"fused_linear_cross_entropy": False, **given}
        return
    if any(given.values()):
        logger.warning("liger_kernel_config is ignored: Liger's layers need a GPU; its loss is used alone")
    from groupwise.compat.liger import layer_switches

    try:
        config.liger_kernel_config = dict.fromkeys(sorted(layer_switches()), False)
    except ImportError:  # named when the trainer is built
        return


def _is_valid(config: GRPOFields, name: str) -> bool:
    return config.SETTINGS[name].violation(name, getattr(config, name), None) is None
