"""Generations and optimizer steps of a run as files in ``<output_dir>/rollouts``, for ``groupwise replay``.

``docs/replay.md`` describes the format.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import logging
import os
import platform
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from groupwise.compat.transformers import attention_implementation
from groupwise.config.grpo_config import DerivedFloat, DerivedInt, GRPOConfig
from groupwise.config.redact import masked, redacted_json
from groupwise.config.settings import default_of
from groupwise.distributed import is_sharded
from groupwise.errors import ConfigError, log_boundary, shortened
from groupwise.files import read_json, replace_file
from groupwise.policy.introspection import adapters_of
from groupwise.random_state import get_state
from groupwise.records import ImageInputs, MicroBatch, RewardBatch, RolloutBatch
from groupwise.records.serialization import load, to_bytes
from groupwise.reporting.callback import GRPOCallback
from groupwise.reporting.metrics_file import earlier_path
from groupwise.reporting.table import plain_text

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Folder of the files in ``output_dir``, file of the run, and version of the format.
FOLDER, HEADER, FORMAT = "rollouts", "run.json", 1
#: ``step-000012.rank0.pt.gz``, ``generation-000012.0.rank0.pt.gz``: the optimizer step, counted from 1.
_FILE = re.compile(r"(step|generation)-(\d+)(?:\.(\d+))?\.rank(\d+)\.pt(\.gz)?")
#: Keys of ``run.json`` that a replay reads, and the types of their values.
_KEYS: dict[str, Any] = {
    **dict.fromkeys(("settings", "versions", "device"), dict),
    **dict.fromkeys(("format", "world_size", "max_steps"), int),
    **dict.fromkeys(("model", "dtype", "attention"), str | None),
    **{"adapter": dict | None, "trainer": list, "reward_funcs": list, "num_prompts": int | None},
    **{"sharded": bool, "rollout_func": bool},
}
#: Packages whose versions decide if a step can be repeated bit by bit.
_PACKAGES = ("groupwise", "torch", "transformers", "accelerate", "peft")


@dataclass(frozen=True)
class Generation:
    """Generation batch of one rank.

    rollouts: completions, without dataset rows and texts.
    rewards: rewards of all ranks.
    rng: states of torch's generators when it was complete.
    """

    rollouts: RolloutBatch
    rewards: RewardBatch
    rng: list[Any]


@dataclass(frozen=True)
class ComputedRows:
    """Forward pass of one micro-batch, in the order in which the run computed them.

    rows: positions of the rows in the window of all ranks.
    logps_BT: log-probs that the loss was computed from; None with Liger's loss.
    loss: its part of the loss of the window; on the device until the step ends, so that nothing waits for it.
    """

    rows: list[int]
    logps_BT: torch.Tensor | None
    loss: float | torch.Tensor


@dataclass
class StepRecord:
    """Optimizer step of one rank.

    step: number, counted from 1.
    rank, world_size: of the run.
    rng: states of torch's generators at the beginning of the step.
    window: micro-batches as they were sampled, with token weights; ``rows_B`` are positions in the window.
    computed: forward passes; rows without a gradient are in none.
    gradient_norms: norm of each parameter's gradient, clipped; empty if ranks share the parameters.
    learning_rates: of the optimizer's parameter groups; a callback may have set them.
    settings: settings that may change during a run.
    num_generations: generation batches that were sampled in the step; 0: it uses an earlier one.
    truncation_unknown, corrects_for_sampler: see :class:`groupwise.core.objectives.ObjectiveSettings`.
    """

    step: int
    rank: int
    world_size: int
    rng: list[Any]
    window: list[MicroBatch] = field(default_factory=list)
    computed: list[ComputedRows] = field(default_factory=list)
    gradient_norms: dict[str, float] = field(default_factory=dict)
    learning_rates: list[float] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    num_generations: int = 0
    truncation_unknown: bool = False
    corrects_for_sampler: bool = False


class RolloutFiles(GRPOCallback):
    """Write every generation before the policy is trained on it, and every completed optimizer step.

    A resumed run deletes the files of the steps that it repeats; a new run renames the folder of an earlier
    one. An error is logged as a warning, and the file is lost.

    Args:
        trainer: trainer of the run.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.folder = Path(str(trainer.args.output_dir), FOLDER).resolve()  # a link is not renamed
        self._begin_step()

    def _begin_step(self) -> None:
        args, step = self.trainer.args, self.trainer.state.global_step + 1
        self._record = StepRecord(step, args.process_index, args.world_size, get_state()[2])

    def on_generation_end(
        self,
        args: GRPOConfig,
        state: TrainerState,
        control: TrainerControl,
        rollouts: RolloutBatch,
        rewards: RewardBatch,
    ) -> None:
        part, step = self._record.num_generations, self._record.step
        self._record.num_generations += 1
        with log_boundary(logger, f"generation {part} of step {step} in {self.folder}"):
            images, digests = self._store_images(rollouts.images)
            record = Generation(
                replace(
                    rollouts,
                    rows=[{} for _ in rollouts.rows],
                    prompts=[plain_text(prompt, keep_blocks=True) for prompt in rollouts.prompts],
                    texts=[""] * len(rollouts),
                    extra={},
                    metrics={},
                    images=images,
                ),
                replace(rewards, columns={}, metrics={}),
                get_state()[2],
            )
            name = file_name("generation", step, args.process_index, part)
            self._write(name, {**vars(record), "images": digests})

    def on_window_begin(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, window: Sequence[MicroBatch]
    ) -> None:
        self._record.window = [replace(batch, images=_without_arrays(batch.images)) for batch in window]

    def on_loss(
        self,
        args: GRPOConfig,
        state: TrainerState,
        control: TrainerControl,
        batch: MicroBatch,
        logps_BT: torch.Tensor | None,
        loss: torch.Tensor,
    ) -> None:
        rows, logps_BT = batch.row_numbers(), None if logps_BT is None else logps_BT.detach().float()
        # Rows that come again, after an out-of-memory error, replace their earlier forward pass.
        others = [part for part in self._record.computed if set(rows).isdisjoint(part.rows)]
        self._record.computed = [*others, ComputedRows(rows, logps_BT, loss.detach())]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            with log_boundary(logger, str(self.folder / HEADER)):
                if state.global_step == 0 and self.folder.exists():
                    os.replace(self.folder, earlier_path(self.folder))
                for path in self.folder.glob("*.pt.gz"):
                    if (found := _FILE.fullmatch(path.name)) and int(found[2]) > state.global_step:
                        path.unlink()
                self.folder.mkdir(parents=True, exist_ok=True)
                replace_file(self.folder / HEADER, redacted_json(header(self.trainer)).encode())
        self.trainer.accelerator.wait_for_everyone()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begin_step()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._record.learning_rates = [float(group["lr"]) for group in kwargs["optimizer"].param_groups]
        if not is_sharded(self.trainer.accelerator):
            self._record.gradient_norms = gradient_norms(self.trainer.model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        record, settings = self._record, self.trainer.objective_settings
        record.settings = changeable(self.trainer.args)
        record.truncation_unknown = settings.truncation_unknown
        record.corrects_for_sampler = settings.vllm_importance_sampling_mode is not None
        with log_boundary(logger, f"step {record.step} in {self.folder}"):
            computed = [{**vars(rows), "loss": float(rows.loss)} for rows in record.computed]
            self._write(file_name("step", record.step, record.rank), {**vars(record), "computed": computed})

    # Files.

    def _write(self, name: str, values: dict[str, Any]) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, to_bytes(values, name.partition("-")[0], compressed=True))

    def _store_images(
        self, images: Sequence[ImageInputs] | None
    ) -> tuple[list[ImageInputs] | None, list[str] | None]:
        """Write images that no earlier generation had; return the rows without arrays, and their digests."""
        if images is None:
            return None, None
        for row in {id(row): row for row in images}.values():
            name = f"images/{row.digest}.pt.gz"
            if row.digest and not (self.folder / name).exists():
                self._write(name, dict(row.arrays))
        return list(_without_arrays(images) or ()), [row.digest for row in images]


def _without_arrays(images: Sequence[ImageInputs] | None) -> tuple[ImageInputs, ...] | None:
    return None if images is None else tuple(replace(row, arrays={}) for row in images)


def file_name(kind: str, step: int, rank: int, part: int | None = None) -> str:
    """Return the name of a file of :data:`FOLDER`."""
    return f"{kind}-{step:06d}{'' if part is None else f'.{part}'}.rank{rank}.pt.gz"


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Return the norm of the gradient of every parameter that has one."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norms = [torch.linalg.vector_norm(gradient.float()) for gradient in found.values()]
    return dict(zip(found, torch.stack(norms).tolist(), strict=True)) if norms else {}  # one transfer


def changeable(args: GRPOConfig) -> dict[str, Any]:
    """Return the settings that may change during a run, without credentials."""
    names = [name for name, setting in args.SETTINGS.items() if setting.changes in ("step", "generation")]
    return masked({name: _plain(getattr(args, name)) for name in names})


def _plain(value: Any) -> Any:
    """Return numbers that were derived from other settings as plain ones, and enums as their text."""
    if isinstance(value, DerivedInt | DerivedFloat):
        return int(value) if isinstance(value, int) else float(value)
    return getattr(value, "value", value)


def header(trainer: Any) -> dict[str, Any]:
    """Return settings that differ from their defaults, versions and names of a run, without credentials."""
    args, model, data = trainer.args, trainer.model, trainer.train_dataset
    settings = {}
    for item in fields(args):
        value = getattr(args, item.name)
        is_derived = isinstance(value, DerivedInt | DerivedFloat)  # derived again by another configuration
        if item.init and not is_derived and value != default_of(args, item.name):
            settings[item.name] = _plain(value)
    return {
        "format": FORMAT,
        "settings": settings,
        "versions": versions(),
        "device": device(trainer.accelerator.device),
        "model": model.config.name_or_path,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": attention_implementation(model),
        "adapter": next(map(_plain_adapter, adapters_of(model)), None),
        "trainer": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(trainer).__mro__[:-1]],
        "sharded": is_sharded(trainer.accelerator),
        "reward_funcs": list(trainer.reward_func_names),
        "rollout_func": trainer.rollout_func is not None,
        "world_size": args.world_size,
        "max_steps": trainer.state.max_steps,
        "num_prompts": len(data) if hasattr(data, "__len__") else None,  # None: a stream
    }


def _plain_adapter(config: Any) -> dict[str, Any]:
    values = {name: sorted(v) if isinstance(v, set) else v for name, v in config.to_dict().items()}
    return {name: value for name, value in values.items() if value is not None}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute a step."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def device(used: torch.device) -> dict[str, Any]:
    """Return the kind of device; on a CPU also the number of threads and the instruction set."""
    if used.type != "cpu":
        return {"type": used.type}
    return {
        "type": "cpu",
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


class Recording:
    """Rollouts of a run, as :class:`RolloutFiles` has written them.

    Args:
        folder: folder of the files.
        name: path in messages; default: the folder.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name or str(folder)

    @cached_property
    def header(self) -> dict[str, Any]:
        """Content of ``run.json``.

        Raises:
            ConfigError: the folder has no rollouts, or those of another format.
        """
        try:
            found: dict[str, Any] = read_json(self.folder / HEADER, {})
            if found.get("format") == FORMAT:
                return read_json(self.folder / HEADER, _KEYS)
        except FileNotFoundError:
            raise ConfigError(
                f"{str(self.folder)!r} has no {HEADER}: the run was not trained with save_rollouts=True"
            ) from None
        except ConfigError as error:
            raise ConfigError(f"{self.name!r} is damaged: {error}") from None
        raise ConfigError(
            f"{str(self.folder)!r} has rollouts of format {found.get('format')}, and this version of "
            f"groupwise reads format {FORMAT}; replay them with the version that wrote them: "
            f"{found.get('versions')}"
        )

    @property
    def is_bundle(self) -> bool:
        """True if it has one step alone, without checkpoints beside it."""
        return bool(self.header.get("bundle"))

    @property
    def last_step(self) -> int:
        """Last optimizer step with a complete record."""
        if not self.steps:
            raise ConfigError(f"{str(self.folder)!r} has no complete step; name the step")
        return self.steps[-1]

    @property
    def steps(self) -> list[int]:
        """Optimizer steps with a complete record."""
        found = [_FILE.fullmatch(path.name) for path in self.folder.iterdir()]
        return sorted({int(match[2]) for match in found if match and match[1] == "step"})

    def check_step(self, step: int) -> None:
        """Raise ConfigError if a step is not recorded, or by another number of ranks than the last ones."""
        if step not in self.steps and not any(self.folder.glob(file_name("generation", step, 0, 0))):
            raise ConfigError(f"step {step} is not recorded; recorded steps: {shortened(self.steps)}")
        ranks, now = len(list(self.folder.glob(f"step-{step:06d}.rank*"))), self.header["world_size"]
        if ranks not in (0, now):
            raise ConfigError(
                f"step {step} was recorded by {ranks} processes, before the run resumed with {now}: only "
                "later steps can be replayed"
            )

    def step(self, step: int, rank: int = 0) -> StepRecord:
        """Read an optimizer step."""

        def made(values: Any) -> StepRecord:
            computed = [ComputedRows(**rows) for rows in values["computed"]]
            record = StepRecord(**{**values, "computed": computed})
            return _checked(record, record.window, MicroBatch)

        return self._read(file_name("step", step, rank), made)

    def generation(self, step: int, part: int, rank: int = 0) -> Generation:
        """Read generation batch ``part`` of an optimizer step."""

        def made(values: Any) -> Generation:
            digests, rollouts = values.pop("images"), values["rollouts"]
            if digests is not None:
                known = {one: self._read(f"images/{one}.pt.gz", dict) if one else {} for one in {*digests}}
                images = [
                    replace(row, arrays=known[digest])
                    for row, digest in zip(rollouts.images, digests, strict=True)
                ]
                values["rollouts"] = replace(rollouts, images=images)
            record = Generation(**values)
            return _checked(record, [record.rollouts, record.rewards], RolloutBatch | RewardBatch)

        return self._read(file_name("generation", step, rank, part), made)

    def _read(self, name: str, made: Callable[[Any], T]) -> T:
        """Return what ``made`` makes of the content of a file.

        Raises:
            ConfigError: the file does not exist, or is damaged.
        """
        path = self.folder / name
        plain = path.with_suffix("")  # of a bundle, which compresses its files itself
        try:
            content = plain.read_bytes() if plain.exists() else gzip.decompress(path.read_bytes())
            return made(load(io.BytesIO(content)))
        except ConfigError:
            raise
        except FileNotFoundError:
            raise ConfigError(
                f"{str(path)!r} does not exist; recorded steps: {shortened(self.steps)}"
            ) from None
        except Exception as error:  # of gzip, zlib, pickle, torch: what a file of other bytes leads to
            shown = str(path) if self.name == str(self.folder) else f"{self.name}: {plain.name}"
            kind = type(error).__name__
            raise ConfigError(f"{shown!r} is damaged ({kind}: {error}); replay another step") from None


def _checked(record: T, parts: Sequence[Any], kind: Any) -> T:
    if not all(isinstance(part, kind) for part in parts):
        raise TypeError(f"parts of types {', '.join(sorted({type(part).__name__ for part in parts}))}")
    return record
