from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from support.parity_runs import Policy, make_policy
from transformers.utils import logging as transformers_logging


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "parity: compares with TRL, which has to be installed")


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    transformers_logging.disable_progress_bar()
    return make_policy(tmp_path_factory.mktemp("parity") / "policy")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Every training run ends in a full garbage collection, slower than the run: let it skip imports."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
