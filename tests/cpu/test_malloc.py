"""The heap gives large blocks back: shown by a process whose memory would stay high otherwise."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")

# Blocks of 8 MB, each below one of 1 MB that stays and is too large for a gap left by the imports: without
# the setting, none of them can be given back.
PROGRAM = """
import resource
import sys
import torch
from groupwise.cpu import return_large_blocks

if sys.argv[1] == "set":
    return_large_blocks()
torch.ones(31 << 18)  # 31 MB, freed: from now on glibc would keep blocks up to that size
kept, passing = [], []
for _ in range(32):
    passing.append(torch.ones(1 << 21))
    kept.append(torch.ones(1 << 18))
del passing
resident, shared = map(int, open("/proc/self/statm").read().split()[1:3])
page = resource.getpagesize()
print((resident - shared) * page >> 20)  # pages of libraries come and go with the load of the machine
"""


# Pages faulted in for blocks of 8 MB that are used and freed: outside of the context, and in it once the heap
# holds a few of them; and how much larger the process is after it.
AGAIN = """
import resource
import torch
from groupwise.cpu import keep_large_blocks, return_large_blocks

return_large_blocks()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(1 << 21)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident_pages():
    resident, shared = map(int, open("/proc/self/statm").read().split()[1:3])
    return resident - shared  # as above

returned, before = faults(), resident_pages()
with keep_large_blocks():
    faults()
    kept = faults()
    inside = resident_pages() - before
print(returned, kept, inside, resident_pages() - before)
"""


def resident_mib(mode, **environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    return int(done.stdout)


@pytest.mark.slow
def test_freed_tensors_leave_the_process():
    # 32 x 8 MB were freed; half of it is a wide margin for what else differs
    assert resident_mib("unset") - resident_mib("set") > 128


@pytest.mark.slow
def test_within_the_context_freed_tensors_stay():
    done = subprocess.run(
        [sys.executable, "-c", AGAIN],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    returned, kept, inside, after = map(int, done.stdout.split())
    assert kept < returned / 4  # of pages of any size
    half = (4 << 20) // resource.getpagesize()  # pages of half a block; the rest may come from free heap
    assert after < half < inside


def test_the_environment_has_precedence(monkeypatch):
    from groupwise import cpu

    calls = []
    monkeypatch.setattr(cpu, "_call", lambda name, *_: calls.append(name))
    with cpu.keep_large_blocks():
        cpu.return_large_blocks()
    assert {*calls} == {"mallopt", "malloc_trim"}
    calls.clear()
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    with cpu.keep_large_blocks():
        cpu.return_large_blocks()
    assert calls == ["malloc_trim"]
