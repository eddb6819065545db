"""Training on a device other than the CPU, simulated where the machine has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from support.workers import device_worker
from support.workers.launch import run

pytestmark = [
    pytest.mark.skipif(torch.accelerator.is_available(), reason="PyTorch has one accelerator at a time"),
    pytest.mark.timeout(700),
    pytest.mark.slow,
]
#: Of gradients that are computed in another order; their norms are 0.001 and more.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("devices")
    done = run(device_worker.__file__, output, timeout=600)
    assert done.returncode == 0, done.stderr[:3000]
    return output


#: Waits of two optimizer steps with truncated samples, by file: lower a number, do not raise one. Of each
#: generation: a wait per token, the kept tokens twice, the tokens; of each log: one.
WAITS = {
    "compat/transformers.py": 0,
    "core/metrics.py": 2,
    "data/rebalancing.py": 6,
    "distributed.py": 1,
    "generation/decoding.py": 15,
    # generate of transformers 5.24 also reads whether ids of an encoder are negative.
    "generation/transformers_backend.py": 8 + 2 * (Version(transformers.__version__) >= Version("5.24")),
    "generation/truncation.py": 4,
    "hf/base.py": 11,
    "mixins/loss.py": 2,
    "policy/heads/capture.py": 1,
    "policy/introspection.py": 7,  # once in a run: plain forwards of both checks
    "policy/layouts/check.py": 15,  # once in a run
    "policy/logprob_mismatch.py": 4,
    "records/tensors.py": 16,  # 3 of them lengths: of two micro-batches, and of the layout check
}


def trained(results: Path, device: str, name: str) -> tuple[dict[str, torch.Tensor], float]:
    """Return weights after the run, and the gradient norm of its first step."""
    error = results / f"{device}-{name}.txt"
    assert not error.exists(), error.read_text()
    return torch.load(results / f"{device}-{name}.pt")


@pytest.mark.parametrize("name", device_worker.SAME)
def test_the_update_is_that_of_the_cpu(results, name):
    (expected, norm), (weights, _) = (trained(results, device, name) for device in ("cpu", "simulated"))
    assert norm > 100 * ROUNDING and weights.keys() == expected.keys()
    for key in weights:
        assert (weights[key] - expected[key]).abs().max() < ROUNDING, key


def test_the_host_waits_for_the_device_as_often_as_listed(results):
    counts = json.loads((results / "simulated-samples.json").read_text())
    waits = {key.removeprefix("waits "): count for key, count in counts.items() if key.startswith("waits ")}
    assert waits["generation/decoding.py"] > 4  # counting works
    assert {name: count for name, count in waits.items() if count > WAITS.get(name, 0)} == {}
    assert counts["copies policy/layouts/packed.py"] == 3  # one per packing: two micro-batches, and the check


@pytest.mark.parametrize("name", device_worker.SAMPLED)
def test_a_run_with_its_own_samples_works(results, name):
    weights, norm = trained(results, "simulated", name)
    assert norm > 0 and all(value.isfinite().all() for value in weights.values())
