"""The backends are tested on the tiny policy of the trainer's tests; servers may be stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from fake_vllm import FakeVLLM

from groupwise.backends.vllm.http import HttpServer


@pytest.fixture
def fake(monkeypatch):
    """A stand-in for a server; what fails is asked for again at once."""
    monkeypatch.setattr(HttpServer, "first_pause", 0.02)
    server = FakeVLLM()
    yield server
    server.close()
