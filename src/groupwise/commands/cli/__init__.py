"""The command line: ``groupwise train``, ``sweep``, ``doctor``, ``report``, ``replay`` and others.

Each command is a module with ``run(arguments) -> exit code``. Modules are imported when their command runs:
help and mistyped commands do not load torch.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from groupwise.config.redact import redact
from groupwise.errors import GroupwiseError, nearest_name

#: Command -> (module, summary).
COMMANDS = {
    "train": ("launch", "train with the settings of a YAML file and flags"),
    "sweep": ("sweep", "train several configurations on one base model, or control a running sweep"),
    "doctor": ("doctor", "check a run before it starts: batches, prompts, rewards, memory"),
    "report": ("report", "write one HTML page about finished or running runs"),
    "replay": ("replay", "repeat a recorded step of a run, compare objectives on it, write a bug report"),
    "vllm-serve": ("serve", "start the vLLM server of a run with vllm_mode=server"),
    "env": ("environment", "versions, devices and threads, for bug reports"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the end of a pipe that reads its output (``| head``) ends it without an error.

    Returns:
        Exit code: 0; 1 if ``doctor`` found a problem, a replay diverges from its record or a run of a sweep
        failed; 2 for invalid input, with the message on standard error and no traceback unless
        ``--traceback`` is given; 130 if interrupted.
    """
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # What is left in the buffer would be written, and fail, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help"):
        print("usage: groupwise <command> [arguments]\n\ncommands:")
        for name, (_, summary) in COMMANDS.items():
            print(f"  {name:<12}{summary}")
        print("\ngroupwise <command> --help lists its arguments. --traceback shows the origin of an error.")
        return 0
    if given[0] == "--version":
        from groupwise import __version__

        print(__version__)
        return 0
    command, *rest = given
    if command not in COMMANDS:
        nearest = nearest_name(command, COMMANDS)
        return _fail(f"{command!r} is not a command; allowed: {', '.join(COMMANDS)}; nearest: {nearest}")
    show_traceback = "--traceback" in rest
    if show_traceback:
        rest.remove("--traceback")
    try:
        return importlib.import_module(f"groupwise.commands.cli.{COMMANDS[command][0]}").run(rest)
    except GroupwiseError as error:
        if show_traceback:
            print(redact(traceback.format_exc()), file=sys.stderr)
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130


def _fail(message: str) -> int:
    rank = os.environ.get("RANK")
    where = "" if rank is None or os.environ.get("WORLD_SIZE") == "1" else f" [rank {rank}]"
    print(f"groupwise{where}: error: {redact(message)}", file=sys.stderr)
    return 2
