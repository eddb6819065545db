"""Train and evaluate one model with every method and ablation; one JSON file per finished cell.

    python benchmarks/learning/run.py --seeds 0 1 2
    python benchmarks/learning/run.py --cells grpo_outcome rft --steps 20 --output /tmp/learning
    python benchmarks/learning/run.py --tiny --output /tmp/tiny    # random model, seconds
    python benchmarks/learning/figures.py benchmarks/results/learning

A cell is a method and a seed. Its file has the settings, both evaluations, the log of training and versions.
A second call skips cells whose file exists, so that an interrupted run continues with the next cell.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import methods
import tasks
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from groupwise import GRPOConfig, GRPOTrainer

RESULTS = Path(__file__).resolve().parents[1] / "results" / "learning"


@dataclass(frozen=True)
class Scale:
    """Size of a run: questions are per task, ``samples`` are the completions per held-out question."""

    steps: int = 60
    prompts_per_step: int = 8
    generations: int = 8
    max_tokens: int = 96
    train_questions: int = 512
    test_questions: int = 100
    samples: int = 8
    stored_samples: int = 4
    learning_rate: float = 1e-5


TINY = Scale(2, 2, 4, 8, 8, 2, 4, 2, 1e-3)


@dataclass(frozen=True)
class Cell:
    """Row of the table of runs.

    source: "policy", "solutions" (of the data), "filtered" (correct samples of the initial policy) or "pairs"
        (correct and wrong samples, trained by TRL's ``DPOTrainer``); None: no training.
    process: a reward for every step of the solution instead of one for the answer.
    settings: changes of the configuration.
    """

    source: str | None = "policy"
    process: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


RFT = {"advantage_baseline": "rft"}
METHODS = {
    "instruct": Cell(source=None),
    "sft": Cell("solutions", settings=RFT),
    "rft": Cell("filtered", settings=RFT),
    "online_rft": Cell(settings=RFT),
    "dpo": Cell("pairs"),
    "grpo_outcome": Cell(),
    "grpo_process": Cell(process=True),
}

#: Each changes one thing of ``grpo_outcome``. Staleness needs a vLLM server and is not among them.
ABLATIONS = {
    "loss_dapo": Cell(settings={"loss_type": "dapo"}),
    "loss_dr_grpo": Cell(settings={"loss_type": "dr_grpo"}),
    "loss_gspo": Cell(settings={"importance_sampling_level": "sequence"}),
    "loss_cispo": Cell(settings={"loss_type": "cispo", "epsilon_high": 5.0}),
    "scale_batch": Cell(settings={"scale_rewards": "batch"}),
    "scale_none": Cell(settings={"scale_rewards": "none"}),
    "beta_0.04": Cell(settings={"beta": 0.04}),
    "group_4": Cell(settings={"num_generations": 4}),
    "group_16": Cell(settings={"num_generations": 16}),
    "iterations_2": Cell(settings={"num_iterations": 2}),
    "iterations_2_clip_higher": Cell(settings={"num_iterations": 2, "epsilon_high": 0.28}),
    "dynamic_sampling": Cell(settings={"dynamic_sampling": True}),
}
CELLS = {**METHODS, **ABLATIONS}


def config(cell: Cell, scale: Scale, seed: int, directory: str) -> GRPOConfig:
    """Return the configuration of a cell."""
    rows = scale.prompts_per_step * scale.generations
    given = {
        "loss_type": "grpo",
        "learning_rate": scale.learning_rate,
        "max_steps": scale.steps,
        "num_generations": scale.generations,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": 8 * scale.samples,
        "num_generations_eval": scale.samples,
        "eval_pass_at_k": [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= scale.samples],
        "max_completion_length": scale.max_tokens,
        "gradient_checkpointing": False,
        "seed": seed,
        "bf16": False,  # float32 everywhere: the same numbers with and without native bfloat16
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(directory, **{**given, **cell.settings})


def test_sets(scale: Scale) -> dict[str, Any]:
    """Return held-out questions of the trained tasks, and those of tasks that are never trained on."""
    size = scale.test_questions
    sets = {task: tasks.generated(task, size, held_out=True) for task in tasks.TRAINED}
    if importlib.util.find_spec("reasoning_gym") is not None:
        sets |= {task: tasks.unseen(task, size) for task in tasks.UNSEEN}
    return {task: tasks.dataset(task, questions) for task, questions in sets.items()}


def train_rows(scale: Scale) -> Any:
    """Return the training questions of all trained tasks, in turn."""
    from datasets import interleave_datasets

    size = scale.train_questions
    return interleave_datasets([tasks.dataset(task, tasks.generated(task, size)) for task in tasks.TRAINED])


def run_cell(name: str, model_path: str, scale: Scale, seed: int) -> dict[str, Any]:
    """Train a cell from ``model_path`` and evaluate it before and after; returns the content of its file."""
    cell, started = CELLS[name], time.time()
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rows, sets = train_rows(scale), test_sets(scale)
    with tempfile.TemporaryDirectory() as directory:
        args = config(cell, scale, seed, directory)

        def trainer(data: Any = rows, reward: Any = tasks.correct, **given: Any) -> GRPOTrainer:
            return GRPOTrainer(model, reward, args, data, sets, processing_class=tokenizer, **given)

        judge = trainer()  # evaluates the answer alone, whatever is trained on
        stored, wrong = stored_samples(cell, judge, rows, scale)
        data = with_samples(rows, stored, wrong, cell)
        result = {"trained": cell.source is not None and len(data) > 0, "num_train_questions": len(data)}
        result["before"] = result["after"] = judge.evaluate()
        begun = time.time()
        if result["trained"] and cell.source == "pairs":
            result["history"] = train_dpo(model, tokenizer, data, args, stored, wrong)
        elif result["trained"]:
            replay = {} if cell.source == "policy" else {"rollout_func": methods.replay(stored)}
            run = trainer(data, tasks.get_step_reward(tokenizer) if cell.process else tasks.correct, **replay)
            run.train()
            result["history"] = run.state.log_history
        result["train_seconds"] = round(time.time() - begun, 2)
        if result["trained"]:
            after = trainer()
            after.evaluation.load_state_dict(judge.evaluation.state_dict())  # gains by question
            result["after"] = after.evaluate()
    return {
        "cell": name,
        "seed": seed,
        "model": Path(model_path).name,
        "scale": asdict(scale),
        "settings": dict(cell.settings),
        **result,
        "seconds": round(time.time() - started, 2),
        "versions": versions(),
    }


def stored_samples(cell: Cell, trainer: GRPOTrainer, rows: Any, scale: Scale) -> tuple[dict, dict]:
    """Return correct and wrong completions by question, for methods that do not sample from the policy."""
    if cell.source == "solutions":
        return {row["prompt"][-1]["content"]: [row["solution"]] for row in rows}, {}
    if cell.source in ("filtered", "pairs"):
        return methods.sort_samples(trainer, rows, scale.stored_samples, tasks.correct)
    return {}, {}


def with_samples(rows: Any, stored: Mapping, wrong: Mapping, cell: Cell) -> Any:
    """Return the rows that a method can train on: with stored completions, if it needs them."""
    if cell.source in (None, "policy"):
        return rows

    def has_samples(row: Mapping[str, Any]) -> bool:
        question = row["prompt"][-1]["content"]
        return question in stored and (cell.source != "pairs" or question in wrong)

    return rows.filter(has_samples)


def train_dpo(
    model: Any, tokenizer: Any, rows: Any, args: GRPOConfig, correct: Mapping, wrong: Mapping
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
    )
    trainer.train()
    return trainer.state.log_history


def versions() -> dict[str, str]:
    """Return versions of Python and of the packages that decide the numbers, and the processor."""
    names = [n for n in ("torch", "transformers", "trl", "reasoning-gym") if _installed(n)]
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), "processor": platform.processor(), **found}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def run_all(
    names: Sequence[str], seeds: Sequence[int], model_path: str, scale: Scale, output: Path
) -> list[Path]:
    """Run every cell without a file in ``output``; returns the files that were written."""
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for seed in seeds:
        for name in names:
            path = output / f"{name}-{seed}.json"
            if path.exists():
                print(f"{path.name}: finished before", flush=True)
                continue
            result = run_cell(name, model_path, scale, seed)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(result, indent=1) + "\n")
            os.replace(partial, path)  # a file with this name is complete
            written.append(path)
            print(f"{path.name}: {result['seconds']:.0f} s", flush=True)
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
    if options.tiny:
        with tempfile.TemporaryDirectory() as directory:
            return run_all(names, options.seeds, tiny_model(Path(directory)), scale, options.output)
    return run_all(names, options.seeds, options.model or smollm2(), scale, options.output)


def smollm2() -> str:
    """Return the checkpoint of the examples; ``examples`` must be importable."""
    path = Path(__file__).resolve().parents[2] / "examples" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.local_model())


if __name__ == "__main__":
    main()
