"""``python -m MODULE ARGUMENTS`` of vLLM's server, with an engine process that is forked.

    forked_server.py MODULE ARGUMENTS...

vLLM starts the engine of a CPU anew, and it imports vLLM again.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys


def main() -> None:
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork")  # type: ignore[assignment]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
