"""Compare peak memory and time of the log-prob heads: dense, chunked, and TRL's, forward and backward.

Each measurement is a process of its own. Its peak is the high-water mark of resident memory (Linux) during
forward and backward, less what was resident before: inputs, weight and libraries do not count, gradients do,
since every head must return them. The heads take turns, and ratios are taken within a turn. On a machine that
others use too, run with --threads 1 and compare cpu_seconds: waiting does not count in them.

    python benchmarks/head_memory.py   # the full comparison, about half an hour on two cores
    python benchmarks/head_memory.py --vocabularies 4096 --tokens 256 --repeats 1 --output none
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import add_precision, format_ratio, ratio_summary, write_results

HEADS = ("dense", "chunked", "trl")
QUANTITIES = ("seconds", "cpu_seconds", "peak_bytes")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=HEADS)
    parser.add_argument("--frozen", action="store_true", help="no gradient for the weight, as under LoRA")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--output", default=None, help="name of the results file, or none")
    add_precision(parser)
    parser.add_argument("--measure", nargs=2, metavar=("HEAD", "VOCABULARY"), help=argparse.SUPPRESS)
    return parser.parse_args()


def scoring_function(name: str):
    """Return `(hidden, weight, targets) -> (logps, entropy)` of one head, both differentiable."""
    if name == "trl":
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

        def score(hidden, weight, targets):
            arguments = (hidden, weight, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0)
            return ChunkedLogProbFunction.apply(*arguments, ("log_probs", "entropy"))[:2]

        return score
    from groupwise.policy.heads.chunked import chunked_head
    from groupwise.policy.heads.dense import logps_from_logits
    from groupwise.policy.heads.weights import HeadWeights

    if name == "dense":
        return lambda hidden, weight, targets: logps_from_logits(hidden @ weight.T, targets)
    return lambda hidden, weight, targets: chunked_head(hidden, HeadWeights(weight), targets)


def resident_bytes(field: str) -> int:
    """Return `VmRSS` (now) or `VmHWM` (high-water mark) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Measure one forward and backward pass of one head in this process."""
    import torch

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    name, vocabulary = arguments.measure[0], int(arguments.measure[1])
    score = scoring_function(name)
    dtype = {"bf16": torch.bfloat16, "float32": torch.float32}[arguments.precision]  # of all inputs
    torch.manual_seed(0)

    def run(tokens: int, vocabulary: int) -> dict[str, float]:
        hidden = torch.randn(tokens, arguments.hidden).to(dtype).requires_grad_()
        weight = torch.randn(vocabulary, arguments.hidden).mul_(arguments.hidden**-0.5).to(hidden.dtype)
        weight.requires_grad_(not arguments.frozen)
        targets = torch.randint(vocabulary, (tokens,))
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = resident_bytes("VmRSS")
        start, start_cpu = time.perf_counter(), time.process_time()
        logps, entropy = score(hidden, weight, targets)
        (-logps.mean() + 0.1 * entropy.mean()).backward()
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - start_cpu,
            "peak_bytes": resident_bytes("VmHWM") - before,
        }

    run(8, 64)  # loads kernels and thread pools
    return run(arguments.tokens, vocabulary)


def run_measurement(name: str, vocabulary: int) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", name, str(vocabulary)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr[-2000:] or "killed, most likely for want of memory"
        sys.exit(f"measuring {name} at vocabulary {vocabulary} failed ({done.returncode}): {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(arguments: argparse.Namespace, vocabulary: int) -> dict[str, object]:
    """Measure all heads at one vocabulary in turn; medians, and ratios to the dense and TRL's head."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.heads}
    for repeat in range(arguments.repeats):
        # A new order each time, so that no head always follows the same one.
        for place in range(len(arguments.heads)):
            name = arguments.heads[(place + repeat) % len(arguments.heads)]
            seen[name].append(run_measurement(name, vocabulary))

    def series(name: str, quantity: str) -> list[float]:
        return [one[quantity] for one in seen[name]]

    result: dict[str, object] = {
        name: {quantity: series(name, quantity) for quantity in QUANTITIES} for name in seen
    }
    sizes = f"vocabulary {vocabulary}, {arguments.tokens} tokens, hidden {arguments.hidden}"
    print(f"\n{sizes}, {arguments.precision}")
    for name in seen:
        wall, cpu, peak = (statistics.median(series(name, quantity)) for quantity in QUANTITIES)
        print(f"  {name:8} {wall:7.2f} s   {cpu:7.2f} s of CPU   {peak / 2**20:8.0f} MiB")
    for other in ("dense", "trl"):
        if "chunked" in seen and other in seen:
            for quantity in QUANTITIES:
                summary = ratio_summary(series("chunked", quantity), series(other, quantity))
                result[f"chunked/{other} {quantity}"] = summary
                print(f"  chunked/{other} {quantity}: {format_ratio(summary)}", flush=True)
    return result


def main() -> None:
    arguments = parse_arguments()
    if arguments.measure:
        print(json.dumps(measure(arguments)))
        return
    settings = {key: value for key, value in vars(arguments).items() if key not in ("measure", "output")}
    output = arguments.output or f"head_memory_{arguments.precision}"
    results = {}
    for vocabulary in arguments.vocabularies:
        results[str(vocabulary)] = compare(arguments, vocabulary)
        if output != "none":  # after each, so that a later failure loses nothing
            path = write_results(output, {"settings": settings, "vocabularies": results})
            print(f"written to {path}", flush=True)


if __name__ == "__main__":
    main()
