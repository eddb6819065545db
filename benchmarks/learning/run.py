"""Train and evaluate one model with every method and ablation; one JSON file per finished cell.

    python benchmarks/learning/run.py --seeds 0 1 2
    python benchmarks/learning/run.py --cells grpo_outcome rft --steps 20 --output /tmp/learning
    python benchmarks/learning/run.py --tiny --output /tmp/tiny    # random model, seconds
    python benchmarks/learning/run.py --cells resampled --seeds 0 --sampling_seeds 200 300 --tasks chains
    python benchmarks/learning/figures.py benchmarks/results/learning

A cell is a method and a seed. Its file has the fields of the cell, the settings, the evaluation, the log of
training, the seconds of every step, versions and the commit. A second call skips cells whose file exists, so
an interrupted run continues with the next cell. ``instruct`` is the initial model. Its evaluation runs first:
the other cells are compared with it. Runs of other sampling seeds go to the folder ``sampling_seeds``.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import methods
import sub_agent
import tasks
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

from groupwise import GRPOConfig, GRPOTrainer, IterativeConfig, IterativeGRPO

BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "results" / "learning"
#: Folder of runs with other sampling seeds than the cell's own, inside the output folder.
SAMPLING_SEEDS = "sampling_seeds"


@dataclass(frozen=True)
class Scale:
    """Size of a run: ``test_questions`` are per task, ``samples`` are completions per held-out question."""

    steps: int = 30
    prompts_per_step: int = 8
    generations: int = 8
    max_tokens: int = 24
    test_questions: int = 48
    samples: int = 4
    learning_rate: float = 1e-5


TINY = Scale(2, 2, 4, 8, 2, 4, 1e-3)


@dataclass(frozen=True)
class Cell:
    """Row of the table of runs.

    source: "policy", "solutions" (of the data), "filtered" (correct samples of the initial policy) or "pairs"
        (correct and wrong samples, trained by TRL's ``DPOTrainer``); None: no training.
    process: reward for every line, by its name in ``tasks.STEP_REWARDS``; None: for the answer.
    staleness: optimizer steps between the policy that samples and the one that is trained.
    iterations: outer iterations of iterative GRPO, which refreshes the reference at the end of each.
    rollout: two turns of an agent instead of one completion, by the name in ``sub_agent.ROLLOUTS``; compared
        with the same rollout of the initial model, on the trained task alone.
    library: "groupwise", or "trl" for the same settings in TRL's ``GRPOTrainer``.
    max_steps: the first steps of the run only; None: all.
    sampling_seed: added to the seed; the questions and their order stay.
    micro_batches: parts that a step's rows are computed in; the update is the same.
    settings: changes of the configuration.
    """

    source: str | None = "policy"
    process: str | None = None
    staleness: int = 0
    iterations: int = 1
    rollout: str | None = None
    library: str = "groupwise"
    max_steps: int | None = None
    sampling_seed: int = 0
    micro_batches: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


RFT = {"advantage_baseline": "rft"}
#: Stored completions repeat within a group, so two per question do; a step has as many questions as GRPO's.
STORED = {**RFT, "num_generations": 2}
METHODS = {
    "instruct": Cell(source=None),
    "sft": Cell("solutions", settings=STORED),
    "rft": Cell("filtered", settings=STORED),
    "online_rft": Cell(settings=RFT),
    "dpo": Cell("pairs", settings=STORED),
    "grpo_outcome": Cell(),
    "grpo_process": Cell(process="equations"),
    "grpo_process_solution": Cell(process="solution"),
    "grpo_iterative": Cell(iterations=2, settings={"beta": 0.04}),
    "grpo_beta_0.04": Cell(settings={"beta": 0.04}),
    # About 40 minutes on one core; in micro-batches, since TRL needs 12 GB for all rows at once.
    "trl": Cell(library="trl", max_steps=15, micro_batches=4),
}


def _ablation(staleness: int = 0, **settings: Any) -> Cell:
    """Return the first half of ``grpo_outcome``, where the reward rises most, with changed settings.

    The questions are those of ``grpo_outcome``, their samples are others. A cell that trains on its samples
    twice has twice as many steps.
    """
    steps = 15 * settings.get("num_iterations", 1)
    return Cell(staleness=staleness, sampling_seed=100, max_steps=steps, settings=settings)


CORRECTED = {"rollout_func_importance_sampling_correction": True}
#: ``resampled`` changes nothing: its difference from ``grpo_outcome`` is chance.
ABLATIONS = {
    "resampled": _ablation(),
    "loss_dapo": _ablation(loss_type="dapo"),
    "loss_dr_grpo": _ablation(loss_type="dr_grpo"),
    "loss_gspo": _ablation(importance_sampling_level="sequence"),
    "loss_cispo": _ablation(loss_type="cispo", epsilon_high=5.0),
    "scale_batch": _ablation(scale_rewards="batch"),
    "scale_none": _ablation(scale_rewards="none"),
    "beta_0.04": _ablation(beta=0.04),
    "group_4": _ablation(num_generations=4),
    "group_16": _ablation(num_generations=16),
    "iterations_2": _ablation(num_iterations=2),
    "iterations_2_clip_higher": _ablation(num_iterations=2, epsilon_high=0.28),
    "dynamic_sampling": _ablation(dynamic_sampling=True),
    # Its update is that of ``resampled``; for the time beside TRL's, which has four micro-batches.
    "micro_batches_4": Cell(micro_batches=4, sampling_seed=100, max_steps=15),
    **{f"stale_{steps}": _ablation(steps) for steps in range(1, 5)},
    **{f"stale_{steps}_corrected": _ablation(steps, **CORRECTED) for steps in range(1, 5)},
}
#: A sub-agent in a row of its own, and the same turns in one row with the request between them.
AGENTS = {
    name: Cell(rollout=rollout, max_steps=20, settings={"max_completion_length": 96})
    for name, rollout in (("sub_agent", "two_rows"), ("one_conversation", "one_row"))
}
CELLS = {**METHODS, **ABLATIONS, **AGENTS}


def settings(cell: Cell, scale: Scale, seed: int) -> dict[str, Any]:
    """Return the settings of a cell, for the configuration of both libraries.

    TRL orders the questions by ``seed`` and ignores ``data_seed``; here they are the same for its cell.
    """
    stored = cell.source in ("solutions", "filtered", "pairs")
    rows = scale.prompts_per_step * (cell.settings["num_generations"] if stored else scale.generations)
    given = {
        "loss_type": "grpo",
        "learning_rate": scale.learning_rate,
        "lr_scheduler_type": "constant",
        "max_steps": min(scale.steps, cell.max_steps or scale.steps),
        "num_generations": scale.generations,
        "per_device_train_batch_size": rows // cell.micro_batches,
        "gradient_accumulation_steps": cell.micro_batches,
        "per_device_eval_batch_size": max(1, 64 // scale.samples) * scale.samples,
        "num_generations_eval": scale.samples,
        "max_completion_length": scale.max_tokens,
        "gradient_checkpointing": False,
        "seed": seed + cell.sampling_seed,
        "data_seed": seed,
        "bf16": False,  # float32 everywhere: the same numbers with and without native bfloat16
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return {**given, **cell.settings}


def config(cell: Cell, scale: Scale, seed: int, directory: str) -> GRPOConfig:
    """Return the configuration of a cell."""
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= scale.samples]
    return GRPOConfig(directory, eval_pass_at_k=ks, **settings(cell, scale, seed))


def test_sets(scale: Scale, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return held-out questions of the trained tasks, and those of tasks that are never trained on.

    ``names`` are the tasks to evaluate; None: all.
    """
    size = scale.test_questions
    sets = {task: tasks.generated(task, size, held_out=True) for task in tasks.GENERATORS}
    if importlib.util.find_spec("reasoning_gym") is not None:
        sets |= {task: tasks.reasoning_gym(task, size) for task in tasks.REASONING_GYM}
    return {
        task: tasks.dataset(task, questions)
        for task, questions in sets.items()
        if names is None or task in names
    }


def train_rows(scale: Scale) -> Any:
    """Return the training questions of all trained tasks, in turn: one pass with groups of one size."""
    from datasets import interleave_datasets

    size = math.ceil(scale.steps * scale.prompts_per_step / len(tasks.TRAINED))
    return interleave_datasets([tasks.dataset(task, tasks.generated(task, size)) for task in tasks.TRAINED])


class Clock(TrainerCallback):
    """Seconds since the start of training at the end of every step: wall clock, and of this process."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.seconds:  # iterative GRPO begins several times
            self.start = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(round(time.perf_counter() - self.start[0], 2))
        self.processor_seconds.append(round(time.process_time() - self.start[1], 2))


class RewardEvaluator(GRPOTrainer):
    """Evaluation of rewards alone: the loss of an evaluation takes as long as its samples."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros(())


def run_cell(
    name: str,
    model_path: str,
    scale: Scale,
    seed: int,
    initial: Mapping[str, Any] | None,
    sampling_seed: int | None = None,
    evaluated: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Train a cell from ``model_path`` and evaluate it; returns the content of its file.

    Args:
        initial: content of the file of ``instruct`` with this seed; None for ``instruct`` itself.
        sampling_seed: replaces that of the cell; None: that of the cell.
        evaluated: tasks to evaluate; None: all.
    """
    cell, started = CELLS[name], time.time()
    if sampling_seed is not None:
        cell = replace(cell, sampling_seed=sampling_seed)
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    sets = test_sets(scale, tasks.TRAINED if cell.rollout else evaluated)
    with tempfile.TemporaryDirectory() as directory:
        args = config(cell, scale, seed, directory)
        eval_args = config(METHODS["instruct"], scale, seed, directory)
        if cell.rollout:
            eval_args = replace(eval_args, **cell.settings)
        evaluator = RewardEvaluator(
            model, reward_of(cell), eval_args, train_rows(scale), sets, processing_class=tokenizer,
            rollout_func=sub_agent.ROLLOUTS.get(cell.rollout or ""),
        )  # fmt: skip
        before = {"initial": evaluator.evaluate()} if cell.rollout else {}
        result = train_cell(cell, model, tokenizer, scale, args) if cell.source is not None else {}
        result |= before
        if initial is not None and not cell.rollout:
            first = {name: tuple(entry) for name, entry in initial["by_question"]["first"].items()}
            evaluator.evaluation.restore({**initial["by_question"], "first": first})  # gains by question
        result["evaluation"] = evaluator.evaluate()
        if initial is None:
            state = evaluator.evaluation.snapshot()
            result["by_question"] = {name: state[name] for name in ("first", "looks")}
    return {
        "cell": name,
        "seed": seed,
        "model": Path(model_path).name,
        "scale": asdict(scale),
        "fields": asdict(cell),
        "settings": settings(cell, scale, seed),
        **result,
        "seconds": round(time.time() - started, 2),
        "versions": versions(),
    }


def train_cell(cell: Cell, model: Any, tokenizer: Any, scale: Scale, args: GRPOConfig) -> dict[str, Any]:
    """Train ``model`` in place; returns the log and the seconds of every step."""
    rows, clock, begun = train_rows(scale), Clock(), time.time()
    stored, wrong = stored_samples(cell, model, tokenizer, rows, args)
    rows = with_samples(rows, stored, wrong, cell)
    reward = tasks.STEP_REWARDS[cell.process](tokenizer) if cell.process else reward_of(cell)
    common = {"train_dataset": rows, "processing_class": tokenizer, "callbacks": [clock]}
    if len(rows) == 0:
        log = []  # no question had the samples that the method needs
    elif cell.source == "pairs":
        log = train_dpo(model, tokenizer, rows, args, stored, wrong, clock)
    elif cell.library == "trl":
        log = train_trl(model, reward, settings(cell, scale, args.data_seed), str(args.output_dir), common)
    elif cell.iterations > 1:
        outer = IterativeConfig(iterations=cell.iterations)
        runner = IterativeGRPO(model, reward, args, iterative=outer, **common)
        runner.train()
        log = runner.trainer.state.log_history
    else:
        if cell.source != "policy":
            common["rollout_func"] = methods.replay(stored)
        elif cell.staleness:
            common["rollout_func"] = methods.stale_samples(cell.staleness)
        elif cell.rollout:
            common["rollout_func"] = sub_agent.ROLLOUTS[cell.rollout]
        trainer = GRPOTrainer(model, reward, args, **common)
        trainer.train()
        log = trainer.state.log_history
    return {
        "num_train_questions": len(rows),
        "history": log,
        "step_seconds": clock.seconds,
        "step_processor_seconds": clock.processor_seconds,
        "train_seconds": round(time.time() - begun, 2),  # with the sampling of stored completions
    }


def reward_of(cell: Cell) -> Any:
    """Return the reward for the answer: of a completion, or of an agent's last turn."""
    return sub_agent.correct if cell.rollout else tasks.correct


def stored_samples(cell: Cell, model: Any, tokenizer: Any, rows: Any, args: GRPOConfig) -> tuple[dict, dict]:
    """Return correct and wrong completions by question, for methods that do not sample from the policy."""
    if cell.source == "solutions":
        return {row["prompt"][-1]["content"]: [row["solution"]] for row in rows}, {}
    if cell.source in ("filtered", "pairs"):
        sampler = GRPOTrainer(model, tasks.correct, args, rows, processing_class=tokenizer)
        return methods.sort_samples(sampler, rows, Scale.generations, tasks.correct)
    return {}, {}


def with_samples(rows: Any, stored: Mapping, wrong: Mapping, cell: Cell) -> Any:
    """Return the rows that a method can train on: with stored completions, if it needs them."""
    if cell.source == "policy":
        return rows

    def has_samples(row: Mapping[str, Any]) -> bool:
        question = row["prompt"][-1]["content"]
        return question in stored and (cell.source != "pairs" or question in wrong)

    return rows.filter(has_samples)


def train_trl(
    model: Any, reward: Any, given: Mapping[str, Any], directory: str, common: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Train with TRL's ``GRPOTrainer``; returns its log."""
    import trl

    trainer = trl.GRPOTrainer(model, reward, trl.GRPOConfig(directory, **given), **common)
    trainer.train()
    return trainer.state.log_history


def train_dpo(
    model: Any, tokenizer: Any, rows: Any, args: GRPOConfig, correct: Mapping, wrong: Mapping, clock: Clock
) -> list[dict[str, Any]]:
    """Train with TRL's ``DPOTrainer`` on pairs of stored samples; returns its log."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    prompts = {row["prompt"][-1]["content"]: row["prompt"] for row in rows}
    pairs = methods.preference_rows({question: correct[question] for question in prompts}, wrong, prompts)
    trainer = DPOTrainer(
        model,
        copy.deepcopy(model),  # the reference; TRL would load it again by name
        args=DPOConfig(
            args.output_dir,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.per_device_train_batch_size // 2,
            learning_rate=args.learning_rate,
            lr_scheduler_type=args.lr_scheduler_type,
            seed=args.seed,
            bf16=False,
            use_cpu=args.use_cpu,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    return trainer.state.log_history


def versions() -> dict[str, str]:
    """Return commit, processor, threads, and versions of Python and of packages that decide the numbers."""
    names = [n for n in ("torch", "transformers", "trl", "reasoning-gym") if _installed(n)]
    found = {name: importlib.metadata.version(name) for name in names}
    describe = _module(BENCHMARKS / "machine.py")
    processor = f"{describe.processor()}, {torch.backends.cpu.get_cpu_capability()}"
    machine = {"processor": processor, "threads": str(torch.get_num_threads())}
    return {"commit": describe.commit(), "python": platform.python_version(), **machine, **found}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def run_all(
    names: Sequence[str],
    seeds: Sequence[int],
    model_path: str,
    scale: Scale,
    output: Path,
    sampling_seeds: Sequence[int] = (),
    evaluated: Sequence[str] | None = None,
) -> list[Path]:
    """Run every cell without a file in ``output``; returns the files that were written.

    ``instruct`` runs for every seed: the other cells are compared with it.

    Args:
        sampling_seeds: every cell runs once with each of them instead of its own; the files are in a folder
            of ``output``, and end in the sampling seed.
        evaluated: tasks to evaluate; None: all.
    """
    output.mkdir(parents=True, exist_ok=True)
    written = []
    others = [name for name in names if name != "instruct"]
    for seed in seeds:
        runs: list[tuple[str, int | None, Path]] = [("instruct", None, output / f"instruct-{seed}.json")]
        if sampling_seeds:
            folder = output / SAMPLING_SEEDS
            folder.mkdir(exist_ok=True)
            runs += [(n, s, folder / f"{n}-{seed}-{s}.json") for s in sampling_seeds for n in others]
        else:
            runs += [(name, None, output / f"{name}-{seed}.json") for name in others]
        initial = None
        for name, sampling_seed, path in runs:
            if path.exists():
                print(f"{path.name}: finished before", flush=True)
            else:
                result = run_cell(name, model_path, scale, seed, initial, sampling_seed, evaluated)
                partial = path.with_suffix(".partial")
                partial.write_text(json.dumps(result, indent=1) + "\n")
                os.replace(partial, path)  # a file with this name is complete
                written.append(path)
                print(f"{path.name}: {result['seconds']:.0f} s", flush=True)
            if name == "instruct":
                initial = json.loads(path.read_text())
    return written


def tiny_model(directory: Path) -> str:
    """Save a random two-layer model over single characters and return its directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", *letters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<end>",
        chat_template="{% for m in messages %}{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
    ).save_pretrained(directory)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    ).save_pretrained(directory)
    return str(directory)


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(METHODS), metavar="CELL")
    parser.add_argument("--ablations", action="store_true", help="the ablations instead of the methods")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sampling_seeds", type=int, nargs="+", default=[], help="instead of the cell's own")
    parser.add_argument("--tasks", nargs="+", choices=[*tasks.TRAINED, *tasks.UNSEEN], help="default: all")
    parser.add_argument("--model", help="hub id or directory; default: SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="random model and a few questions")
    for name, value in asdict(Scale()).items():
        parser.add_argument(f"--{name}", type=type(value))
    options = parser.parse_args(arguments)
    changes = {name: getattr(options, name) for name in asdict(Scale()) if getattr(options, name) is not None}
    scale = Scale(**{**asdict(TINY if options.tiny else Scale()), **changes})
    methods.register()
    names = list(ABLATIONS) if options.ablations else options.cells
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_model(Path(directory)) if options.tiny else options.model or smollm2()
        return run_all(
            names, options.seeds, model, scale, options.output, options.sampling_seeds, options.tasks
        )


def smollm2() -> str:
    """Return the checkpoint of the examples."""
    return str(_module(BENCHMARKS.parent / "examples" / "smollm2.py").local_model())


def _module(path: Path) -> Any:
    """Import a file whose folder is not on the path: a folder there would hide packages of the same names."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
