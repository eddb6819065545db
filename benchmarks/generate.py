"""Compare sampling without an engine: groupwise's loop, plain ``generate`` and continuous batching.

SmolLM2-135M-Instruct, groups of 8 completions. Most completions are short and a few run to the
limit: all three produce the same numbers of tokens, by forcing the end token or a length of each request.
groupwise's model computes as in its trainer, the other two are as transformers loads them.

    python benchmarks/generate.py --case long --pairs 5
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from typing import Any

import torch
from common import add_precision, format_ratio, prepare_precision, ratio_summary, write_results

SENTENCE = (
    "The quick brown fox jumps over the lazy dog while seven wizards mix a strong potion in the dark cellar. "
)
GROUP = 8
CASES = {"short": {"prompts": 4, "sentences": 0}, "long": {"prompts": 1, "sentences": 19}}


def skewed_lengths(count: int, limit: int, scale: float = 0.25) -> list[int]:
    """Return quantiles of an exponential distribution with mean `scale` × limit, cut off at the limit.

    Descending: the rows that a processor ends are the last ones still running.
    """
    lengths = [math.ceil(-limit * scale * math.log1p(-(i + 0.5) / count)) for i in range(count)]
    return sorted((min(limit, length) for length in lengths), reverse=True)


class EndOnSchedule:
    """Logits processor that ends as many running rows at each step as the lengths prescribe."""

    def __init__(self, lengths: list[int], width: int, end: int) -> None:
        self.lengths, self.width, self.end = lengths, width, end

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = tokens.shape[1] - self.width + 1  # of the next token
        running = (tokens[:, self.width :] != self.end).all(1).nonzero().squeeze(1)
        remaining = sum(length > position for length in self.lengths)
        scores = scores.clone()
        scores[:, self.end] = -torch.inf
        ending = running[remaining:]
        scores[ending] = -torch.inf
        scores[ending, self.end] = 0.0
        return scores


def scheduled_sampler(processors: Any, criteria: Any, config: Any) -> Any:
    """Sampler of groupwise's loop that ends rows on schedule.

    The loop refuses processors that transformers did not make, since they may act on several rows. A schedule
    does, and the rows that leave are those that it ended.
    """
    from transformers import LogitsProcessorList

    from groupwise.generation.decoding import RowSampler

    stock = LogitsProcessorList(part for part in processors if not isinstance(part, EndOnSchedule))
    sampler = RowSampler(stock, criteria, config)
    sampler.processors = processors
    return sampler


def plain(model: Any, prompts: list[list[int]], config: Any, lengths: list[int]) -> list[int]:
    """Run ``generate`` on a copy of the prompt for every completion."""
    return _count(model, [prompt for prompt in prompts for _ in range(GROUP)], config, lengths)


def groupwise(model: Any, prompts: list[list[int]], config: Any, lengths: list[int]) -> list[int]:
    """Run ``generate`` with groupwise's loop and linear layers."""
    from groupwise.cpu.linear import prepacked_weights, replace_linears
    from groupwise.generation.decoding import decode_groups
    from groupwise.generation.settings import decoding_path

    if reason := decoding_path(model, config).reason:
        raise SystemExit(f"the loop does not take this model: {reason}")
    loop = partial(decode_groups, copies=[GROUP] * len(prompts), make_sampler=scheduled_sampler)
    replace_linears(model)  # as the trainer does at its start; layers that are fast already stay
    with prepacked_weights(model):
        return _count(model, prompts, config, lengths, custom_generate=loop)


def _count(model: Any, rows: list[list[int]], config: Any, lengths: list[int], **loop: Any) -> list[int]:
    from groupwise.core.padding import length_mask, pad_sequences

    input_ids = pad_sequences(rows, config.pad_token_id, left=True)
    width = input_ids.shape[1]
    sequences = model.generate(
        input_ids=input_ids,
        attention_mask=length_mask([len(row) for row in rows], width, left=True),
        generation_config=config,
        logits_processor=[EndOnSchedule(lengths, width, config.eos_token_id)],
        **loop,
    )
    before_end = (sequences[:, width:] == config.eos_token_id).cumsum(1) == 0
    return (before_end.sum(1) + 1).clamp(max=max(lengths)).tolist()


def continuous(model: Any, prompts: list[list[int]], config: Any, lengths: list[int]) -> list[int]:
    """Run continuous batching, started for every batch as in a trainer.

    Its cache has room for all rows at once: the default is a share of the free memory, whose set-up alone
    takes longer than the sampling here.
    """
    from transformers import ContinuousBatchingConfig

    pages = sum(math.ceil((len(prompts[row // GROUP]) + length) / 256) for row, length in enumerate(lengths))
    room = ContinuousBatchingConfig(num_blocks=pages + len(lengths), max_batch_tokens=1024)
    counts: list[int] = []
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=room, warmup=False
    ) as manager:
        for row, length in enumerate(lengths):
            manager.add_request(prompts[row // GROUP], max_new_tokens=length, eos_token_id=-1)
        while len(counts) < len(lengths):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                counts.append(len(result.generated_tokens))
    return counts


def load_model(path: str, method: str, precision: str) -> Any:
    """Load the model of a method: each sets its own attention implementation.

    The cache of continuous batching has the dtype of the weights: in bf16 they are in bfloat16.
    """
    from transformers import AutoModelForCausalLM

    if precision == "bf16" and method == "continuous_batching":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return prepare_precision(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), precision)


METHODS = {"groupwise": groupwise, "generate": plain, "continuous_batching": continuous}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, default="short")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--limit", type=int, default=256, help="length of the longest completion")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add_precision(parser)
    options = parser.parse_args()
    from smollm2 import local_model
    from transformers import AutoTokenizer, GenerationConfig

    path, case = str(local_model()), CASES[options.case]
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [
        tokenizer(SENTENCE * case["sentences"] + f"Write a short story about the number {n}.")["input_ids"]
        for n in range(case["prompts"])
    ]
    config = GenerationConfig(
        max_new_tokens=options.limit,
        do_sample=True,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        bos_token_id=1,
    )
    seconds: dict[str, list[float]] = {name: [] for name in options.methods}
    models = {name: load_model(path, name, options.precision) for name in seconds}
    lengths = skewed_lengths(GROUP * len(prompts), options.limit)
    for name, model in models.items():  # warm-up
        METHODS[name](model, prompts, config, [2] * len(lengths))
    for pair in range(options.pairs):
        for name, model in models.items():
            torch.manual_seed(pair)
            start = time.perf_counter()
            counts = METHODS[name](model, prompts, config, lengths)
            seconds[name].append(time.perf_counter() - start)
            if sorted(counts) != sorted(lengths):
                raise SystemExit(f"{name} made {sorted(counts)} tokens instead of {sorted(lengths)}")
        print(
            f"pair {pair + 1}:", {name: round(values[-1], 1) for name, values in seconds.items()}, flush=True
        )
        own = seconds["groupwise"]
        ratios = {name: ratio_summary(own, seconds[name]) for name in seconds if name != "groupwise"}
        settings = {**vars(options), **case, "group": GROUP, "prompt_tokens": [len(p) for p in prompts]}
        results = {"settings": settings, "lengths": lengths, "seconds": seconds, "time_ratio": ratios}
        write_results(f"generate_{options.case}_{options.precision}", results)
    for name, ratio in ratios.items():
        print(f"groupwise / {name}: {format_ratio(ratio)}")


if __name__ == "__main__":
    main()
