"""Measure how long a trainer waits for conversations of very unequal length, by how far they run ahead.

An environment plays conversations of 1 to 8 turns with calls of 0 to 3 s between them, the same in every
alternative: a Llama of random weights samples each turn on a vLLM server. Trainer and server have one core
each. ``sequential`` is ``rollout_staleness=0``, ``ahead`` is 1. ``first_turns`` is 1 where only the first
turns are sampled beside the update. No setting does that: this script leaves the later ones to their step.
Each call adds its rounds to those of the results file.

    python benchmarks/later_turns.py --rounds 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from common import RESULTS, describe_machine, measure_in_process, print_result, ratio_summary, write_results

ALTERNATIVES = {"sequential": 0, "first_turns": 1, "ahead": 1}
GROUP, TURNS, LONGEST_CALL = 8, 8, 3.0
LETTERS = "abcdefghijklmno"  # of a turn, with an end of the same probability
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def calls(row: int, rollout: int) -> list[float]:
    """Return the seconds of the calls between the turns of a conversation; most are short."""
    draw = random.Random(f"{row} {rollout}")
    return [LONGEST_CALL * draw.random() ** 3 for _ in range(draw.randint(0, TURNS - 1))]


class Visits:
    """An environment with the conversations of :func:`calls`."""

    time_limit, uses_tools = 60.0, False

    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()

    async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
        number = row["number"]
        pauses = calls(number, self.begun[number] % GROUP)
        self.begun[number] += 1
        messages = list(row["prompt"])
        for seconds in pauses:
            messages.append((await chat(messages, [])).message)
            await asyncio.sleep(seconds)
            messages.append({"role": "user", "content": "on"})
        final = await chat(messages, [])
        return {"final": final.message["content"]}

    def reward_funcs(self) -> list[Any]:
        def letters(final: list[str | None], **_: Any) -> list[float]:
            return [float(len({*(text or "")})) for text in final]

        return [letters]


def tokenizer() -> Any:
    """Return a tokenizer with a token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(letters, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=SPECIAL[1], pad_token=SPECIAL[2], chat_template=CHAT
    )


def policy(text: Any, layers: int) -> Any:
    """Return random weights that mostly sample letters and the end."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(text),
            num_hidden_layers=layers,
            max_position_embeddings=2048,
            bos_token_id=None,
            eos_token_id=text.eos_token_id,
            **shape,
        )
    )
    said = [*text.convert_tokens_to_ids([*LETTERS]), text.eos_token_id]
    with torch.no_grad():  # the first entry of every hidden state is about the same: a bias
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.lm_head.weight[:, 0] = -0.4
        model.lm_head.weight[said, 0] = 0.4
    return model


def run_worker(work: dict[str, Any]) -> None:
    """Train in this process on its own core and print the times of every step but the first."""
    os.sched_setaffinity(0, {work["core"]})
    import torch
    from datasets import Dataset

    from groupwise import GRPOConfig, GRPOTrainer
    from groupwise.agents import multi_turn

    torch.set_num_threads(1)
    if work["name"] == "first_turns":  # the generate calls of the step then sample the later ones
        multi_turn.MultiTurnRollouts._continue = lambda *_: None
    text = tokenizer()
    rows = [
        {"prompt": [{"role": "user", "content": f"go {number}"}], "number": number}
        for number in range(work["steps"] + 1)
    ]
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            use_cpu=True,
            bf16=False,
            report_to="none",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=work["url"],
            rollout_staleness=ALTERNATIVES[work["name"]],
            per_device_train_batch_size=GROUP,
            num_generations=GROUP,
            max_completion_length=1024,
            learning_rate=1e-8,  # turns of the same length in every step
            gradient_checkpointing=False,
            logprob_mismatch_check="off",  # covers the first steps only, and no stale tokens
            shuffle_dataset=False,
            max_steps=len(rows),
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            policy(text, work["layers"]),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=text,
            environment_factory=Visits(),
        )
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    kept = ("time/", "step_time", "staleness", "completions/mean_length")
    # The first step waits for a whole generation in every alternative.
    print_result([{name: line[name] for name in line if name.startswith(kept)} for line in lines[1:]])


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of waiting and the steps per minute of each alternative, and ratios of step times."""
    of: dict[str, list[Any]] = {name: [each["steps"][name] for each in rounds] for name in ALTERNATIVES}

    def shares(runs: list[Any], *names: str) -> list[float]:
        times = [(sum(sum(line[name] for name in names) for line in run), run) for run in runs]
        return [round(time / sum(line["step_time"] for line in run), 3) for time, run in times]

    found: dict[str, Any] = {
        name: {
            "waiting_share": shares(runs, "time/generate", "time/idle"),
            "generate_share": shares(runs, "time/generate"),
            "steps_per_minute": [
                round(60 * len(run) / sum(line["step_time"] for line in run), 2) for run in runs
            ],
        }
        for name, runs in of.items()
    }
    times = {name: [line["step_time"] for run in runs for line in run] for name, runs in of.items()}
    found["ahead_over_sequential"] = ratio_summary(times["ahead"], times["sequential"])
    found["ahead_over_first_turns"] = ratio_summary(times["ahead"], times["first_turns"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1, help="added runs of every alternative")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a run")
    parser.add_argument("--layers", type=int, default=4, help="of the policy")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        run_worker(given.worker)
        return

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # otherwise the server would keep running
    from vllm_server import serving

    path = RESULTS / "later_turns.json"
    rounds = json.loads(path.read_text())["rounds"] if path.exists() else []
    trainer_core, server_core = sorted(os.sched_getaffinity(0))[:2]
    shape = {name: getattr(given, name) for name in ("steps", "layers")}
    with tempfile.TemporaryDirectory() as directory:
        text = tokenizer()
        policy(text, given.layers).save_pretrained(directory)
        text.save_pretrained(directory)
        with serving(Path(directory), {server_core}, precision="float32", cache_mib=256) as url:
            for _ in range(given.rounds):
                steps = {}
                for name in ALTERNATIVES:
                    work = json.dumps({**shape, "name": name, "core": trainer_core, "url": url})
                    env = {"OMP_NUM_THREADS": "1"}
                    steps[name] = measure_in_process(__file__, work, timeout=1200, env=env)
                    print(name, [round(line["step_time"], 1) for line in steps[name]], flush=True)
                rounds.append({"shape": shape, "machine": describe_machine(), "steps": steps})
                results = {"summary": summary(rounds), "rounds": rounds}
                print(json.dumps(results["summary"], indent=1), write_results("later_turns", results))


if __name__ == "__main__":
    main()
