"""Checks of the trainer's class and arguments, before anything is loaded, and of its optimizer."""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import PreTrainedModel

from groupwise.compat import check_version
from groupwise.compat.trl import RENAMED_ARGUMENTS, TRL_DEFAULTS, TRL_HOOKS, TRL_VERSION, AbsentAttribute
from groupwise.config.grpo_config import GRPOConfig, resolve
from groupwise.config.settings import default_of, refuse_unknown
from groupwise.config.validation import unsupported_parallelism
from groupwise.errors import ConfigError, warn_once
from groupwise.policy.introspection import check_model

logger = logging.getLogger(__name__)

#: The oldest DeepSpeed whose updates were seen to be those of one process; the extra in pyproject.toml.
_OLDEST_DEEPSPEED = "0.19"

#: Methods with which a subclass can make columns, or rows, for the reward functions.
_MAKES_COLUMNS = (
    *("generate_rollouts", "compute_rewards", "get_train_dataloader", "_prepare_inputs", "_generate"),
    *("_generate_and_score_completions", "_generate_single_turn", "_calculate_rewards"),
)

#: Modules of which a script written for TRL imports one.
_TRL = frozenset({"trl", "groupwise.trl_hooks"})

#: Prefixes of local paths; a hub id has none of them.
_LOCAL = ("/", "./", "../", "~")


def model_name(model: str | PreTrainedModel) -> str:
    """Return the last component of a model's hub id or directory."""
    path = model if isinstance(model, str) else model.config.name_or_path
    return os.path.basename(os.path.normpath(path)) if path else type(model).__name__


def check_methods(trainer: object, refused: Mapping[str, str], way_out: str) -> None:
    """Refuse methods that would be ignored: of a subclass, or set on the instance or on the library's class.

    Args:
        refused: method to override or call instead, by name of the method that is not called.
        way_out: end of the message.

    Raises:
        ConfigError: an override of one of the methods ``refused``.
    """
    found = [f"{name} (here: {refused[name]})" for name in refused if is_overridden(trainer, name)]
    if found:
        raise ConfigError(
            f"{type(trainer).__name__} defines {', '.join(found)}, which this trainer never calls: override "
            f"the named methods instead, or rename your own helper. {way_out}"
        )


def with_known_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate the trainer's constructor: refuse unknown names, with the nearest one or where they belong."""
    known, settings = inspect.signature(init).parameters, GRPOConfig.__dataclass_fields__
    way_out = "pass it to GRPOConfig"

    @functools.wraps(init)
    def checked(self: object, *args: Any, **kwargs: Any) -> None:
        given = {
            f"argument {name!r}": (name, RENAMED_ARGUMENTS.get(name) or way_out * (name in settings))
            for name in kwargs
            if name not in known
        }
        refuse_unknown(given, known, f"arguments of {type(self).__name__}")
        init(self, *args, **kwargs)

    return checked


def check_source(trainer: object) -> None:
    """Refuse a subclass that reads what only TRL's trainer has, where its source can be read.

    Elsewhere, and for a name that the subclass assigns or asks for as text, the error comes when it is read.

    Raises:
        ConfigError: the first such name, with its counterpart.
    """
    kind, nodes = type(trainer).__name__, list[ast.AST]()
    for base in type(trainer).__mro__:
        if base.__module__.partition(".")[0] not in ("groupwise", "transformers", "builtins"):
            with suppress(OSError, TypeError, SyntaxError):  # typed into a shell
                nodes += ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base))))
    selves = _names(nodes, "self")
    own = [node for node in nodes if isinstance(node, ast.Attribute) and node.value in selves]
    known: set[object] = {node.attr for node in own if isinstance(node.ctx, ast.Store)}
    known |= {node.value for node in nodes if isinstance(node, ast.Constant)}  # hasattr(self, "_metrics")
    for name in {node.attr: None for node in own if node.attr not in known}:
        absent = inspect.getattr_static(type(trainer), name, None)
        if isinstance(absent, AbsentAttribute):
            raise ConfigError(f"{kind} reads self.{name}, which does not exist; use {absent.way_out}")
    for loss in nodes:
        if isinstance(loss, ast.FunctionDef) and loss.name == "compute_loss" and len(loss.args.args) > 2:
            record, inside = loss.args.args[2].arg, [*ast.walk(loss)]
            names = _names(inside, record)
            keys = [node for node in inside if isinstance(node, ast.Subscript) and node.value in names]
            if keys and all(isinstance(name.ctx, ast.Load) for name in names):
                raise ConfigError(
                    f"{kind}.compute_loss reads {ast.unparse(keys[0])}, but {record} is a MicroBatch, whose "
                    f"fields are attributes: {record}.completion_mask_BT. A subclass written for TRL: "
                    f"{TRL_HOOKS}"
                )


def _names(nodes: Iterable[ast.AST], name: str) -> list[ast.Name]:
    return [node for node in nodes if isinstance(node, ast.Name) and node.id == name]


def rewards_read_rows(trainer: object) -> bool:
    """Return True if no method of a subclass may add columns to the rows that reward functions get."""
    return not any(is_overridden(trainer, name) for name in _MAKES_COLUMNS)


def is_overridden(trainer: object, name: str) -> bool:
    """Return True if the attribute of this name is not that of this library or of transformers."""
    if name in vars(trainer):
        return True
    owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
    if owner is None:
        return False
    value = vars(owner)[name]
    function = getattr(value, "__func__", value)  # of a static method
    modules = owner.__module__, getattr(function, "__module__", None) or type(function).__module__
    return not all(module.partition(".")[0] in ("groupwise", "transformers") for module in modules)


def check_arguments(
    model: str | PreTrainedModel, args: GRPOConfig | None, config_class: type[GRPOConfig] = GRPOConfig
) -> GRPOConfig:
    """Return the configuration of the trainer: ``args``, or the defaults of ``config_class`` if it is None.

    Raises:
        ConfigError: ``args`` or the model has another type or a wrapper, its directory does not exist, or
            the output directory is not writable; a setting is invalid; or an old DeepSpeed is installed.
    """
    if not isinstance(model, str):
        check_model(model, "model")
    if args is None:
        args = config_class(f"{model_name(model)}-GRPO")
    if not isinstance(args, GRPOConfig):
        raise ConfigError(
            f"args is a {type(args).__module__}.{type(args).__name__}; it must be a groupwise.GRPOConfig "
            "(order of the arguments: model, reward_funcs, args, train_dataset)"
        )
    resolve(args)  # scripts assign fields after it was built
    if not _TRL.isdisjoint(sys.modules):  # else a script that was not written for TRL
        warn_of_defaults(args, args.given)
    if isinstance(model, str) and model.startswith(_LOCAL) and not Path(model).is_dir():
        raise ConfigError(f"model={model!r} is not a directory; give a checkpoint directory or a hub id")
    if args.should_save and args.output_dir is not None:
        _check_writable(args.output_dir)
    # The map that spreads the model over the devices of this process.
    device_map = getattr(model, "hf_device_map", None)
    if isinstance(model, str):
        device_map = cast("dict[str, Any]", args.model_init_kwargs or {}).get("device_map")
    if device_map is None:
        check_processes(args)
    if args.deepspeed_plugin is not None:
        check_version(
            "deepspeed",
            _OLDEST_DEEPSPEED,
            "training with DeepSpeed",
            "with which ZeRO-2 was seen to update embeddings wrongly, or to fail; upgrade it",
        )
    return args


def warn_of_defaults(args: GRPOConfig, given: Collection[str]) -> None:
    """Warn, once, about fields that are left at a default other than TRL's, as far as they have an effect.

    Args:
        given: settings that were not left; all fields, as of a parsed configuration, count as none.
    """
    left = TRL_DEFAULTS.keys() - (() if args.SETTINGS.keys() <= {*given} else given)
    found = []
    for name in sorted(left):
        value, unless = getattr(args, name), args.SETTINGS[name].no_effect_unless
        if value == default_of(args, name) != TRL_DEFAULTS[name] and (unless is None or unless.holds(args)):
            found.append(f"{name}={value!r} (TRL: {TRL_DEFAULTS[name]!r})")
    if found:
        warn_once(
            logger,
            "left at a default that differs from that of TRL %s: %s; set it, or take GRPOConfig from "
            "groupwise.trl_hooks, which has TRL's defaults",
            *(TRL_VERSION, ", ".join(found)),
        )


def warn_of_rollout_settings(
    args: GRPOConfig, requests_known: bool, placeholder_logps: bool, agents: object | None
) -> None:
    """Warn about settings of sampling that have no effect on the rollouts of this trainer.

    Args:
        requests_known: the trainer makes the requests to the backend, as without a ``rollout_func``.
        placeholder_logps: log-probs of completions may be placeholders, as with a ``rollout_func``.
        agents: multi-turn rollouts with tools or environments; None: there are none.
    """
    if args.rollout_credit != "rollout" and requests_known and agents is None:
        logger.warning(
            "rollout_credit=%r has no effect without a rollout_func, tools or environments: each rollout is "
            "one row",
            args.rollout_credit,
        )
    if args.rollout_staleness and not requests_known:
        logger.warning(
            "rollout_staleness=%d has no effect with a rollout_func (a captured agent and an environment of "
            "verifiers are one), which does not say which weights sampled each token",
            args.rollout_staleness,
        )
    if args.rollout_func_importance_sampling_correction and not placeholder_logps:
        logger.warning(
            "rollout_func_importance_sampling_correction=True has no effect without a rollout_func"
        )


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer below the wrapper of accelerate."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def averages_weights(optimizer: Any) -> bool:
    """Return True for an optimizer that evaluates averages of the weights that it trains (schedule-free)."""
    inner = unwrapped_optimizer(optimizer)
    return any(callable(getattr(part, "train", None)) for part in (inner, getattr(inner, "optimizer", None)))


def check_optimizer(
    optimizer: Any, parameters: Iterable[tuple[str, torch.nn.Parameter]], scheduler: Any = None
) -> None:
    """Check that an optimizer holds what is trained, by name; warn of parameters that do not change.

    Raises:
        ConfigError: it holds no trained parameter, or the scheduler is that of another optimizer.
    """
    if unwrapped_optimizer(getattr(scheduler, "optimizer", optimizer)) is not unwrapped_optimizer(optimizer):
        raise ConfigError("the scheduler of optimizers belongs to an optimizer that is not there; pass both")
    groups = getattr(optimizer, "param_groups", [])
    held = {id(parameter) for group in groups for parameter in group["params"]}
    trained = [(name, id(parameter)) for name, parameter in parameters if parameter.requires_grad]
    missing = [name for name, parameter in trained if parameter not in held]
    # A layer-wise optimizer of transformers has one for every parameter, in a dictionary.
    if held and missing and not hasattr(unwrapped_optimizer(optimizer), "optimizer_dict"):
        found = (
            f"the optimizer lacks {len(missing)} of {len(trained)} trained parameters, such as {missing[0]}, "
            "which would not change; build it after the adapter, from the parameters that require a gradient"
        )
        if len(missing) == len(trained):
            raise ConfigError(found)
        warn_once(logger, found)
    for group in groups:
        dtypes = {parameter.dtype for parameter in group["params"] if parameter.requires_grad}
        for dtype in dtypes & {torch.bfloat16, torch.float16}:
            lost = f"an update of less than 1/{round(4 / torch.finfo(dtype).eps)} of a weight changes nothing"
            if isinstance(eps := group.get("eps"), float) and torch.tensor(eps, dtype=dtype) == 0:
                lost += f", and eps={eps} of the optimizer is 0, so that a small gradient makes a huge update"
            warn_once(
                logger,
                "trained parameters are %s without a copy in float32: %s; load the model in float32 (dtype "
                "in model_init_kwargs) with bf16=True to compute in bfloat16, or train an adapter in float32",
                *(str(dtype).removeprefix("torch."), lost),
            )


def check_processes(args: GRPOConfig, parallelism: object = None) -> None:
    """Check that every device has a process, and that no sequence or layer is split over processes.

    Args:
        parallelism: ``ParallelismConfig`` of accelerate, which the launcher may have set.

    Raises:
        ConfigError: ``Trainer`` would use several GPUs through ``DataParallel``, which splits micro-batches
            and drops their token weights; or a split that is not supported.
    """
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process sees {args.n_gpu} GPUs, and training uses one process per GPU; start it with "
            f"`accelerate launch --num_processes {args.n_gpu} SCRIPT`, or show the process one GPU with "
            "CUDA_VISIBLE_DEVICES=0"
        )
    for message in unsupported_parallelism(parallelism):
        raise ConfigError(message)


def _check_writable(directory: str) -> None:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError(
            f"output_dir={directory!r} cannot be created ({cause}); choose another one"
        ) from cause
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={directory!r} is not writable; choose another one")
