"""Measure vLLM: sampling in both modes against the policy's ``generate``, weight sync, generating ahead.

SmolLM2-135M-Instruct, groups of 8 completions that run to their full length. The alternatives are
measured in turn. ``--part sync`` compares buckets with loading one tensor at a time. ``--part pipeline``
trains on one core with a server on another one: with ``rollout_staleness=1`` a step should take as long as
the longer of generation and training, as the run that does one after the other measures them.

    OMP_NUM_THREADS=2 python benchmarks/vllm_speed.py --part generate --pairs 5
    OMP_NUM_THREADS=2 python benchmarks/vllm_speed.py --part sync --pairs 5
    python benchmarks/vllm_speed.py --part pipeline --pairs 2 --steps 4
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    add_precision,
    format_ratio,
    measure_in_process,
    prepare_precision,
    print_result,
    ratio_summary,
    write_results,
)

GROUP = 8
SENTENCE = "The quick brown fox jumps over the lazy dog while seven wizards mix a strong potion. "
CASES = {"short": {"prompts": 4, "sentences": 1}, "long": {"prompts": 1, "sentences": 24}}
BUCKETS = {"512 MB": 512 * 2**20, "64 MB": 64 * 2**20, "one tensor": 1}


def settings(limit: int, precision: str, **given: Any) -> Any:
    from groupwise import GRPOConfig

    plain = {"output_dir": "/tmp/groupwise-benchmark", "use_cpu": True, "report_to": "none"}
    return GRPOConfig(max_completion_length=limit, bf16=precision == "bf16", **{**plain, **given})


def engine_backend(model: Any, tokenizer: Any, limit: int, precision: str) -> Any:
    from groupwise.generation.vllm import colocate

    # Every row runs to the limit, so that both backends sample the same number of tokens.
    full = {"ignore_eos": True, "min_tokens": limit}
    config = settings(limit, precision, use_vllm=True, generation_kwargs=full)
    colocate.check_engine(config)
    return colocate.make_backend(lambda: model, config, tokenizer)


def server_backend(model: Any, tokenizer: Any, limit: int, precision: str, url: str) -> Any:
    from groupwise.generation.vllm.server import VLLMServerBackend

    full = {"ignore_eos": True, "min_tokens": limit}
    given = {"vllm_mode": "server", "vllm_server_base_url": url, "generation_kwargs": full}
    config = settings(limit, precision, use_vllm=True, **given)
    return VLLMServerBackend(lambda: model, config, tokenizer)


def own_backend(model: Any, tokenizer: Any, limit: int, precision: str) -> Any:
    from groupwise.cpu.linear import replace_linears
    from groupwise.generation import transformers_backend

    replace_linears(model)  # as the trainer does; the engine has its own weights
    config = settings(limit, precision, generation_kwargs={"min_new_tokens": limit})
    return transformers_backend.make_backend(lambda: model, config, tokenizer)


def seconds(run: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def measure_generation(model: Any, tokenizer: Any, given: argparse.Namespace, url: str) -> dict[str, Any]:
    """Return tokens per second of all three, and ratios over pairs of adjacent runs."""
    from groupwise.policy.weight_iterator import PolicyWeights

    case, limit = given.case, given.limit
    common = (tokenizer, limit, given.precision)
    backends = {
        "generate": own_backend(prepare_precision(model, given.precision), *common),
        "colocate": engine_backend(model, *common),
        "server": server_backend(model, *common, url),
    }
    shape = CASES[case]
    texts = [f"{index}. " + SENTENCE * shape["sentences"] for index in range(shape["prompts"])]
    prompts = [ids for text in texts for ids in [tokenizer(text)["input_ids"]] * GROUP]
    rates: dict[str, list[float]] = {name: [] for name in backends}
    for round_ in range(given.pairs + 1):  # the first is a warm-up
        for name, backend in backends.items():
            # New weights before every round empty the prefix cache.
            backend.invalidate_weights()
            backend.sync_weights(PolicyWeights(model), step=round_)
            taken, completions = seconds(lambda backend=backend: backend.generate(prompts))
            tokens = sum(len(completion.token_ids) for completion in completions)
            assert tokens == len(prompts) * limit, (name, tokens)
            if round_:
                rates[name].append(tokens / taken)
    results = {"case": case, "limit": limit, "tokens_per_second": rates}
    for name, other in (("colocate", "generate"), ("server", "generate"), ("server", "colocate")):
        ratio = ratio_summary(rates[name], rates[other])
        print(f"{name} over {other}, {case}: {format_ratio(ratio)} in tokens a second")
        results[f"{name}_over_{other}"] = ratio
    backends["server"].close()
    return results


def measure_sync(model: Any, tokenizer: Any, pairs: int, precision: str) -> dict[str, Any]:
    """Return seconds per GB of weights by bucket size, in this process and through shared memory."""
    from groupwise.generation.vllm import transfer
    from groupwise.generation.vllm.weight_source import EngineWeights
    from groupwise.policy.weight_iterator import weight_iterator

    backend = engine_backend(model, tokenizer, 8, precision)
    weights = EngineWeights()

    def push(sender: Any, limit: int) -> None:
        transfer.BUCKET_BYTES = limit
        weights.begin(lambda: weight_iterator(model))
        sender.push(1)

    gigabytes = sum(tensor.nbytes for _, tensor in weight_iterator(model)) / 1e9
    results: dict[str, Any] = {"gigabytes": gigabytes}
    for name, in_process in (("local", True), ("shared memory", False)):
        sender = transfer.WeightTransfer("groupwise", backend.engine, weights, in_process=in_process)
        taken: dict[str, list[float]] = {size: [] for size in BUCKETS}
        for round_ in range(pairs + 1):
            for size, limit in BUCKETS.items():
                each, _ = seconds(partial(push, sender, limit))
                if round_:
                    taken[size].append(each / gigabytes)
        sender.close()
        ratio = ratio_summary(taken["512 MB"], taken["one tensor"])
        print(f"{name}: buckets of 512 MB over one tensor at a time: {format_ratio(ratio)}")
        results[name] = {"seconds_per_gb": taken, "buckets_over_one_tensor": ratio}
    return results


def partly_flat_reward(completion_ids: list[list[int]], row: list[int], varied: int, **_: Any) -> list[float]:
    """Return rewards with variance in every ``varied``-th group only; the others need no backward pass."""
    pairs = zip(completion_ids, row, strict=True)
    return [float(sum(ids) % 2) if number % varied == 0 else 0.0 for ids, number in pairs]


def run_worker(work: dict[str, Any]) -> None:
    """Train in this process on its own core and print the time of every step by phase."""
    os.sched_setaffinity(0, {work["core"]})
    import torch
    from datasets import Dataset
    from smollm2 import local_model
    from transformers import AutoTokenizer

    from groupwise import GRPOTrainer

    torch.set_num_threads(1)
    path, limit, prompts = str(local_model()), work["limit"], work["prompts"]
    texts = [f"Write a story about the number {number}." for number in range(64)]
    with tempfile.TemporaryDirectory() as directory:
        config = settings(
            limit,
            work["precision"],
            output_dir=directory,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=work["url"],
            rollout_staleness=work["staleness"],
            generation_kwargs={"ignore_eos": True, "min_tokens": limit},
            per_device_train_batch_size=prompts * GROUP,
            num_generations=GROUP,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            logprob_mismatch_check="off",  # covers the first steps only, and no stale tokens
            shuffle_dataset=False,
            max_steps=work["steps"] + 2,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        data = Dataset.from_dict({"prompt": texts, "row": list(range(64))})
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        reward = partial(partly_flat_reward, varied=work["varied"])
        trainer = GRPOTrainer(path, reward, config, data, processing_class=tokenizer)
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    kept = [
        {name: line[name] for name in line if name.startswith(("time/", "step_time", "staleness"))}
        for line in lines
    ]
    # The first step waits for a whole generation; nothing is generated during the last.
    print_result(kept[1:-1])


def measure_pipeline(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Measure step times with and without generating ahead, trainer and server on one core each."""
    from vllm_server import serving

    trainer_core, server_core = sorted(os.sched_getaffinity(0))[:2]
    shape = {name: getattr(given, name) for name in ("limit", "prompts", "steps", "varied", "precision")}
    work = {"core": trainer_core, **shape}
    lines: dict[str, list[dict[str, float]]] = {"sequential": [], "ahead": []}
    with serving(path, {server_core}, precision=given.precision) as url:
        for round_ in range(given.pairs):
            for staleness, name in enumerate(lines):
                settings = json.dumps({**work, "url": url, "staleness": staleness})
                limit, env = given.run_seconds, {"OMP_NUM_THREADS": "1"}
                lines[name] += measure_in_process(__file__, settings, timeout=limit, env=env)
                taken = [round(line["step_time"], 2) for line in lines[name][-given.steps :]]
                print(f"round {round_ + 1} {name}: steps of {taken} s", flush=True)
    steps = {name: [line["step_time"] for line in runs] for name, runs in lines.items()}
    generation = [line["time/generate"] for line in lines["sequential"]]
    # Everything but waiting, weight sync and optimizer included.
    training = [step - waited for step, waited in zip(steps["sequential"], generation, strict=True)]
    longer = [max(pair) for pair in zip(generation, training, strict=True)]
    # The run that generates ahead, by itself: the share of waiting in a step.
    busy = [line["step_time"] - line["time/generate"] for line in lines["ahead"]]
    summaries = {
        "ahead_over_sequential": ratio_summary(steps["ahead"], steps["sequential"]),
        "ahead_over_longer_of_both": ratio_summary(steps["ahead"], longer),
        "ahead_over_its_own_work": ratio_summary(steps["ahead"], busy),
    }
    for name, seconds_ in (("generation", generation), ("training", training), *steps.items()):
        print(f"{name}: {statistics.median(seconds_):.2f} s")
    for name, summary in summaries.items():
        print(f"{name.replace('_', ' ')}: {format_ratio(summary)}")
    return {"work": work, "generation": generation, "training": training, "steps": lines, **summaries}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["generate", "sync", "pipeline"], default="generate")
    parser.add_argument("--case", choices=list(CASES), default="short", help="of --part generate")
    parser.add_argument("--limit", type=int, default=64, help="tokens of every completion")
    parser.add_argument("--pairs", type=int, default=5, help="runs of every alternative")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step; --part pipeline")
    parser.add_argument(
        "--varied", type=int, default=2, help="one of so many groups has a gradient, likewise"
    )
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a run; --part pipeline")
    parser.add_argument("--run_seconds", type=float, default=1200, help="limit of a run; --part pipeline")
    add_precision(parser)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        run_worker(given.worker)
        return

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # otherwise the server would keep running
    from smollm2 import local_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm_server import serving

    path = local_model()
    if given.part == "pipeline":
        print(write_results(f"vllm_pipeline_{given.precision}", measure_pipeline(path, given)))
        return
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    if given.part == "generate":
        with serving(path, os.sched_getaffinity(0), precision=given.precision) as url:
            results = measure_generation(model, tokenizer, given, url)
        name = f"vllm_generate_{given.case}"
    else:
        results, name = measure_sync(model, tokenizer, given.pairs, given.precision), "vllm_sync"
    print(write_results(f"{name}_{given.precision}", results))


if __name__ == "__main__":
    main()
