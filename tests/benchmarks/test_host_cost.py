"""Every phase of the host's work per token is measured, with any form of the response."""

from __future__ import annotations

import argparse
import sys

import pytest
from test_common import BENCHMARKS

PHASES = {"receive, parse, check", "decode", "rewards", "metrics", "collate", "rebalance"}


@pytest.mark.slow
def test_each_phase_has_time_and_bytes(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])  # the folder does not stay on it
    import host_cost

    given = {"completions": 16, "length": 50, "group": 4, "files": True}
    for form in ({"candidates": 0, "mask": 0}, {"candidates": 2, "mask": 0}, {"candidates": 0, "mask": 3}):
        found = host_cost.measure(argparse.Namespace(**given, **form))
        assert found["tokens"] == 16 * 50 and found["longest stall ms"] > 0
        for column in ("microseconds per token", "resident bytes per token after"):
            assert found[column].keys() >= PHASES | {"rollout file", "checkpoint"}
