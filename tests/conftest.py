"""Settings for every test: offline, quiet, and one thread per process."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    CI="true",  # no default tracker
    PYTHONDONTWRITEBYTECODE="",  # a worker would compile torch and transformers anew
    CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]

# Servers and workers that tests start import tests/support and the examples too.
_PATHS = [str(ROOT / "tests"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _PATHS if path)

import hypothesis  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402

# No deadlines: on a busy machine any example may take long. The same examples on every machine.
hypothesis.settings.register_profile(
    "everywhere",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("everywhere")


def pytest_collection_finish() -> None:
    """Exempt what is imported from garbage collection: every training run ends in a full one."""
    if loaders := sys.modules.get("torch.utils.data._utils"):
        # The collector closes queues of a loader before that ends its worker: it would wait for 5 s in vain.
        loaders.MP_STATUS_CHECK_INTERVAL = 0.1
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Exempt also what the tests of a module have imported, after its fixtures have ended."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        pytest_collection_finish()


#: Most processor time of a test without the mark "slow", in seconds. Tests above half of it have the mark.
UNMARKED_SECONDS = 1.0
UNMARKED = "seconds without the mark"


def processor_seconds() -> dict[int, float]:
    """Return the processor time of this process and of all that it started, by process id."""
    times = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times[process.pid] = sum(process.cpu_times()[:4])  # user and system, with children that ended
    return times


#: Tests with these marks are slow too: their fixtures take long, in whichever test they begin.
SLOW_KINDS = {"distributed", "vllm", "real_model"}
BEGUN = pytest.StashKey[tuple[dict[int, float], int]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the mark "slow" to the tests of processes, engines and the real model."""
    for item in items:
        if not SLOW_KINDS.isdisjoint(item.keywords):
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note a test that takes long without the mark "slow"; TEST_COSTS names a file for the times of all.

    Processor time, because machines are shared. A test that imports modules, or starts a process that later
    tests use, is not judged: the time is theirs too. Nor are kernels in Triton's interpreter.
    """
    yield
    before, modules = item.stash[BEGUN]
    after = processor_seconds()
    seconds = sum(after.values()) - sum(before.values())
    if path := os.environ.get("TEST_COSTS"):
        with open(path, "a") as file:
            file.write(f"{seconds:.2f} {item.nodeid}\n")
    shared = len(sys.modules) > modules or after.keys() - before.keys() or "TRITON_INTERPRET" in os.environ
    if seconds > UNMARKED_SECONDS and not shared and "slow" not in item.keywords:
        item.user_properties.append((UNMARKED, seconds))  # travels to the summary with the test's report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that need the mark: a line, not a failure, as processors differ."""
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", "") == "call" and (seconds := dict(report.user_properties).get(UNMARKED)):
            terminalreporter.write_line(f"{seconds:.1f} s: mark with pytest.mark.slow: {report.nodeid}")


#: Memory that a test with a vLLM engine needs beside its imports: two engines with a cache of 2 GB, in bytes.
ENGINE_MEMORY = 6 * 10**9


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of an engine where other programs hold the memory, before the engine fails for it."""
    item.stash[BEGUN] = processor_seconds(), len(sys.modules)
    if "vllm" in item.keywords or "[vllm_" in item.name:
        free = psutil.virtual_memory().available
        if free < ENGINE_MEMORY:
            pytest.skip(f"{free / 1e9:.1f} GB of memory are free, the test needs {ENGINE_MEMORY / 1e9:.0f}")


@pytest.fixture(scope="session", autouse=True)
def extensions_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build torch's extensions (DeepSpeed on a CPU, BOFT of PEFT) in a folder of this run.

    A process that is killed while building one leaves a lock file, for which every later process waits.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.mktemp("extensions"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a plain checkpoint, converted once and kept."""
    from smollm2 import local_model

    return local_model()


@pytest.fixture(autouse=True)
def warnings_and_registrations_end_with_their_test():
    """Let each test give the warnings of a process once; remove its registrations, which other tests list."""
    from groupwise.core.advantages import ADVANTAGES, AGGREGATIONS
    from groupwise.core.objectives import OBJECTIVES
    from groupwise.core.weights import NORMALIZERS
    from groupwise.errors import warn_once

    registries = [OBJECTIVES, NORMALIZERS, ADVANTAGES, AGGREGATIONS]
    if backends := sys.modules.get("groupwise.generation.backends"):  # slow to import for tests of core/
        registries.append(backends.BACKENDS)
    before = [dict(registry._entries) for registry in registries]
    warn_once.cache_clear()
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry._entries = entries
