"""One of two processes runs out of memory: the update is the same, or every rank raises an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.workers import memory_worker
from support.workers.distributed_worker import policy
from support.workers.launch import run_ranks

pytestmark = pytest.mark.distributed

TIMEOUT = 280  # seconds


@pytest.mark.slow
def test_one_process_splits_until_gradients_are_exchanged(tmp_path: Path) -> None:
    done = run_ranks(memory_worker.__file__, tmp_path, timeout=TIMEOUT)
    assert (tmp_path / "split.pt").exists(), done.stdout[-3000:] + done.stderr[-6000:]
    start = policy().state_dict()
    results = torch.load(tmp_path / "split.pt", weights_only=True)
    assert results.keys() == memory_worker.CASES.keys()
    for case, (scarce, ample) in results.items():
        assert max((ample[name] - start[name]).abs().max() for name in start) > 1e-3
        for name in start:
            # three updates of gradients that were added up in another order
            torch.testing.assert_close(scarce[name], ample[name], atol=1e-6, rtol=0, msg=f"{case}, {name}")
    assert done.returncode != 0
    assert "BackendError: rank 1 ran out of memory at 90 tokens while it exchanged data" in done.stderr
