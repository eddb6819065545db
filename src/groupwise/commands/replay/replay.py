"""Replay of recorded optimizer steps: the same updates from saved rollouts, without sampling and rewards."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoProcessor,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from groupwise.agents.start import EnvironmentRows
from groupwise.commands.replay.bundle import is_replayed, open_recording
from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.prompt_source import PromptSource
from groupwise.distributed import RankSlice
from groupwise.errors import ConfigError, boundary
from groupwise.generation.base import GenerationBackend
from groupwise.hf import checkpointing, run_directory
from groupwise.policy.introspection import has_adapter
from groupwise.random_state import get_state, set_state
from groupwise.records import Completion, Experience, MicroBatch, SamplerSettings
from groupwise.reporting.rollout_files import FOLDER, Recording, StepRecord, device, versions
from groupwise.trainer import GRPOTrainer

#: Attention of torch and of installed packages; any other name is code from the Hub.
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")

#: Fields of an adapter's configuration that a replay takes beside numbers: names of methods and of modules.
#: Others name files, code to import (``megatron_core``), or tokenizers that may have code.
_ADAPTER_NAMES = (
    *("peft_type", "task_type", "bias", "init_lora_weights", "init_weights", "target_modules"),
    *("exclude_modules", "target_parameters", "modules_to_save", "feedforward_modules"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "layer_replication"),
    "trainable_token_indices",
)

#: Largest difference from the record where bits may differ, relative to 1 or to the value if that is larger.
#: In bfloat16 twice the largest one (0.12, of a log-prob) between the AVX-512 and AVX2 kernels of a CPU.
BUDGETS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.25}

EQUAL = "equal, bit for bit"
#: Fields of a window in the order in which a step computes them.
_WINDOW = {
    "prompt_ids_BL": "prompt token",
    "completion_ids_BT": "token",
    "loss_mask_BT": "loss mask",
    "sampler_logps_BT": "sampler log-prob",
    "advantages_BX": "advantage",
    "old_logps_BT": "old log-prob",
    "ref_logps_BT": "reference log-prob",
    "token_weights_BT": "token weight",
}


@dataclass(frozen=True)
class Difference:
    """First value of a replayed step that differs from the record.

    quantity: kind of the value.
    place: row and token of the window, counted from 0, or name of the parameter.
    """

    quantity: str
    place: str
    recorded: float
    replayed: float

    def __str__(self) -> str:
        where = f" of {self.place}" if self.place else ""
        return f"{self.quantity}{where}: recorded {self.recorded:.9g}, replayed {self.replayed:.9g}"


@dataclass
class StepComparison:
    """Comparison of a replayed optimizer step with the record.

    step: number, counted from 1.
    budget: largest difference that is allowed; 0: none.
    first: first value outside of the budget, in the order of the computation; None: there is none.
    compared: number of compared values by quantity.
    deviations: largest difference by quantity, relative to values above the scale of the quantity.
    """

    step: int
    budget: float
    first: Difference | None = None
    compared: dict[str, int] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        quantity: str,
        recorded: torch.Tensor | None,
        replayed: torch.Tensor | None,
        place: Callable[[int], str] = lambda index: "",
        scale: float = 1.0,
    ) -> None:
        """Compare the values of two tensors; NaN equals NaN.

        Args:
            recorded, replayed: None: there are none.
            place: returns the place of a value by its position.
            scale: size of a value below which its difference is not relative to it.
        """
        if recorded is None or replayed is None or recorded.shape != replayed.shape:
            sizes = [math.nan if tensor is None else tensor.numel() for tensor in (recorded, replayed)]
            if self.first is None and (recorded is not None or replayed is not None):
                self.first = Difference(f"number of {quantity}s", "", *sizes)
            return
        one, other = recorded.double().flatten(), replayed.double().flatten()
        same = (one == other) | (one.isnan() & other.isnan())
        gap = torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        gap /= one.abs().nan_to_num(nan=0.0, posinf=0.0).clamp(min=scale)  # what the budget limits
        outside = (gap > self.budget).nonzero()
        if len(outside) and self.first is None:
            index = int(outside[0])
            self.first = Difference(quantity, place(index), one[index].item(), other[index].item())
        if len(gap):
            self.deviations[quantity] = max(self.deviations.get(quantity, 0.0), gap.max().item())
        self.compared[quantity] = self.compared.get(quantity, 0) + len(gap)

    def __str__(self) -> str:
        if self.first is not None:
            return f"step {self.step} diverges from the record at the {self.first}"
        values = ", ".join(
            f"{count} {name}{'s' * (count > 1)}" for name, count in self.compared.items() if count
        )
        if not any(self.deviations.values()):
            return f"step {self.step} equals the record, bit for bit: {values}"
        worst = max(self.deviations, key=lambda name: self.deviations[name])
        return (
            f"step {self.step} is within {self.budget:g} of the record: {values}; largest difference "
            f"{self.deviations[worst]:.2g} (relative to values above 1), of a {worst}"
        )


def compare(recorded: StepRecord, replayed: StepRecord, budget: float) -> StepComparison:
    """Compare a replayed step with the record, in the order in which a step computes its values.

    Args:
        budget: largest difference that is allowed; 0: none.
    """
    found = StepComparison(recorded.step, budget)
    if len(recorded.window) != len(replayed.window):
        found.first = Difference("number of micro-batches", "", len(recorded.window), len(replayed.window))
        return found
    for name, quantity in _WINDOW.items():
        for ours, theirs in zip(recorded.window, replayed.window, strict=True):
            found.add(quantity, getattr(ours, name), getattr(theirs, name), partial(_place, ours, name))
    by_row = logps_by_row(recorded), logps_by_row(replayed)
    for batch in recorded.window:
        for index, row in enumerate(batch.row_numbers()):
            tokens = batch.loss_mask_BT[index].nonzero().flatten()
            one, other = (of_rows[row][tokens] if row in of_rows else None for of_rows in by_row)
            found.add("log-prob", one, other, partial(_place_of_token, batch, index, tokens))
    found.add("loss", _float64([_loss(recorded)]), _float64([_loss(replayed)]))
    names = list(recorded.gradient_norms)
    norms, others = (_float64(step.gradient_norms.values()) for step in (recorded, replayed))
    found.add("gradient norm", norms, others, names.__getitem__, scale=float(norms.norm()))
    return found


def _float64(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def _loss(record: StepRecord) -> float:
    return math.fsum(part.loss for part in record.computed)


def _place(batch: MicroBatch, name: str, index: int) -> str:
    """Return the place of a value of a field (B, X) by its position."""
    row, token = divmod(index, getattr(batch, name).shape[1])
    if getattr(batch, name).shape[1] == 1 and name == "advantages_BX":  # one per row
        return f"row {batch.row_numbers()[row]} (prompt {int(batch.group_ids_B[row])})"
    return f"row {batch.row_numbers()[row]} (prompt {int(batch.group_ids_B[row])}), token {token}"


def _place_of_token(batch: MicroBatch, row: int, tokens: torch.Tensor, index: int) -> str:
    """Return the place of the log-prob ``index`` of a row of the micro-batch, by its loss tokens."""
    return _place(batch, "completion_ids_BT", row * batch.completion_ids_BT.shape[1] + int(tokens[index]))


def logps_by_row(record: StepRecord) -> dict[int, torch.Tensor]:
    """Return the log-probs (T,) of the forward passes by row of the window."""
    return {
        row: part.logps_BT[index]
        for part in record.computed
        if part.logps_BT is not None
        for index, row in enumerate(part.rows)
    }


class _RecordedSampler(GenerationBackend):
    """Backend of a replay, which never samples."""

    end_tokens = frozenset()
    supports_images = True

    def generate(self, prompts: Any, sampling: Any = None) -> list[Completion]:
        raise AssertionError("a replay reads its rollouts from files")

    def reports_sampling_mask(self, generation_kwargs: Mapping[str, Any]) -> bool:
        return True  # no warning here: whether they have it is in the record of each step


class RecordedSteps(GRPOTrainer):
    """Trainer whose generations come from a recording: it tokenizes, samples and rewards nothing.

    recording: rollouts of the run. Windows are made from generations again; those of a bundle, which has
        none, are taken as they were recorded.
    record: of the present step, or of another one if it failed after its generation; None: there is none.
    num_generations: generation batches of the present step.
    """

    recording: Recording
    record: StepRecord | None = None
    num_generations: int = 0

    def make_prompt_source(self) -> PromptSource:
        # Positions alone: no prompt is taken.
        return PromptSource(lambda epoch: repeat(None), RankSlice(1))

    def refresh_settings(self, *, new_run: bool = False) -> None:
        """Apply the settings of the step; those of the loss that the run's sampler decided are recorded."""
        super().refresh_settings(new_run=new_run)
        if (record := self.record) is not None:
            mode = self.args.vllm_importance_sampling_mode if record.corrects_for_sampler else None
            self.objective_settings = replace(
                self.objective_settings,
                vllm_importance_sampling_mode=mode,
                truncation_unknown=record.truncation_unknown,
            )

    def make_train_experience(self, sampler: SamplerSettings, *, on_policy: bool) -> list[Experience]:
        step, rank = self.state.global_step + 1, self.args.process_index
        if self.recording.is_bundle:
            assert self.record is not None
            names = [item.name for item in fields(Experience)]
            made = [Experience(**{name: getattr(b, name) for name in names}) for b in self.record.window]
            return [batch.to(self.accelerator.device) for batch in made]
        # A window may span several generations: their number counts within the step.
        generation = self.recording.generation(step, self.num_generations, rank)
        self.num_generations += 1
        self.call_callbacks("on_generation_end", rollouts=generation.rollouts, rewards=generation.rewards)
        _restore_generators(generation.rng)
        return self.make_experience(
            generation.rollouts,
            generation.rewards,
            self.args.per_device_train_batch_size,
            on_policy=on_policy,
        )


def _restore_generators(state: list[Any]) -> None:
    """Restore torch's generators, those of accelerators only if this process uses as many."""
    python, numpy, present = get_state()
    accelerators = state[1] if present[1] is not None and len(present[1]) == len(state[1] or ()) else None
    set_state((python, numpy, [state[0], accelerators]))


class _FollowRecord(TrainerCallback):
    """Apply the settings and learning rates of each recorded step, and stop after the last one."""

    def __init__(self, trainer: RecordedSteps, last: int) -> None:
        self.trainer, self.last = trainer, last

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.trainer.recording.is_bundle:  # it has one step, and the model the weights before it
            state.global_step = self.last - 1

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.num_generations = 0
        step, recording = state.global_step + 1, self.trainer.recording
        self.learning_rates: list[float] = []
        if step not in recording.steps:  # it failed after its generation
            return
        self.trainer.record = record = recording.step(step, self.trainer.args.process_index)
        self.learning_rates = record.learning_rates
        for name, value in record.settings.items():
            if is_replayed(name):
                setattr(args, name, value)
        _restore_generators(record.rng)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        for group, rate in zip(kwargs["optimizer"].param_groups, self.learning_rates, strict=False):
            group["lr"] = rate

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == self.last:
            control.should_training_stop = True


def replay_config(header: Mapping[str, Any], directory: str, *, trust_remote_code: bool) -> GRPOConfig:
    """Return the configuration of a replay: settings of the update, without files, services and sampling.

    Args:
        header: ``run.json`` of the recording. It may come from elsewhere: no setting of it loads code.
        directory: ``output_dir`` of the replay.
    """
    kept = {name: value for name, value in header["settings"].items() if is_replayed(name)}
    return GRPOConfig(
        **{
            **kept,
            "output_dir": directory,
            "max_steps": header["max_steps"],
            "logging_steps": 1,
            "save_strategy": "no",
            "eval_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "save_rollouts": True,
            "trust_remote_code": trust_remote_code,
        }
    )


@dataclass
class Replay:
    """Result of :func:`replay`.

    start: checkpoint or model that it started from.
    last_step: number of the last replayed step.
    steps: comparison of every step that has a record, with the rows of this rank.
    weights: comparison of the weights with the checkpoint after the last step; None: there is no such one.
    trainer: trainer with the weights after the last step.
    """

    start: str
    last_step: int
    steps: list[StepComparison]
    weights: str | None
    trainer: GRPOTrainer

    @property
    def equals_record(self) -> bool:
        """True if every step is within the budget, and the weights where their bits must be the same."""
        exact = any(step.budget == 0 for step in self.steps)
        return all(step.first is None for step in self.steps) and (not exact or self.weights in (None, EQUAL))

    @property
    def is_compared(self) -> bool:
        """True if the last step has a record; without one, its file is missing or the run ended in it."""
        return any(step.step == self.last_step for step in self.steps)


def replay(
    run: str | Path | Recording,
    step: int | None = None,
    *,
    model: Any = None,
    processing_class: Any = None,
    trainer_class: type[GRPOTrainer] = GRPOTrainer,
    tolerance: float | None = None,
    trust_remote_code: bool = False,
) -> Replay:
    """Repeat a recorded optimizer step and compare it with the record.

    The weights before the step come from the newest complete checkpoint before it, or from the initial model,
    and the steps in between are replayed too. With one recorded step alone (a bundle), they are ``model``.

    Args:
        run: ``output_dir`` of a run with ``save_rollouts=True``, or a bundle.
        step: optimizer step, counted from 1; None: the last recorded one.
        model: initial model of the run, a name or a loaded model; None: the recorded name.
        processing_class: tokenizer or processor; None: that of the checkpoint or model.
        trainer_class: class of the run's trainer, if it overrides advantages or the loss.
        tolerance: largest difference from the record; None: none on a CPU with the versions, threads and
            instructions of the run, else that of :data:`BUDGETS`.
        trust_remote_code: run code that is shipped with the model.

    Raises:
        ConfigError: the run has no rollouts or not those of the step, was trained by another number of
            processes, or its model cannot be loaded.
    """
    with (
        open_recording(run) as recording,
        tempfile.TemporaryDirectory(prefix="groupwise-replay-") as directory,
    ):
        header = recording.header
        _check_run(header)
        step = recording.last_step if step is None else step
        recording.check_step(step)
        checkpoint = None if recording.is_bundle else _checkpoint_before(recording, step)
        if model is None:
            model = _model_of(recording, step, checkpoint)
        has_tokenizer = checkpoint is not None and (checkpoint / "tokenizer_config.json").exists()
        if processing_class is None and has_tokenizer:
            processing_class = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        trainer = _build(
            *(recording, directory, model, processing_class, trainer_class),
            trust_remote_code=trust_remote_code,
        )
        trainer.add_callback(_FollowRecord(trainer, step))
        with _threads(header):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        made = Recording(Path(directory, FOLDER))
        rank = trainer.args.process_index
        budget = _budget(header, trainer) if tolerance is None else tolerance
        return Replay(
            start=str(checkpoint or (model if isinstance(model, str) else type(model).__name__)),
            last_step=step,
            steps=[
                compare(recording.step(number, rank), made.step(number, rank), budget)
                for number in recording.steps
                if number in made.steps
            ],
            weights=None if recording.is_bundle else _compare_weights(recording, step, trainer, directory),
            trainer=trainer,
        )


def _check_run(header: Mapping[str, Any]) -> None:
    """Refuse runs whose steps a replay would compute differently."""
    if header["sharded"]:
        raise ConfigError(
            "the run was trained with FSDP or DeepSpeed, whose steps cannot be replayed; its generations and "
            "steps are in the files"
        )
    if any(name.startswith("groupwise.trl_hooks.") for name in header["trainer"]):
        raise ConfigError(
            "the run was trained with groupwise.trl_hooks, whose hooks read the dataset and the rewards, so "
            "that its steps cannot be replayed; its generations are in the files"
        )
    given, needed = int(os.environ.get("WORLD_SIZE", 1)), header["world_size"]  # no process group exists yet
    if given != needed:
        raise ConfigError(
            f"the run was trained by {needed} processes, and the replay has {given}: rows move between "
            "processes, so that only as many can repeat a step; start it with `accelerate launch "
            f"--num_processes {needed} -m groupwise.cli replay …`"
        )


def _checkpoint_before(recording: Recording, step: int) -> Path | None:
    """Return the newest complete checkpoint from before ``step``."""
    found = run_directory.checkpoints(recording.folder.parent).items()  # the newest first
    return next((path for n, path in found if n < step and checkpointing.is_complete(path)), None)


def _model_of(recording: Recording, step: int, checkpoint: Path | None) -> str:
    """Return the name of the model to build the trainer with; a checkpoint is loaded over it."""
    header = recording.header
    needs_initial = header["adapter"] or header["settings"].get("beta")
    if checkpoint is not None and not needs_initial and (checkpoint / "config.json").exists():
        return str(checkpoint)  # the whole model, and no reference: the initial weights are not needed
    if recording.is_bundle and step > 1:
        raise ConfigError(
            f"the bundle has step {step} and not the weights before it; give --model with a directory of "
            f"them, such as checkpoint-{step - 1} of the run"
        )
    if not header["model"]:
        raise ConfigError("the run's model has no name; give --model with the initial model")
    return str(header["model"])


def _build(
    recording: Recording,
    directory: str,
    model: Any,
    processing_class: Any,
    trainer_class: type[GRPOTrainer],
    *,
    trust_remote_code: bool,
) -> RecordedSteps:
    header = recording.header
    config = replay_config(header, directory, trust_remote_code=trust_remote_code)
    if isinstance(model, str):
        attention = {"attn_implementation": header["attention"]} if header["attention"] in _ATTENTION else {}
        config.model_init_kwargs = {"dtype": header["dtype"], **attention}
    known = recording.steps
    attributes = {"recording": recording, "record": recording.step(known[0]) if known else None}
    kind: Any = type(f"Recorded{trainer_class.__name__}", (RecordedSteps, trainer_class), attributes)
    # Trainer counts the windows of an epoch by the length of the dataset; a stream has one epoch.
    of_stream = header["max_steps"] * config.gradient_accumulation_steps * config.prompts_per_batch
    trainer: RecordedSteps = kind(
        model,
        [_uncalled(name) for name in header["reward_funcs"]],
        config,
        train_dataset=EnvironmentRows(header["num_prompts"] or of_stream),  # of the length; not read,
        processing_class=processing_class,
        peft_config=None if has_adapter(model) else _adapter_config(header["adapter"]),
        rollout_func=_uncalled("rollout_func") if header["rollout_func"] else None,
        backend=_RecordedSampler(),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _uncalled(name: str) -> Any:
    def function(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"a replay reads the values of {name} from files")

    function.__name__ = name
    return function


def _adapter_config(values: Mapping[str, Any] | None) -> Any:
    if values is None:
        return None
    from peft import get_peft_config

    runtime = {"auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
    given = {name: value for name, value in values.items() if name not in runtime}
    taken = {name: v for name, v in given.items() if name in _ADAPTER_NAMES or isinstance(v, int | float)}
    with boundary(ConfigError, "the adapter's configuration of the recording"):
        config = get_peft_config(taken)
    default = config.to_dict()
    others = sorted(given.keys() - taken.keys())
    if changed := [name for name in others if values[name] != default.get(name)]:
        raise ConfigError(
            f"the recording's adapter sets {', '.join(changed)}, which may load code or files; a replay "
            "takes only numbers and names of modules. Pass a model with the adapter as model"
        )
    return config


@contextmanager
def _threads(header: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that computes with as many threads as the run: sums depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(header["device"].get("threads", before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _budget(header: Mapping[str, Any], trainer: GRPOTrainer) -> float:
    """Return 0 if the same bits are expected, else the budget of the precision."""
    now = device(trainer.accelerator.device)
    alike = {"type", "instructions"}
    same_device = all(header["device"].get(name) == now.get(name) for name in alike)
    if now["type"] == "cpu" and same_device and header["versions"] == versions():
        return 0.0
    half = trainer.args.bf16 or trainer.args.fp16
    return BUDGETS["bfloat16" if half else header["dtype"]]


def _compare_weights(recording: Recording, step: int, trainer: GRPOTrainer, directory: str) -> str | None:
    """Compare the weights with the run's checkpoint after ``step``; None if there is none.

    Returns:
        the first tensor that differs, or "equal, bit for bit".
    """
    checkpoint, ours = run_directory.checkpoints(recording.folder.parent).get(step), Path(directory, "after")
    if checkpoint is None:
        return None
    trainer.save_model(str(ours))  # by all ranks: they may share the parameters
    if not trainer.is_world_process_zero():
        return None
    for path in sorted(checkpoint.glob("*model*.safetensors")):
        with safe_open(path, framework="pt") as run, safe_open(ours / path.name, framework="pt") as replayed:
            for name in run.keys():  # noqa: SIM118 - safe_open is no mapping
                one, other = run.get_tensor(name), replayed.get_tensor(name)
                if not torch.equal(one, other):
                    gap = (one.float() - other.float()).abs().max().item()
                    return f"{name} differs by up to {gap:.2g}"
    return EQUAL
