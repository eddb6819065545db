"""The calls of ``benchmarks/gpu.sh`` in tiny shapes on a CPU, and parts that end in every way."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from support.workers.launch import IMPORTS, run

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
#: As on a machine with torch and transformers alone; the trainer gets lists of rows.
BARE = ("-datasets", "-trl", "-bitsandbytes", "torch", "transformers", "peft", "groupwise.trainer")
NEED_CUDA = {
    *(f"head, Triton, {dtype}" for dtype in ("float32", "bf16", "fp16")),
    *("attention, varlen, bf16", "attention, varlen, fp16"),
    *("waits per token", "waits per token with top_p", "waits of a micro-batch"),
    "attention",  # measures blocks without it
}


@pytest.fixture
def parts(monkeypatch):
    """Modules of the benchmarks; the folder does not stay on the path."""
    path = [*sys.path]
    sys.path.append(str(BENCHMARKS))
    import gpu
    import gpu_check

    yield gpu, gpu_check
    sys.path[:] = path


@pytest.mark.slow
@pytest.mark.parametrize(("call", "imports"), [("check", BARE), ("phases", IMPORTS), ("steps", IMPORTS)])
def test_every_part_of_a_call_passes_on_a_cpu_or_names_what_it_needs(call, imports, tmp_path):
    output = tmp_path / "verdicts.json"
    # Without vLLM: TRL looks for the package when it is imported.
    given = {"directory": tmp_path, "imports": imports, "without": "vllm"}
    done = run(BENCHMARKS / "gpu.py", call, "--tiny", "--output", output, **given)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    record = json.loads(output.read_text())
    assert {"torch", "transformers"} <= set(record["machine"]["versions"]) and record["machine"]["commit"]
    assert record["verdicts"] and (call != "check" or len(record["verdicts"]) == 25)
    for verdict in record["verdicts"]:
        if verdict["name"] in NEED_CUDA:
            assert verdict["verdict"] == "skipped" and "CUDA" in verdict["reason"] + "Triton CUDA"
        else:
            assert verdict["verdict"] == "passed" and verdict["figures"], verdict


def test_a_part_that_fails_ends_or_hangs_leaves_the_others(parts):
    gpu, _ = parts
    records: list[int] = []
    call = gpu.Call(
        "support.fakes.gpu_parts",
        gpu.Place("cpu", tiny=True),
        0.1,
        lambda r: records.append(len(r["verdicts"])),
    )
    call.end += 600  # 3 s remain the limit of a part; on a busy machine all parts take longer than the call
    verdicts = {verdict["name"]: verdict for verdict in call.run()}
    assert records == [*range(1, len(verdicts) + 1)]
    reasons = {name: (verdict["verdict"], verdict["reason"]) for name, verdict in verdicts.items()}
    processes = [verdicts[name]["figures"].pop("process") for name in ("first", "second", "third")]
    assert processes[0] == processes[1] != processes[2]
    assert reasons == {
        "first": ("passed", ""),
        "within": ("passed", ""),
        "beyond": ("failed", "error is 1.5, allowed 1"),
        "nan": ("failed", "error is nan, allowed 1"),
        "partly": ("skipped", "trl is not installed"),
        "fails": ("failed", "RuntimeError: no kernel image"),
        "cannot run": ("skipped", "needs CUDA"),
        "second": ("passed", ""),
        "breaks the device": ("failed", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        "third": ("passed", ""),
        "ends": ("failed", "the process ended with status 3"),
        "hangs": ("failed", "stopped after 3 s"),
        "last": ("passed", ""),
    }


def test_what_does_not_begin_in_time_is_skipped(parts):
    gpu, _ = parts
    call = gpu.Call("support.fakes.gpu_parts", gpu.Place("cpu", tiny=True), 0.1, lambda record: None)
    call.names, call.end = ["one", "two"], time.monotonic()
    call._run_process = lambda: None
    assert [(v["verdict"], v["reason"]) for v in call.run()] == [
        ("skipped", "the 0.1 minutes of the call are over")
    ] * 2


@pytest.mark.slow
def test_another_result_of_two_steps_fails(parts):
    gpu, check = parts
    other = check.SetUp(precision="float32", path=(("sequence_layout", "padded"), ("learning_rate", 0.51)))
    verdict, _ = gpu.judge("other", partial(check.two_steps, set_up=other), gpu.Place("cpu", tiny=True))
    assert verdict["verdict"] == "failed" and 0.01 < verdict["figures"]["error"] < 0.03


def test_attention_to_another_token_fails(parts, monkeypatch):
    gpu, check = parts
    part, sees = check.PARTS["attention, blocks, float32"], check.sees
    monkeypatch.setattr(check, "sees", lambda query, key, window: sees(query, key, window and window + 1))
    verdict, _ = gpu.judge("other", part, gpu.Place("cpu", tiny=True))
    assert verdict["reason"].startswith("error, window 4 is")
