"""Sweep: several configurations trained side by side on one base model."""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_utils import SaveStrategy

from groupwise.commands.sweeps.adapters import check_adapter, has_finite_adapter, shared_copy
from groupwise.commands.sweeps.commands import answer_commands, sweep_lock
from groupwise.commands.sweeps.sampler import PolicySampler
from groupwise.commands.sweeps.turns import ClosedError, TurnThread, preserved_accelerate
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import chosen_backend, json_dict
from groupwise.config.settings import OPTIMIZER_STATE, TRAINER_STATE
from groupwise.data.dataset_checks import has_image_columns
from groupwise.errors import BackendError, ConfigError, GroupwiseError, is_interrupt, nearest_name
from groupwise.generation.backends import check_backend
from groupwise.hf.run_directory import checkpoints
from groupwise.policy.introspection import check_model, has_adapter
from groupwise.policy.loading import load_policy, load_processing_class
from groupwise.random_state import preserved_state
from groupwise.registry import Registry
from groupwise.reporting.terminal import print_rich
from groupwise.threads import EventLoop
from groupwise.trainer import GRPOTrainer

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

logger = logging.getLogger(__name__)

#: Settings of the base model and of its forward passes, which runs that share it must have in common.
COMMON = (
    *("model_init_kwargs", "trust_remote_code", "bf16", "fp16", "use_cpu", "use_liger_kernel"),
    *("use_vllm", "vllm_mode", "vllm_model_impl", "vllm_engine_kwargs"),
    *("vllm_gpu_memory_utilization", "vllm_max_model_length"),
)
#: Settings that runs in one process cannot have, with the value they must have.
REFUSED: dict[str, Any] = {
    **{"vllm_enable_sleep_mode": False, "torch_compile": False, "cast_lm_head_to_fp32": False},
    **{"deepspeed": None, "fsdp": [], "enable_jit_checkpoint": False, "auto_find_batch_size": False},
}
#: ``Setting.on_resume`` of settings whose value in a checkpoint acts.
_OF_CHECKPOINT = (OPTIMIZER_STATE, TRAINER_STATE)
#: Samplers by the name of the backend that a run on its own has.
SAMPLERS: Registry[Any] = Registry(
    "sampler",
    {
        "transformers": PolicySampler,
        "server": "groupwise.commands.sweeps.vllm:ServerSampler",  # needs httpx
        "colocate": "groupwise.commands.sweeps.vllm:EngineSampler",
    },
)
#: Trackers with a run for each trainer of a process; the others have one for the process.
TRACKERS = ("none", "tensorboard", "trackio")
#: Statuses of the run in which it takes a command; "stopping": until its next optimizer step.
COMMANDS = {
    "stop": ("waiting", "running", "stopping"),
    "resume": ("stopping", "stopped"),
    "clone": ("waiting", "running", "stopping", "stopped"),
}


@dataclass
class SweepRun:
    """One run of a sweep.

    name: also that of its output directory, in the directory of the sweep.
    args: configuration.
    reward_funcs: as in ``GRPOTrainer``.
    peft_config: its LoRA adapter; None: all weights are trained, after the runs with adapters.
    status: "waiting" for its first turn, "running", "stopping", "stopped", "finished" or "failed".
    error: exception of a failed run.
    trainer: None before and after the turn of a run without an adapter.
    state: of its trainer, also after the end.
    """

    name: str
    args: GRPOConfig
    reward_funcs: Any
    peft_config: PeftConfig | None
    status: str = "waiting"
    error: BaseException | None = None
    trainer: GRPOTrainer | None = None
    state: TrainerState = field(default_factory=TrainerState)
    resume_from: str | bool | None = None
    thread: TurnThread | None = None
    request: Any = None  # it waits for these completions
    answer: Any = None  # of its request, for its next turn
    clones: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # requested: name and changes
    learning_rate_factor: float = 1.0  # of a clone, beside the schedule in the checkpoint

    @property
    def shares_base(self) -> bool:
        return self.peft_config is not None

    @property
    def is_active(self) -> bool:
        return self.status in ("waiting", "running", "stopping")

    def train(self) -> None:
        """Body of the thread: train, and save the last adapter in the output directory."""
        assert self.trainer is not None
        self.trainer.train(resume_from_checkpoint=self.resume_from)
        if not self.trainer.run_directory.has_result():
            self.trainer.save_model()

    def save_step(self) -> None:
        """Write a checkpoint of the last optimizer step, in the thread that waits, or raise its error."""
        assert self.thread is not None and self.trainer is not None
        error = self.thread.advance(self.trainer.save_last_completed_step) or self.thread.error
        if error is not None:
            raise error


class Sweep:
    """Runs with different settings on one base model, each an ordinary ``GRPOTrainer``.

    Runs with a LoRA adapter share the frozen weights of the base model and one sampler: a round computes
    the pending optimizer step of every run, one run at a time, then decodes the completions of all runs as
    one batch, also in a colocated vLLM engine (``use_vllm``). A vLLM server samples for the others while a
    run computes. The history of a run is that of the run on its own. Runs without an adapter follow one
    after the other.

    Args:
        model: as in ``GRPOTrainer``; a model object without an adapter.
        reward_funcs: as in ``GRPOTrainer``, or a dictionary of such by run.
        runs: configurations by name. The output directory of a run is ``<directory of the sweep>/<name>``.
        train_dataset: as in ``GRPOTrainer``.
        eval_dataset: the same.
        processing_class: the same.
        peft_config: the adapter of all runs, or a dictionary by run, in which None trains all weights.

    Raises:
        ConfigError: settings that runs in one process cannot have, or that the shared sampler does not
            support, before anything is loaded; or settings of a run that cannot be trained with.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any,
        runs: Mapping[str, GRPOConfig],
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: PeftConfig | Mapping[str, PeftConfig | None] | None = None,
    ) -> None:
        self.model = model
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.event_loop = EventLoop("groupwise-user-code")
        weakref.finalize(self, self.event_loop.close)
        if not (isinstance(reward_funcs, Mapping) and reward_funcs.keys() <= runs.keys()):  # maybe by source
            reward_funcs = dict.fromkeys(runs, reward_funcs)
        if not isinstance(peft_config, Mapping):
            peft_config = dict.fromkeys(runs, peft_config)
        self.runs = {
            name: SweepRun(name, args, reward_funcs.get(name), peft_config.get(name))
            for name, args in runs.items()
        }
        self.directory = self._check()
        first = next(iter(self.runs.values())).args
        self.processing_class = load_processing_class(processing_class, model, first)
        self._rounds = 0
        shared = [run for run in self.runs.values() if run.shares_base]
        if shared:
            self._base = load_policy(model, shared[0].args).to(shared[0].args.device)  # type: ignore[arg-type]
            given = [(run.args, run.peft_config) for run in shared]
            make = SAMPLERS[chosen_backend(shared[0].args)]
            self.sampler = make(self._base, given, self.processing_class)
            for run in shared:
                self._build(run)
            self.sampler.prepare(cast(GRPOTrainer, shared[0].trainer).accelerator)
        if len(shared) < len(self.runs):
            alone = [run.name for run in self.runs.values() if not run.shares_base]
            logger.warning("without an adapter, trained one after the other: %s", ", ".join(alone))

    def _check(self) -> Path:
        """Check what can be checked before anything is loaded; returns the directory of the sweep."""
        if not self.runs:
            raise ConfigError(
                "runs={} is empty; give a configuration by name, such as {'low': GRPOConfig(…)}"
            )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError("a sweep is one process on one device; start it without accelerate launch")
        if not isinstance(self.model, str):
            check_model(self.model, "model")
        if has_adapter(self.model):
            raise ConfigError("the model of a sweep has an adapter; pass the base model and peft_config")
        first, shared = next(iter(self.runs.values())), [run for run in self.runs.values() if run.shares_base]
        directory = Path(str(first.args.output_dir)).parent
        for run in self.runs.values():
            _check_run(run, directory)
        for name in COMMON:
            values = {run.name: getattr(run.args, name) for run in shared}
            if any(value != values[shared[0].name] for value in values.values()):
                raise ConfigError(f"{name} must be the same for all runs that share a base model: {values}")
        for name, reader in (("hub_model_id", "push_to_hub"), ("run_name", "report_to")):
            used = [getattr(run.args, name) for run in self.runs.values() if getattr(run.args, reader)]
            if any(used.count(value) > 1 for value in used if value):
                raise ConfigError(f"{name} must differ between runs with {reader}, or be left out: {used}")
        if shared and has_image_columns(self.train_dataset, self.eval_dataset):
            raise ConfigError("a dataset has a column of images; the shared sampler samples from text alone")
        return directory

    def _build(self, run: SweepRun) -> None:
        """Build the trainer of a run and its thread, which begins with the random state of a run alone."""
        if run.shares_base:
            model: Any = shared_copy(self._base)
            backend = self.sampler.make_backend(run.args, run.peft_config)
        else:
            model, backend = self.model if isinstance(self.model, str) else copy.deepcopy(self.model), None
        run.trainer = GRPOTrainer(
            model,
            run.reward_funcs,
            run.args,
            self.train_dataset,
            self.eval_dataset,
            self.processing_class,
            peft_config=run.peft_config,
            backend=backend,
        )
        run.trainer.event_loop = self.event_loop  # runs may share an async reward with its client
        run.thread = TurnThread(run.name, run.train)
        if backend is not None:
            backend.thread = run.thread
            self.sampler.check(backend, _policy(run))
        for printed in (PrinterCallback, ProgressCallback):  # the lines of all runs would alternate
            run.trainer.pop_callback(printed)
        run.trainer.add_callback(_StepTurns(run))

    # The schedule.

    def run(self, resume_from_checkpoint: bool | None = None) -> dict[str, SweepRun]:
        """Train all runs to their end; returns them by name.

        A run that fails, also while it is built, saved or cloned, is reported, and the others go on. The
        sweep ends when no run is active: stopped runs have a checkpoint then, unless their ``save_strategy``
        is "no".

        Args:
            resume_from_checkpoint: True: every run continues from its newest checkpoint, if it has one;
                so does a clone of an earlier sweep that is given as a run, under its name.

        Raises:
            Exception: of the first run, if all runs failed.
        """
        with preserved_state(), preserved_accelerate(), sweep_lock(self.directory):
            try:
                if resume_from_checkpoint:
                    self._resume()
                while any(run.is_active or run.clones for run in self.runs.values()):
                    self._compute_round()
                    answer_commands(self.directory, self._execute)
            finally:
                for run in self.runs.values():
                    if run.thread is not None:
                        run.thread.close()
        failed = [run for run in self.runs.values() if run.error is not None]
        if len(failed) == len(self.runs):
            raise cast(BaseException, failed[0].error)
        return self.runs

    def _resume(self) -> None:
        for run in self.runs.values():
            run.resume_from = bool(checkpoints(Path(str(run.args.output_dir)))) or None
        own = {Path(str(run.args.output_dir)) for run in self.runs.values()}
        for path in sorted(set(self.directory.iterdir()) - own):
            if checkpoints(path):  # a clone of an earlier process
                logger.warning("%s does not continue: list it as a run with its name and settings", path)

    @contextmanager
    def _boundary(self, run: SweepRun) -> Iterator[None]:
        """Run a block for one run: whatever it raises fails this run alone; interrupts pass."""
        try:
            yield
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._end(run, error)

    def _end(self, run: SweepRun, error: BaseException | None) -> None:
        run.status, run.error, run.request = "finished" if error is None else "failed", error, None
        if error is not None:
            logger.error("run %r failed: %s: %s", run.name, type(error).__name__, error)
        for name, _ in run.clones:
            logger.error("run %r was not started: %r ended before its next optimizer step", name, run.name)
        run.clones = []
        if run.thread is not None:
            run.thread.close()
        if not run.shares_base:
            run.trainer = None  # the next one needs the memory

    def _compute_round(self) -> None:
        """Advance the runs with adapters to their next completions; without any, another run by a step."""
        for run in [run for run in self.runs.values() if run.status == "stopped"]:
            self._start_clones(run)
        active = [run for run in self.runs.values() if run.is_active and run.shares_base]
        for run in [] if active else [run for run in self.runs.values() if run.is_active][:1]:
            with self._boundary(run):
                if run.trainer is None:
                    self._build(run)
                self._advance(run)
        for run in active:
            with self._boundary(run):
                while run.is_active and run.request is None:
                    self._advance(run)
        waiting = [run for run in active if run.request is not None]
        for run in [run for run in waiting if not has_finite_adapter(_policy(run))]:
            error = BackendError("the adapter's weights are NaN or infinite, so no token can be sampled")
            run.request, run.answer = None, error
            waiting.remove(run)
        for run, answer in zip(waiting, self._sample(waiting) if waiting else [], strict=True):
            run.request, run.answer = None, answer
        self._rounds += 1
        print_rich(self.table_line(), soft_wrap=True)

    def _sample(self, runs: list[SweepRun]) -> list[Any]:
        """Return the completions that each run waits for, or the error that is raised in it."""
        try:
            policies = {run.name: _policy(run) for run in runs}
            return self.sampler.sample([run.request for run in runs], policies)
        except Exception as error:  # of a setting of one run, of an engine, or out of memory
            if len(runs) == 1:
                return [error]
            logger.warning("runs are sampled one by one in this round: their batch failed with %r", error)
            return [self._sample([run])[0] for run in runs]

    def _advance(self, run: SweepRun) -> None:
        """Give a turn to a run, until it asks for completions, begins an optimizer step or ends."""
        thread, trainer = cast(TurnThread, run.thread), cast(GRPOTrainer, run.trainer)
        if run.status == "waiting":
            run.status = "running"
        answer, run.answer = run.answer, None
        run.request = thread.advance(answer)
        run.state = trainer.state
        if thread.has_ended:
            self._end(run, None if isinstance(thread.error, ClosedError) else thread.error)
        elif run.request is None:  # at the beginning of a step
            self._start_clones(run)
            if run.status == "stopping":
                with self._boundary(run):
                    run.save_step()
                    run.status = "stopped"

    def _start_clones(self, run: SweepRun) -> None:
        """Start the requested copies of a run that is at the beginning of an optimizer step."""
        requested, run.clones = run.clones, []
        for name, changes in requested:
            self._add_clone(run, name, changes)

    def _add_clone(self, run: SweepRun, name: str, changes: Mapping[str, Any]) -> None:
        """Build a copy of a run with changes; a failed run if that is not possible."""
        clone = self.runs[name] = SweepRun(name, run.args, run.reward_funcs, run.peft_config)
        with self._boundary(clone):
            clone.args, step = self._clone_settings(run, name, changes), run.state.global_step
            if step:
                run.save_step()
                clone.resume_from = str(checkpoints(Path(str(run.args.output_dir)))[step])
                if clone.args.learning_rate != run.args.learning_rate:
                    clone.learning_rate_factor = clone.args.learning_rate / run.args.learning_rate
            self._build(clone)
            cast(GRPOTrainer, clone.trainer).applied_on_resume = {"learning_rate"}

    def _clone_settings(self, run: SweepRun, name: str, changes: Mapping[str, Any]) -> GRPOConfig:
        """Return the settings of a run with changes; call it in the thread of the scheduler."""
        own = {"output_dir": str(self.directory / name), "run_name": name, "hub_model_id": None}
        step = run.state.global_step
        try:
            with preserved_accelerate():
                args = replace(run.args, **{**own, **changes})
            _check_run(SweepRun(name, args, run.reward_funcs, run.peft_config), self.directory)
        except GroupwiseError:
            raise
        except Exception as error:  # transformers raises many types for values that it does not know
            raise ConfigError(f"settings of run {name!r}: {type(error).__name__}: {error}") from error
        if 0 < args.max_steps <= step:
            raise ConfigError(
                f"run {name!r} has max_steps={args.max_steps}, and {run.name!r} is at step {step} already; "
                f"nearest valid: {step + 1}"
            )
        if step and not run.args.learning_rate and args.learning_rate:
            raise ConfigError(
                f"learning_rate={args.learning_rate} of {name!r} would scale the schedule of {run.name!r}, "
                "whose learning_rate is 0; clone a run with another one"
            )
        return args

    def table_line(self) -> str:
        """Return a line with step and newest reward of every run."""
        cells = []
        for run in self.runs.values():
            rewards = [log["reward"] for log in run.state.log_history if isinstance(log.get("reward"), float)]
            reward = f"{rewards[-1]:.3f}" if rewards else "-"
            status = "" if run.status == "running" else f" {run.status}"
            cells.append(f"{run.name} {run.state.global_step}: {reward}{status}")
        return f"{self._rounds:>5}  " + "  ".join(f"{cell:<{len(cell.split(':')[0]) + 8}}" for cell in cells)

    # Controls, from Python (a callback, another thread) and from another process.

    def stop(self, name: str) -> str:
        """Stop a run at the beginning of its next optimizer step; it keeps its state and a checkpoint.

        Raises:
            ConfigError: no such run, or it is not active.
        """
        run = self._find(name, "stop")
        run.status = "stopping"
        return f"{name} stops after optimizer step {run.state.global_step} or the one that is computed"

    def resume(self, name: str) -> str:
        """Continue a stopped run exactly where it was stopped.

        Raises:
            ConfigError: no such run, or it is not stopped.
        """
        run = self._find(name, "resume")
        run.status = "running"
        return f"{name} continues at optimizer step {run.state.global_step}"

    def clone(self, name: str, new_name: str, **changes: Any) -> str:
        """Start a copy of a run at its next optimizer step: its adapter and optimizer, with changed settings.

        The copy resumes from a checkpoint of the run, so that a copy without changes has the same history.

        Args:
            changes: fields of ``GRPOConfig``.

        Raises:
            ConfigError: no such run, or it cannot be copied; or a name or a change that is not allowed. The
                values are checked when the copy starts: with invalid ones it is a failed run.
        """
        return self._request_clone(name, new_name, changes)

    def _request_clone(
        self, name: str, new_name: str, changes: dict[str, Any], *, checks_values: bool = False
    ) -> str:
        run = self._find(name, "clone")
        if not run.shares_base:
            raise ConfigError(f"run {name!r} has no adapter; only a run with an adapter is cloned")
        if run.args.save_strategy == SaveStrategy.NO:
            raise ConfigError(f"run {name!r} has save_strategy='no'; a clone starts from its checkpoint")
        taken = [*self.runs, *(new for other in self.runs.values() for new, _ in other.clones)]
        if new_name in taken or not _is_name(new_name):
            raise ConfigError(f"{new_name!r} is not a new name of a directory; taken: {', '.join(taken)}")
        allowed = {item.name for item in fields(GRPOConfig) if item.init} - {*COMMON, "output_dir"}
        allowed -= {name for name, one in GRPOConfig.SETTINGS.items() if one.on_resume in _OF_CHECKPOINT}
        allowed.add("learning_rate")  # scaled in the restored optimizer
        for key in changes.keys() - allowed:
            raise ConfigError(
                f"{key!r} cannot be changed: a clone has model, data, rewards and adapter of {name!r}, and "
                "continues with the state in its checkpoint, of which learning_rate alone can change; "
                f"nearest of the settings that can: {nearest_name(key, allowed)!r}"
            )
        if checks_values:
            self._clone_settings(run, new_name, changes)
        run.clones.append((new_name, changes))
        return f"{new_name} starts from the state of {name} at its next optimizer step"

    def _find(self, name: str, command: str) -> SweepRun:
        """Return a run that takes the command now; see :data:`COMMANDS`."""
        if name not in self.runs:
            nearest = nearest_name(name, self.runs)
            raise ConfigError(f"no run {name!r}; allowed: {', '.join(self.runs)}; nearest: {nearest!r}")
        run, allowed = self.runs[name], COMMANDS[command]
        if run.status not in allowed:
            raise ConfigError(
                f"run {name!r} is {run.status}; a run takes {command} while {', '.join(allowed)}"
            )
        return run

    def _execute(self, command: dict[str, Any]) -> str:
        """Execute a command of another process."""
        action, name = command["action"], command["name"]
        if action == "clone":
            new_name, changes = command["new_name"], command.get("changes", {})
            return self._request_clone(name, new_name, changes, checks_values=True)
        return {"stop": self.stop, "resume": self.resume}[action](name)


class _StepTurns(TrainerCallback):
    """End the turn of a run at the beginning of each optimizer step; the scheduler may answer with a call."""

    def __init__(self, run: SweepRun) -> None:
        self.thread, self.factor = cast(TurnThread, run.thread), run.learning_rate_factor

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Scale the learning rate of a clone: optimizer and schedule were loaded with that of its source."""
        for group in kwargs["optimizer"].param_groups:
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] *= self.factor
        schedule = kwargs["lr_scheduler"].state_dict()
        for name in ("base_lrs", "_last_lr"):
            if name in schedule:
                schedule[name] = [rate * self.factor for rate in schedule[name]]
        kwargs["lr_scheduler"].load_state_dict(schedule)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        error = None
        while (call := self.thread.pause(error)) is not None:
            error = None
            try:
                call()
            except Exception as raised:  # of saving: the scheduler decides which run it fails
                error = raised


def _policy(run: SweepRun) -> PeftModel:
    return cast("PeftModel", cast(GRPOTrainer, run.trainer).model)


def _is_name(name: str) -> bool:
    """Return True for the name of a directory of its own beside the files of the sweep."""
    return name == Path(name).name and not name.startswith((".", "_")) and name.isprintable() and bool(name)


def _check_run(run: SweepRun, directory: Path) -> None:
    """Check the name and the settings of one run.

    Raises:
        ConfigError: naming the run and the setting.
    """
    args = run.args
    if not _is_name(run.name):
        raise ConfigError(
            f"the name of run {run.name!r} must be that of a directory: printable characters without /, the "
            "first one not . or _"
        )
    if not isinstance(args, GRPOConfig):
        raise ConfigError(f"run {run.name!r} is a {type(args).__name__}; it must be a groupwise.GRPOConfig")
    if Path(str(args.output_dir)) != directory / run.name:
        raise ConfigError(
            f"run {run.name!r} has output_dir={str(args.output_dir)!r}; the runs of a sweep have one "
            f"directory each in that of the sweep: {str(directory / run.name)!r}"
        )
    trackers = [name for name in args.report_to or () if name not in TRACKERS]
    if trackers:
        raise ConfigError(
            f"run {run.name!r} has report_to={trackers[0]!r}, which has one run per process; "
            f"allowed: {', '.join(TRACKERS)}"
        )
    if run.peft_config is not None:
        check_adapter(run.name, run.peft_config)
        for name, allowed in REFUSED.items():
            if (getattr(args, name) or None) != (allowed or None):
                raise ConfigError(
                    f"run {run.name!r} has {name}={getattr(args, name)!r}, which runs that share a base "
                    f"model cannot have; train it on its own, or set {name}={allowed!r}"
                )
        if not json_dict(args.vllm_engine_kwargs).get("enable_lora", True):
            raise ConfigError(
                f"run {run.name!r} has vllm_engine_kwargs['enable_lora']=False, which sends merged weights, "
                "and the engine of a sweep has one base model with the adapters of all runs; leave it out"
            )
        check_backend(args)
