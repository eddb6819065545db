"""Helpers of tests about configurations."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.validation import violations
from groupwise.errors import ConfigError


def invalid(build: Callable[..., GRPOConfig], **kwargs: object) -> tuple[dict[str, list[str]], str]:
    """Return the violations by name, and the text of the error that the same arguments raise."""
    seen: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("groupwise.config.grpo_config.check", lambda config: seen.update(violations(config)))
        build(**kwargs)
    with pytest.raises(ConfigError) as caught:
        build(**kwargs)
    return seen, str(caught.value)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages that groupwise logged; another test may have made transformers verbose."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("groupwise")]


def oldest_version(package: str) -> str:
    """Return the lower bound of an optional package in pyproject.toml."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    (oldest,) = re.findall(rf'"{package}>=([\d.]+)"', project.read_text())
    return str(oldest)


def set_installed(patch: pytest.MonkeyPatch, package: str, installed: str) -> None:
    """Let ``package`` have the version ``installed``."""
    version = importlib.metadata.version
    patch.setattr(importlib.metadata, "version", lambda name: installed if name == package else version(name))
