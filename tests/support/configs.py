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


def config_of(*, world_size: int = 1, rank: int = 0, **fields: object) -> GRPOConfig:
    """Build a real configuration for a test double, as on rank ``rank`` of ``world_size``.

    The fields are set after the checks, so that a test may give values (of derived fields, for example) that
    no configuration has. A field that does not exist is an error.
    """

    class OfRank(GRPOConfig):
        pass

    OfRank.world_size = property(lambda self: world_size)  # type: ignore[assignment, method-assign]
    OfRank.process_index = property(lambda self: rank)  # type: ignore[assignment, method-assign]
    made = OfRank("unused", report_to="none", use_cpu=True, bf16=False)
    for name, value in fields.items():
        assert name in vars(made), f"GRPOConfig has no field {name!r}"
        setattr(made, name, value)
    return made


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
