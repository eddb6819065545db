from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from groupwise.config.grpo_config import GRPOConfig


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., GRPOConfig]:
    """Builds a float32 configuration; keyword arguments are those of the class."""

    def make(**kwargs: object) -> GRPOConfig:
        return GRPOConfig(**{"output_dir": str(tmp_path), "report_to": "none", "bf16": False, **kwargs})

    return make
