"""Measure what this process does per sampled token: processor time and bytes, by phase, with a vLLM server.

A server in another process answers every request with one recorded response in vLLM's format. No model runs.
Processor time is that of this process, so that other load on the machine matters little; the longest stall
is the wall-clock time that the main thread could not run while the responses arrive, and does depend on it.

    OMP_NUM_THREADS=1 python benchmarks/host_cost.py --completions 64 --length 4096
    python benchmarks/host_cost.py --completions 64 --length 16384 --group 1 --candidates 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return µs and bytes per token by phase, and the longest stall of the main thread in ms."""
    import torch

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
        "processing_class": tokenizer(),
    }
    of_rollouts, of_logprobs = RolloutMixin(), LogprobMixin()
    vars(of_rollouts).update(shared)
    vars(of_logprobs).update(shared)
    num_requests = given.completions // given.group
    num_tokens = num_requests * given.group * given.length
    phases: dict[str, float] = {}
    memory: dict[str, float] = {}
    start_bytes = resident()

    def phase(name: str, run: Callable[[], Any]) -> Any:
        before = time.process_time()
        result = run()
        phases[name] = (time.process_time() - before) / num_tokens * 1e6
        memory[name] = (resident() - start_bytes) / num_tokens
        return result

    stalls: list[tuple[float, float]] = []  # seconds, and processor time of the client in them
    text = response(given.length, given.group, given.candidates, given.mask)
    warm_up = response(100, 1, given.candidates, given.mask)
    with serving(text) as url, serving(warm_up) as other:
        for address in (other, url):  # the first request imports what httpx needs
            servers = VLLMServers([address], timeout=600, run_id="run")
            servers.steps = [0]
            if address == other:
                params = {"n": 1, "max_tokens": 100, "logprobs": given.candidates}
                servers.submit(Request([5, 6], range(1), 0, 100), params).result()
                servers.close()
        start_bytes = resident()
        params = {"n": given.group, "max_tokens": given.length, "logprobs": given.candidates}

        def receive() -> list[Any]:
            futures = [
                servers.submit(Request([5, 6], range(given.group), 0, given.length), params)
                for _ in range(num_requests)
            ]
            waiting = threading.Event()
            (client,) = [one.ident for one in threading.enumerate() if one.name == "vllm-client"]
            clock = time.pthread_getcpuclockid(client)
            last, busy = time.perf_counter(), time.clock_gettime(clock)
            while not all(future.done() for future in futures):
                waiting.wait(0.002)
                now, used = time.perf_counter(), time.clock_gettime(clock)
                stalls.append((now - last - 0.002, used - busy))
                last, busy = now, used
            return [one for future in futures for one in future.result()]

        completions = phase("receive, parse, check", receive)
        servers.close()
    rows = [{"prompt": "word5 word6"}] * len(completions)
    request = RolloutRequest(rows, given.group)
    prompt_ids = [[5, 6]] * len(rows)
    rollouts = phase("decode", lambda: of_rollouts.make_rollouts(request, prompt_ids, completions))
    arguments = phase("rewards", lambda: reward_arguments(rollouts))
    del arguments
    phase("metrics", lambda: rollout_metrics(rollouts, 0))
    tokens = phase("collate", lambda: of_logprobs.collate(rollouts))
    assert int(tokens.loss_mask_BT.sum()) == num_tokens
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - start_bytes
    return {
        "given": vars(given),
        "tokens": num_tokens,
        "response bytes per token": len(text) / given.group / given.length,
        "microseconds per token": {**phases, "in all": sum(phases.values())},
        "resident bytes per token after": memory,
        "peak bytes per token": peak / num_tokens,
        "longest stall ms": 1e3 * max(stalls)[0],
        "five longest stalls ms": [1e3 * stall for stall, _ in sorted(stalls)[-5:]],
        "processor ms of the client in them": [1e3 * used for _, used in sorted(stalls)[-5:]],
        "longest stall in processor ms of the client": 1e3 * max(min(pair) for pair in stalls),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--group", type=int, default=8, help="completions per request")
    parser.add_argument("--candidates", type=int, default=0, help="log-probs per position that are asked for")
    parser.add_argument("--mask", type=int, default=0, help="token ids per position of a sampling mask")
    given = parser.parse_args()
    results = measure(given)
    for name, value in results["microseconds per token"].items():
        print(f"{name:<24}{value:8.3f} µs")
    stall, peak = results["longest stall ms"], results["peak bytes per token"]
    print(f"longest stall {stall:.1f} ms, peak {peak:.0f} bytes per token")
    print(write_results(f"host_cost_{given.completions}x{given.length}", results))


if __name__ == "__main__":
    main()
