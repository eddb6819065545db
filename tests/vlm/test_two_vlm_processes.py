"""Two ranks make the update of one, on rows with one image, several images and none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import tiny_vlm as tiny
from support.workers.launch import run_ranks
from support.workers.vlm_worker import SETTINGS, weights

pytestmark = pytest.mark.distributed

FAMILIES = ["idefics3", "qwen2_5_vl"]


def test_two_processes_make_the_update_of_one(tmp_path):
    """One rank has micro-batches of text alone while the other has images, or both in one micro-batch."""
    script = Path(__file__).parents[1].joinpath("support", "workers", "vlm_worker.py")
    done = run_ranks(script, tmp_path, *FAMILIES, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    both = torch.load(tmp_path / "weights.pt", weights_only=True)
    for family in FAMILIES:
        start = dict(tiny.build(family)[0].named_parameters())
        settings = SETTINGS.get(family, {"rows": 2})
        alone = weights(tmp_path / family, family, **{**settings, "rows": 2 * settings["rows"]})
        moved = max((alone[name] - start[name]).abs().max() for name in start)
        assert moved > 1e-3
        for name, weight in alone.items():
            # Sums in another order round differently.
            torch.testing.assert_close(both[family][name], weight, atol=2e-6, rtol=1e-5, msg=name)
