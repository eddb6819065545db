"""Measure what this process does per sampled token: processor time and bytes, by phase, with a vLLM server.

A server in another process answers every request with one recorded response in vLLM's format. No model runs.
Processor time is that of this process, so that other load on the machine matters little; the longest stall
is the wall-clock time that the main thread could not run while the responses arrive, and does depend on it.
Of the stalls, the processor time of the client is given, too.

``--library trl`` measures TRL's client, and its trainer's steps from the response to padded tensors: as lines
of this file, because they are parts of long methods. ``--processes`` runs as many measurements at once, each
with its own completions and server, and reports the most of all.

    OMP_NUM_THREADS=1 python benchmarks/host_cost.py --completions 64 --length 4096
    python benchmarks/host_cost.py --completions 64 --length 16384 --group 1 --candidates 2 --files
    python benchmarks/host_cost.py --completions 64 --length 4096 --library trl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import write_results

VOCABULARY = 1000
STEP = "run:0"


def response(length: int, group: int, candidates: int, mask: int) -> bytes:
    """Return a generation of ``group`` completions as vLLM writes it: compact, with a rank for each entry."""
    draw, choices = random.Random(0), []
    for index in range(group):
        tokens = [draw.randrange(4, VOCABULARY) for _ in range(length)]
        content: list[dict[str, Any]] = [
            {"token_id": token, "logprob": -draw.random() * 3, "rank": 1} for token in tokens
        ]
        content = [{**entry, "top_logprobs": [entry] * max(candidates, 1)} for entry in content]
        kept = [[token, *range(mask - 1)] for token in tokens] if mask else None
        choices.append(
            {
                **{"index": index, "finish_reason": "length", "stop_reason": None, "token_ids": tokens},
                **{"routed_experts": None, "sampling_mask": kept},
                "weight_versions": [{"version": STEP, "start": 0, "end": length}],
                "logprobs": {"content": content},
            }
        )
    whole = {"request_id": "recorded", "choices": choices, "prompt_logprobs": None, "prompt_token_ids": None}
    return json.dumps(whole, separators=(",", ":")).encode()


def trl_response(length: int, completions: int) -> bytes:
    """Return the response to TRL's request for all prompts, as vLLM's route of completions writes it."""
    draw, choices = random.Random(0), []
    for index in range(completions):
        tokens = [draw.randrange(4, VOCABULARY) for _ in range(length)]
        logps = [-draw.random() * 3 for _ in tokens]
        names = [f"token_id:{token}" for token in tokens]
        logprobs = {
            **{"text_offset": [0] * length, "token_logprobs": logps, "tokens": names},
            "top_logprobs": [{name: logp} for name, logp in zip(names, logps, strict=True)],
        }
        choices.append(
            {
                **{"index": index, "text": "", "logprobs": logprobs, "finish_reason": "length"},
                **{
                    "stop_reason": None,
                    "token_ids": tokens,
                    "prompt_logprobs": None,
                    "prompt_token_ids": [5, 6],
                },
            }
        )
    return json.dumps({"id": "recorded", "choices": choices}, separators=(",", ":")).encode()


def serve(text: bytes, port: Any) -> None:
    """Answer every request with ``text``; the port is sent through a pipe."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer.request_queue_size = 1024  # connections that begin at once
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_address[1])
    server.serve_forever()


@contextmanager
def serving(text: bytes) -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(text, theirs), daemon=True)
    process.start()
    yield f"http://127.0.0.1:{ours.recv()}"
    process.terminate()
    process.join()


def tokenizer() -> Any:
    """Return a fast tokenizer of words."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"Ġword{i}": i for i in range(2, VOCABULARY)}}
    of_words = Tokenizer(models.BPE(words, [], unk_token="<pad>"))
    of_words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="<pad>", eos_token="<eos>")


def resident() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/smaps_rollup") as file:  # statm counts some pages later
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Rss:"))


class Clock:
    """Processor time and resident bytes per token of each phase, from now or :meth:`start` on."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.start_bytes = num_tokens, resident()
        self.phases, self.memory = dict[str, float](), dict[str, float]()
        self.reset_peak()

    def start(self) -> None:
        self.start_bytes = resident()

    def phase(self, name: str, run: Callable[..., Any], *given: Any) -> Any:
        before = time.process_time()
        result = run(*given)
        self.phases[name] = (time.process_time() - before) / self.num_tokens * 1e6
        self.memory[name] = (resident() - self.start_bytes) / self.num_tokens
        return result

    def reset_peak(self) -> None:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def peak(self) -> float:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        most = max(most, resident())  # the first counts some pages later
        return (most - self.start_bytes) / self.num_tokens

    def results(self) -> dict[str, Any]:
        return {
            "tokens": self.num_tokens,
            "microseconds per token": {**self.phases, "in all": sum(self.phases.values())},
            "resident bytes per token after": dict(self.memory),
        }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return µs and bytes per token by phase, and the longest stall of the main thread in ms."""
    text = response(given.length, given.group, given.candidates, given.mask)
    short = argparse.Namespace(**{**vars(given), "completions": 8, "length": 100, "group": 1})
    with serving(response(100, 1, given.candidates, given.mask)) as url:
        measure_phases(short, url)  # the first call of each phase imports and initialises what it needs
    from groupwise.hf.base import frozen_objects

    with serving(text) as url, frozen_objects():  # as in train()
        results = measure_phases(given, url)
    return {"response bytes per token": len(text) / given.group / given.length, **results}


def measure_phases(given: argparse.Namespace, url: str) -> dict[str, Any]:
    import torch

    from groupwise.cpu import malloc_trim
    from groupwise.generation.vllm.base import Request
    from groupwise.generation.vllm.client import VLLMServers
    from groupwise.mixins.logprob import LogprobMixin
    from groupwise.mixins.rollout import RolloutMixin
    from groupwise.records import RolloutRequest
    from groupwise.reporting.metrics import rollout_metrics
    from groupwise.rewards.runtime.calling import reward_arguments

    args = {"pad_to_multiple_of": None, "mask_truncated_completions": False, "use_liger_kernel": False}
    shared = {
        "args": SimpleNamespace(**args, chat_template_kwargs={}),
        "accelerator": SimpleNamespace(device=torch.device("cpu"), process_index=0),
        "metrics_column": "",
        "processing_class": tokenizer(),
    }
    of_rollouts, of_logprobs = RolloutMixin(), LogprobMixin()
    vars(of_rollouts).update(shared)
    vars(of_logprobs).update(shared)
    num_requests = given.completions // given.group
    num_tokens = num_requests * given.group * given.length
    stalls: list[tuple[float, float]] = []  # seconds, and processor time of the client in them
    servers = VLLMServers([url], timeout=600, run_id="run")
    servers.steps = [0]
    params = {"n": given.group, "max_tokens": given.length, "logprobs": given.candidates}
    clock = Clock(num_tokens)
    phase = clock.phase

    def receive() -> list[Any]:
        futures = [
            servers.submit(Request([5, 6], range(given.group), 0, given.length), params)
            for _ in range(num_requests)
        ]
        waiting = threading.Event()
        (client,) = [one.ident for one in threading.enumerate() if one.name == "vllm-client"]
        of_client = time.pthread_getcpuclockid(client)
        last, busy = time.perf_counter(), time.clock_gettime(of_client)
        while not all(future.done() for future in reversed(futures)):  # ends at the first that is not
            waiting.wait(0.002)
            now, used = time.perf_counter(), time.clock_gettime(of_client)
            stalls.append((now - last - 0.002, used - busy))
            last, busy = now, used
        found = [one for future in futures for one in future.result()]
        malloc_trim()  # as VLLMServerBackend.complete does
        return found

    completions = phase("receive, parse, check", receive)
    servers.close()
    rows = [{"prompt": "word5 word6"}] * len(completions)
    request = RolloutRequest(rows, given.group)
    prompt_ids = [[5, 6]] * len(rows)
    rollouts = phase("decode", of_rollouts.make_rollouts, request, prompt_ids, completions)
    del completions
    phase("rewards", reward_arguments, rollouts)
    phase("metrics", rollout_metrics, rollouts, 0)
    tokens = phase("collate", of_logprobs.collate, rollouts)
    assert int(tokens.loss_mask_BT.sum()) == num_tokens
    found = {
        "peak bytes per token": clock.peak(),
        "longest stall ms": 1e3 * max(stalls)[0],
        "five longest stalls ms": [1e3 * stall for stall, _ in sorted(stalls)[-5:]],
        "processor ms of the client in them": [1e3 * used for _, used in sorted(stalls)[-5:]],
        "longest stall in processor ms of the client": 1e3 * max(min(pair) for pair in stalls),
    }
    if given.files:
        found["files"] = measure_files(clock, rollouts, tokens, given.group)
    clock.reset_peak()
    window = micro_batches(tokens)
    del tokens, rollouts  # as in the trainer, where a buffer has the window alone
    batches = phase("rebalance", rebalanced, window, given.length)
    assert sum(int(batch.loss_mask_BT.sum()) for batch in batches) == num_tokens
    return {**clock.results(), **found, "peak bytes per token of rebalancing": clock.peak()}


def micro_batches(tokens: Any, rows: int = 8) -> list[Any]:
    """Return a window of micro-batches in which every row has an advantage."""
    import torch

    from groupwise.records import Experience, MicroBatch, OldAndRefLogps

    logps = OldAndRefLogps(tokens.old_logps_BT, None)
    return [
        MicroBatch(
            **vars(part),
            token_weights_BT=part.loss_mask_BT.float(),
            entropy_mask_BT=part.loss_mask_BT,
            sequence_weight_B1=torch.ones(len(part), 1),
        )
        for part in Experience.from_tokens(tokens, torch.ones(len(tokens)), logps).split(rows)
    ]


def rebalanced(window: list[Any], length: int) -> list[Any]:
    from groupwise.data.budget import MicroBatchBudget
    from groupwise.data.rebalancing import rebalance

    budget = MicroBatchBudget(False, len(window[0]), length, skip_zero_advantage=True)
    return [batch for batch in rebalance(window, "packed", budget)[0] if batch is not None]


def measure_files(clock: Clock, rollouts: Any, tokens: Any, group: int) -> dict[str, float]:
    """Return bytes per token of the file of a generation, and of that of a checkpoint with its tensors."""
    import torch

    from groupwise.hf.checkpointing import STATE, save_state
    from groupwise.records import Experience, OldAndRefLogps, RewardBatch
    from groupwise.reporting.rollout_files import RolloutFiles

    num_rows = len(rollouts)
    rewards = RewardBatch(torch.zeros(num_rows, 1), torch.ones(1), group, local=slice(0, num_rows))
    experience = Experience.from_tokens(
        tokens, torch.zeros(num_rows), OldAndRefLogps(tokens.old_logps_BT, None)
    )
    with tempfile.TemporaryDirectory() as folder:
        args = SimpleNamespace(output_dir=folder, process_index=0, world_size=1)
        state: Any = SimpleNamespace(global_step=0)
        files = RolloutFiles(SimpleNamespace(args=args, state=state))
        write = lambda: files.on_generation_end(args, state, None, rollouts, rewards)  # type: ignore  # noqa: E731
        clock.phase("rollout file", write)
        (file,) = files.folder.glob("*.gz")
        size = file.stat().st_size
        clock.phase("checkpoint", save_state, folder, 0, 1, {"entries": [experience]})
        saved = Path(folder, STATE.format(rank=0)).stat().st_size
    names = ("rollout file", "checkpoint")
    return {
        **{f"{name}, microseconds per token": clock.phases[name] for name in names},
        "rollout file, bytes per token": size / clock.num_tokens,
        "checkpoint, bytes per token": saved / clock.num_tokens,
        "peak bytes per token with files": clock.peak(),
    }


def measure_trl(given: argparse.Namespace) -> dict[str, Any]:
    """Return the same of TRL, from its client's call to the tensors of its batch."""
    import requests
    import torch
    from trl.generation.vllm_client import VLLMClient
    from trl.trainer.utils import pad

    clock, of_words = Clock(given.completions * given.length), tokenizer()
    text = trl_response(given.length, given.completions)
    client = VLLMClient.__new__(VLLMClient)  # without waiting for weights that no test server takes
    client.session, client.model = requests.Session(), "recorded"
    with serving(text) as client.base_url:
        clock.start()
        prompts = [[5, 6]] * (given.completions // given.group)
        output = clock.phase("receive, parse, check", lambda: client.generate(prompts, n=given.group))
    ids, tops = output["completion_ids"], output["logprobs"]
    # As in GRPOTrainer: the sampled token's log-prob, texts, and three padded tensors.
    logps = clock.phase("choose log-probs", lambda: [[one[0] for one in row] for row in tops])
    texts = clock.phase("decode", lambda: of_words.batch_decode(ids, skip_special_tokens=True))
    assert len(texts) == given.completions

    def collate() -> list[Any]:
        rows = [torch.tensor(row) for row in ids]
        masks = [torch.ones_like(row, dtype=torch.long) for row in rows]
        sampled = [torch.tensor([float("nan") if x is None else x for x in row]) for row in logps]
        return [pad(rows, padding_value=0), pad(masks, padding_value=0), pad(sampled, padding_value=0.0)]

    assert clock.phase("collate", collate)[1].sum() == clock.num_tokens
    size = len(text) / clock.num_tokens
    return {"response bytes per token": size, **clock.results(), "peak bytes per token": clock.peak()}


def most_of(parts: list[Any]) -> Any:
    """Return the largest of each number of results of equal form."""
    if isinstance(parts[0], dict):
        return {name: most_of([part[name] for part in parts]) for name in parts[0]}
    return max(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--group", type=int, default=8, help="completions per request")
    parser.add_argument("--candidates", type=int, default=0, help="log-probs per position that are asked for")
    parser.add_argument("--mask", type=int, default=0, help="token ids per position of a sampling mask")
    parser.add_argument("--files", action="store_true", help="write a rollout file and a checkpoint, too")
    parser.add_argument("--processes", type=int, default=1, help="measurements at once")
    parser.add_argument("--library", choices=("groupwise", "trl"), default="groupwise")
    parser.add_argument("--output", default="", help="end of the name of the results file")
    given = parser.parse_args()
    run = measure_trl if given.library == "trl" else measure
    # Each in a process of its own, whose peak is that of the measurement alone.
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(run, [given] * given.processes))
    results = {"given": vars(given), **most_of(parts)}
    for name, value in results["microseconds per token"].items():
        print(f"{name:<24}{value:8.3f} µs")
    print(f"longest stall {results.get('longest stall ms', float('nan')):.1f} ms")
    print(f"peak {results['peak bytes per token']:.0f} bytes per token")
    for name, value in results.get("files", {}).items():
        print(f"{value:8.3f} {name}")
    print(write_results(f"host_cost_{given.completions}x{given.length}{given.output}", results))


if __name__ == "__main__":
    main()
