"""Compare end-to-end optimizer steps of TRL and groupwise on the same work, alternating.

Both train SmolLM2-135M-Instruct with the same data, rewards, seed and settings. By default completions end
where the model ends them and the precision is bf16, as in a run; ``--lengths full`` forces every completion
to its full length, so that both libraries process the same number of tokens. On a processor that emulates
bf16, measure float32. Each round starts a fresh process for each candidate, whose first step does not count,
and the next round starts with the next candidate.

    python benchmarks/step_time.py --case short --rounds 3 --timed_steps 2
    python benchmarks/step_time.py --case short --lengths full --precision float32 --zero_variance 50
    python benchmarks/step_time.py --case short --rows 8                 # 4 micro-batches of 8 rows
    python benchmarks/step_time.py --case short --base ../another-clone  # beside another commit of groupwise
    python benchmarks/step_time.py --case long --model qwen3_5 --padded  # beside padded rows and ``generate``
    python benchmarks/step_time.py --case long --model qwen2_5_vl --padded  # with an image of 1,024 tokens
    python benchmarks/step_time.py --case long --model experts --lengths full  # and without balancing loss
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import add_precision, measure_in_process, print_result, ratio_of_sums, write_results
from machine import commit

if TYPE_CHECKING:
    from datasets import Dataset

LIBRARIES = ("trl", "groupwise", "padded", "unbalanced")
SOURCES = Path(__file__).resolve().parents[1] / "src"
WORDS = (
    "The quick brown fox jumps over the lazy dog while seven wizards mix a strong potion in the dark cellar. "
)


#: Text model of Qwen3.5-0.8B, of whose 24 layers the first 6 remain.
QWEN3_5 = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


#: Mixture of 16 experts, of which a token uses 4, with the vocabulary of SmolLM2 and random weights.
EXPERTS = {
    "vocab_size": 49152,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def make_model(name: str) -> Any:
    """Return SmolLM2-135M-Instruct as a directory, or a model of random weights."""
    from smollm2 import local_model

    if name == "smollm2":
        return str(local_model())
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if name == "experts":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS))
    if name == "qwen2_5_vl":
        import forked

        return forked.make_model(images=1)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**QWEN3_5))


def case_settings(name: str) -> dict:
    """Return prompts per step, sentences before the question, and completion length of a case."""
    return {
        "short": {"prompts": 4, "padding_sentences": 0, "new_tokens": 64},
        "long": {"prompts": 1, "padding_sentences": 19, "new_tokens": 64},
    }[name]


def binary_reward(completions: list, constant: list[bool], **_: object) -> list[float]:
    """Return 0 or 1 by a hash of the text, so that groups have variance; 1 for rows marked constant."""
    digests = (hashlib.sha256(completion[0]["content"].encode()).digest() for completion in completions)
    return [1.0 if same else float(digest[0] % 2) for digest, same in zip(digests, constant, strict=True)]


def make_dataset(case: str, zero_variance: int, lengths: str = "full") -> Dataset:
    """Return 64 questions; ``zero_variance`` percent, spread over the steps, get a constant reward.

    Natural lengths: answers of a word, of a sentence and of more than ``max_completion_length`` take turns.
    """
    from datasets import Dataset

    padding = WORDS * case_settings(case)["padding_sentences"]
    tasks = ["Write a short story about the number {}."]
    if lengths == "natural":
        tasks += ["What is {} + 2? Answer with one number.", "Is {} an even number? Answer in one sentence."]
    questions = [padding + tasks[n % len(tasks)].format(n) for n in range(64)]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": text}] for text in questions],
            "constant": [(n * 3) % 10 < zero_variance // 10 for n in range(64)],
        }
    )


def make_image_dataset() -> Dataset:
    """Return 64 random images of 1,024 tokens with a question of 32 words each; no reward is constant."""
    import numpy as np
    from datasets import Dataset
    from forked import SIDE
    from PIL import Image

    pixels, draw = SIDE * 14, np.random.default_rng(0)  # patches of 14 pixels
    rows = [
        {
            "prompt": [
                {"role": "user", "content": " ".join(f"w{word}" for word in draw.integers(3, 4000, 32))}
            ],
            "image": Image.fromarray(draw.integers(0, 256, (pixels, pixels, 3), dtype=np.uint8)),
            "constant": False,
        }
        for _ in range(8)
    ]
    return Dataset.from_list(rows * 8)


def make_processing_class(name: str) -> Any:
    """Return SmolLM2's tokenizer, or a processor of images and words."""
    from transformers import AutoTokenizer

    if name == "qwen2_5_vl":
        from forked import make_processor

        return make_processor()
    return AutoTokenizer.from_pretrained(make_model("smollm2"), padding_side="left")


def trainer_settings(
    case: str, timed_steps: int, lengths: str = "full", precision: str = "float32", rows: int | None = None
) -> dict:
    """Return the settings of both libraries; a micro-batch has ``rows``, by default all rows of a step."""
    settings = case_settings(case)
    step_rows = settings["prompts"] * 8
    rows = rows or step_rows
    forced = {"min_new_tokens": settings["new_tokens"]} if lengths == "full" else None
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": step_rows // rows,
        "num_generations": 8,
        "max_completion_length": settings["new_tokens"],
        "generation_kwargs": forced,
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": precision == "bf16",
        "use_cpu": True,
        "max_steps": timed_steps + 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "shuffle_dataset": False,
    }


def run_worker(library: str, options: argparse.Namespace) -> None:
    """Train in this process and print seconds and mean lengths of timed steps, and peak memory, as JSON."""
    from transformers import TrainerCallback

    if library == "trl":
        from trl import GRPOConfig, GRPOTrainer
    else:
        from groupwise import GRPOConfig, GRPOTrainer

    class StepClock(TrainerCallback):
        """Times of the ends of steps (everything in between counts) and mean lengths of completions."""

        def __init__(self) -> None:
            self.marks: list[float] = []
            self.cpu_marks: list[float] = []  # processor time, which other programs do not change
            self.lengths: list[float] = []
            self.generate: list[float] = []

        def on_step_end(self, args, state, control, **kwargs) -> None:
            self.marks.append(time.perf_counter())
            self.cpu_marks.append(time.process_time())

        def on_log(self, args, state, control, logs, **kwargs) -> None:
            if "completions/mean_length" in logs:
                self.lengths.append(logs["completions/mean_length"])
                self.generate.append(logs.get("time/generate", float("nan")))

    model, clock = make_model(options.model), StepClock()
    settings = trainer_settings(
        options.case, options.timed_steps, options.lengths, options.precision, options.rows
    )
    if library == "padded":
        settings |= {"sequence_layout": "padded", "cache_implementation": "dynamic"}  # transformers' own loop
    if library == "unbalanced":
        settings["router_aux_loss_coef"] = 0.0
    if not isinstance(model, str):
        del settings["model_init_kwargs"]
    dataset = (
        make_image_dataset()
        if options.model == "qwen2_5_vl"
        else make_dataset(options.case, options.zero_variance, options.lengths)
    )
    with tempfile.TemporaryDirectory() as output_dir:
        GRPOTrainer(
            model=model,
            reward_funcs=binary_reward,
            args=GRPOConfig(output_dir, **settings),
            train_dataset=dataset,
            processing_class=make_processing_class(options.model),
            callbacks=[clock],
        ).train()
    seconds = [after - before for before, after in zip(clock.marks, clock.marks[1:], strict=False)]
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    lengths = clock.lengths[1 : 1 + len(seconds)]
    cpu_seconds = [
        after - before for before, after in zip(clock.cpu_marks, clock.cpu_marks[1:], strict=False)
    ]
    phases = {"cpu_seconds": cpu_seconds, "generate": clock.generate[1 : 1 + len(seconds)]}
    print_result({"seconds": seconds, "mean_length": lengths, "peak_mib": peak_mib, **phases})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=("short", "long"), default="short")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timed_steps", type=int, default=2)
    parser.add_argument(
        "--zero_variance", type=int, choices=range(0, 100, 10), default=0, help="per cent of groups without"
    )
    parser.add_argument("--lengths", choices=("natural", "full"), default="natural")
    parser.add_argument("--rows", type=int, help="rows of a micro-batch; default: all rows of a step in one")
    parser.add_argument("--base", type=Path, help="another checkout of groupwise, measured beside this one")
    parser.add_argument("--model", choices=("smollm2", "qwen3_5", "qwen2_5_vl", "experts"), default="smollm2")
    parser.add_argument("--padded", action="store_true", help="groupwise with padded rows and generate, too")
    add_precision(parser)
    parser.add_argument("--worker", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker, options)
        return

    names = ("case", "timed_steps", "zero_variance", "lengths", "precision", "rows", "model")
    values = {name: getattr(options, name) for name in names}
    arguments = [f"--{name}={value}" for name, value in values.items() if value is not None]
    # Candidate: library, and the sources that its process imports groupwise from.
    candidates = {library: (library, SOURCES) for library in LIBRARIES[: 3 if options.padded else 2]}
    if options.model == "experts":
        candidates["unbalanced"] = ("unbalanced", SOURCES)
    if options.base:
        candidates["base"] = ("groupwise", options.base.resolve() / "src")
    runs: dict[str, list[dict]] = {name: [] for name in candidates}
    for round_index in range(options.rounds):
        first = round_index % len(candidates)
        for name in [*candidates][first:] + [*candidates][:first]:
            library, sources = candidates[name]
            environment = {"PYTHONPATH": str(sources)}
            runs[name].append(measure_in_process(__file__, library, *arguments, env=environment))
            print(f"round {round_index + 1} {name}: {runs[name][-1]}", flush=True)
        results = {
            "settings": {**values, **case_settings(options.case), "rounds": round_index + 1},
            "base_commit": options.base and commit(options.base),
            **{key: {name: [run[key] for run in runs[name]] for name in runs} for key in runs["trl"][0]},
        }
        for other in [name for name in candidates if name != "groupwise"]:
            results[f"groupwise_over_{other}"] = {
                "time": ratio_of_sums(results["seconds"]["groupwise"], results["seconds"][other]),
                "processor_time": ratio_of_sums(
                    results["cpu_seconds"]["groupwise"], results["cpu_seconds"][other]
                ),
                "peak_memory": ratio_of_sums(
                    *([[m] for m in results["peak_mib"][n]] for n in ("groupwise", other))
                ),
            }
        kind = f"{options.case}_{options.lengths}_{options.precision}_zero{options.zero_variance}"
        kind += "" if options.model == "smollm2" else f"_{options.model}"
        write_results(f"step_time_{kind}" + (f"_rows{options.rows}" if options.rows else ""), results)
    print({key: value for key, value in results.items() if key.startswith("groupwise_over")})


if __name__ == "__main__":
    main()
