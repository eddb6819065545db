"""Sampling with a vLLM engine in the trainer's process against the policy's ``generate``; its weight sync.

SmolLM2-135M-Instruct in float32, groups of 8 completions that run to their full length. One process measures
the alternatives in turn; ``--part sync`` compares buckets with loading one tensor at a time.

    OMP_NUM_THREADS=2 python benchmarks/vllm.py --part generate --pairs 5
    OMP_NUM_THREADS=2 python benchmarks/vllm.py --part sync --pairs 5
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# At the end: in front, `import vllm` would find this file.
sys.path = [path for path in sys.path if Path(path).resolve() != HERE]
sys.path += [str(HERE), str(HERE.parent / "examples")]

GROUP = 8
SENTENCE = "The quick brown fox jumps over the lazy dog while seven wizards mix a strong potion. "
CASES = {"short": {"prompts": 4, "sentences": 1}, "long": {"prompts": 1, "sentences": 24}}
BUCKETS = {"512 MB": 512 * 2**20, "64 MB": 64 * 2**20, "one tensor": 1}


def settings(limit: int, **given: Any) -> Any:
    from groupwise import GRPOConfig

    return GRPOConfig(
        "/tmp/groupwise-benchmark",
        max_completion_length=limit,
        bf16=False,
        use_cpu=True,
        report_to="none",
        **given,
    )


def engine_backend(model: Any, tokenizer: Any, limit: int) -> Any:
    from groupwise.backends.vllm import colocate

    # Every row runs to the limit, so that both backends sample the same number of tokens.
    config = settings(limit, use_vllm=True, generation_kwargs={"ignore_eos": True, "min_tokens": limit})
    colocate.check_settings(config)
    return colocate.make_backend(lambda: model, config, tokenizer)


def own_backend(model: Any, tokenizer: Any, limit: int) -> Any:
    from groupwise.backends import transformers_generate

    config = settings(limit, generation_kwargs={"min_new_tokens": limit})
    return transformers_generate.make_backend(lambda: model, config, tokenizer)


def seconds(run: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def measure_generation(model: Any, tokenizer: Any, case: str, limit: int, pairs: int) -> dict[str, Any]:
    """Tokens a second of both backends, and their ratio over pairs of neighbouring runs."""
    from common import format_ratio, ratio_summary

    from groupwise.backends.weight_stream import weight_stream

    backends = {
        "generate": own_backend(model, tokenizer, limit),
        "colocate": engine_backend(model, tokenizer, limit),
    }
    shape = CASES[case]
    texts = [f"{index}. " + SENTENCE * shape["sentences"] for index in range(shape["prompts"])]
    prompts = [ids for text in texts for ids in [tokenizer(text)["input_ids"]] * GROUP]
    rates: dict[str, list[float]] = {name: [] for name in backends}
    for round_ in range(pairs + 1):  # the first is not counted
        for name, backend in backends.items():
            # New weights before every round, so that no prompt is in the cache of the one before.
            backend.version = None
            backend.sync_weights(weight_stream(model), step=round_)
            taken, completions = seconds(lambda backend=backend: backend.generate(prompts))
            tokens = sum(len(completion.token_ids) for completion in completions)
            assert tokens == len(prompts) * limit, (name, tokens)
            if round_:
                rates[name].append(tokens / taken)
    ratio = ratio_summary(rates["colocate"], rates["generate"])
    print(f"colocate over generate, {case}: {format_ratio(ratio)} in tokens a second")
    return {"case": case, "limit": limit, "tokens_per_second": rates, "colocate_over_generate": ratio}


def measure_sync(model: Any, tokenizer: Any, pairs: int) -> dict[str, Any]:
    """Seconds per GB of weights, in this process and through shared memory, by the size of buckets."""
    from common import format_ratio, ratio_summary

    from groupwise.backends.vllm.carriers import LocalReceiver
    from groupwise.backends.vllm.transport import LocalSender, SharedMemorySender
    from groupwise.backends.weight_stream import buckets, weight_stream

    backend = engine_backend(model, tokenizer, 8)
    receiver = LocalReceiver(backend.engine)
    gigabytes = sum(tensor.nbytes for _, tensor in weight_stream(model)) / 1e9
    results: dict[str, Any] = {"gigabytes": gigabytes}
    for name, sender in (("local", LocalSender()), ("shared memory", SharedMemorySender())):
        taken: dict[str, list[float]] = {size: [] for size in BUCKETS}
        for round_ in range(pairs + 1):
            for size, limit in BUCKETS.items():
                cut = lambda limit=limit: buckets(weight_stream(model), limit)  # noqa: E731
                each, _ = seconds(lambda cut=cut, sender=sender: sender.push(cut(), receiver, 1))
                if round_:
                    taken[size].append(each / gigabytes)
        sender.close()
        ratio = ratio_summary(taken["512 MB"], taken["one tensor"])
        print(f"{name}: buckets of 512 MB over one tensor at a time: {format_ratio(ratio)}")
        results[name] = {"seconds_per_gb": taken, "buckets_over_one_tensor": ratio}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["generate", "sync"], default="generate")
    parser.add_argument("--case", choices=list(CASES), default="short")
    parser.add_argument("--limit", type=int, default=64, help="tokens of every completion")
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()

    from common import write_results
    from smollm2 import local_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = local_model()
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    if given.part == "generate":
        results = measure_generation(model, tokenizer, given.case, given.limit, given.pairs)
        name = f"vllm_generate_{given.case}"
    else:
        results, name = measure_sync(model, tokenizer, given.pairs), "vllm_sync"
    print(write_results(name, results))


if __name__ == "__main__":
    main()
