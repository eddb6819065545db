"""``python -m MODULE ARGUMENTS`` of vLLM's server, with an engine process that is forked.

    forked_server.py MODULE ARGUMENTS...

vLLM starts the engine of a CPU anew, and it imports vLLM again. MODULE may be ``groupwise.cli`` with
``vllm-serve``: the program by which it would replace this process runs in it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn


def replaced(program: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run ``vllm serve``, or ``python -m MODULE``, in this process."""
    os.environ.update(environment)
    module, *rest = command[2:] if command[1] == "-m" else ["vllm.entrypoints.cli.main", *command[1:]]
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def main() -> None:
    os.execve = replaced  # type: ignore[assignment]
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork")  # type: ignore[assignment]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
