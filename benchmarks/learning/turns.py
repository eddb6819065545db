"""Rewards per turn against the outcome alone, where the outcome cannot tell the turns apart.

A rollout has eight turns of one letter each. Which letter is right depends on the task and on the turn, and
the outcome is the number of right turns. A Llama of 60,000 random weights learns the letters in 40 optimizer
steps. ``outcome`` is trained by that number; ``turns`` by a reward per turn, which credits a turn with all
that came after it; ``turn_level`` by the reward of the own turn alone. Runs are compared by their right
turns of the last ten steps; ``outcome`` with other seeds of sampling gives the noise floor of ``rule.py``.
Runs that the file of results has are not repeated.

    OMP_NUM_THREADS=1 python benchmarks/learning/turns.py --seeds 3
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rule
from common import RESULTS, write_results

TURNS, TASKS, STEPS, LAST = 8, 4, 40, 10
LETTERS = "abcdefgh"
SETTINGS = {"outcome": "group_mean", "turns": "group_mean", "turn_level": "turn_level"}


def tokenizer() -> Any:
    """Return a tokenizer with a token per letter, per task and per turn."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<end>", *LETTERS, *map(str, range(TASKS)), *(f"t{turn}" for turn in range(TURNS))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


def policy(size: int, seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=size, bos_token_id=None, eos_token_id=1, **shape))


def run(name: str, seed: int, sampling: int) -> list[float]:
    """Train; return the share of right turns of every step.

    Args:
        seed: of weights, of the right letters and of the order of tasks.
        sampling: of the sampled letters.
    """
    from datasets import Dataset

    from groupwise import GRPOConfig, GRPOTrainer, SamplingOptions

    text, draw = tokenizer(), random.Random(seed)
    letters = text.convert_tokens_to_ids(list(LETTERS))
    right = [[draw.choice(letters) for _ in range(TURNS)] for _ in range(TASKS)]
    shares: list[float] = []

    def play(prompts: list[str], trainer: Any) -> dict[str, Any]:
        marks = text.convert_tokens_to_ids([f"t{turn}" for turn in range(TURNS)])
        prompt_ids = [[*text(prompt)["input_ids"], marks[0]] for prompt in prompts]
        rows: list[list[int]] = [[] for _ in prompts]
        for turn in range(TURNS):
            contexts = [prompt + row for prompt, row in zip(prompt_ids, rows, strict=True)]
            answers = trainer.backend.generate(contexts, SamplingOptions([1] * len(rows)))
            for row, answer in zip(rows, answers, strict=True):
                row += [*answer.token_ids, *marks[turn + 1 : turn + 2]]
        hits = [
            [float(letter == wanted) for letter, wanted in zip(row[::2], right[int(prompt)], strict=True)]
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        shares.append(fmean(fmean(each) for each in hits))
        mask = ([1, 0] * TURNS)[:-1]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": rows,
            "env_mask": [mask] * len(rows),
            "hits": hits,
        }

    def outcome(hits: list[list[float]], **_: Any) -> list[float]:
        return [sum(each) for each in hits]

    def turns(hits: list[list[float]], **_: Any) -> list[list[float]]:
        return hits

    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            seed=1000 * sampling + seed,
            data_seed=seed,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=2 * TURNS,
            max_steps=STEPS,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            advantage_baseline=SETTINGS[name],
            generation_kwargs={"suppress_tokens": sorted({*range(len(text))} - {*letters})},
        )
        data = Dataset.from_dict({"prompt": [str(i % TASKS) for i in range(64)]})
        trainer = GRPOTrainer(
            policy(len(text), seed),
            outcome if name == "outcome" else turns,
            config,
            data,
            processing_class=text,
            rollout_func=play,
        )
        trainer.train()
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    path = RESULTS / "turn_rewards.json"
    results: dict[str, Any] = {"curves": {}}
    if path.exists():
        results = {"curves": json.loads(path.read_text())["curves"]}
    curves: dict[str, list[list[float]]] = results["curves"]
    for seed in seeds:
        for name, sampling in [*((name, 0) for name in SETTINGS), ("outcome", 1)]:  # in turn
            runs = curves.setdefault(f"{name}_{sampling}", [])
            if len(runs) == seed:
                begun = time.process_time()
                runs.append(shares := run(name, seed, sampling))
                taken = time.process_time() - begun
                write_results("turn_rewards", results)
                print(
                    f"{name}, seeds {seed} {sampling}: {fmean(shares[-LAST:]):.1%}, {taken:.0f} s", flush=True
                )
    last = {key: [fmean(each[-LAST:]) for each in runs] for key, runs in curves.items()}
    unchanged = list(zip(last["outcome_0"], last["outcome_1"], strict=True))
    floor = rule.noise(unchanged)
    results["right_turns"] = last
    for name in ("turns", "turn_level"):
        found = rule.comparison(last[f"{name}_0"], unchanged, floor)
        results[name] = {"difference": found.mean, "half": found.half, "verdict": found.verdict()}
        print(f"{name} against the outcome: {found}: {found.verdict()}")
    print(write_results("turn_rewards", results))


if __name__ == "__main__":
    main()
