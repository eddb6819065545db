"""Training on a device other than the CPU, simulated where the machine has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.workers import device_worker
from support.workers.launch import run

pytestmark = [
    pytest.mark.skipif(torch.accelerator.is_available(), reason="PyTorch has one accelerator at a time"),
    pytest.mark.timeout(700),
]
#: Of gradients that are computed in another order; their norms are 0.001 and more.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("devices")
    done = run(device_worker.__file__, output, timeout=600)
    assert done.returncode == 0, done.stderr[:3000]
    return output


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


@pytest.mark.parametrize("name", device_worker.SAMPLED)
def test_a_run_with_its_own_samples_works(results, name):
    weights, norm = trained(results, "simulated", name)
    assert norm > 0 and all(value.isfinite().all() for value in weights.values())
