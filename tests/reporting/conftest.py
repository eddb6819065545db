from __future__ import annotations

import pytest

from groupwise import GRPOConfig


@pytest.fixture
def make_args(tmp_path):
    """A configuration for this machine; without trackers unless the test sets them."""

    def make(**settings):
        return GRPOConfig(
            str(tmp_path / "out"), **{"use_cpu": True, "bf16": False, "report_to": "none"} | settings
        )

    return make


@pytest.fixture
def make_row():
    def make(prompt="What is 2+2?", completion="4", **fields):
        row = {
            "step": 3,
            "weight_version": 3,
            "prompt": prompt,
            "completion": completion,
            "advantage": 0.5,
            "images": [],
        }
        return row | {"rewards": {"accuracy": 1.0, "form": None}, "columns": {"length": 1}} | fields

    return make
