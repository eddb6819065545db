"""The backends are tested on the tiny policy of the trainer's tests; servers may be stand-ins."""

from __future__ import annotations

import pytest
from support.fakes.fake_vllm import FakeVLLM

from groupwise.generation.vllm.client import HttpClient


@pytest.fixture
def fake(monkeypatch):
    """A stand-in for a server; what fails is asked for again at once."""
    monkeypatch.setattr(HttpClient, "first_pause", 0.02)
    server = FakeVLLM()
    yield server
    server.close()
