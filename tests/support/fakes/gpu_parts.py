"""Parts of a benchmark on a GPU that end in every way."""

from __future__ import annotations

import os
import time

from gpu import Outcome, Place, Skipped


def _fails(place: Place) -> Outcome:
    raise RuntimeError("no kernel image")


def _breaks_the_device(place: Place) -> Outcome:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _cannot_run(place: Place) -> Outcome:
    raise Skipped("needs CUDA")


def _in_this_process(place: Place) -> Outcome:
    return Outcome({"process": os.getpid()})


PARTS = {
    "first": _in_this_process,
    "within": lambda place: Outcome({"error": 1.0}, {"error": 1.0}),
    "beyond": lambda place: Outcome({"error": 1.5}, {"error": 1.0}),
    "nan": lambda place: Outcome({"error": float("nan")}, {"error": 1.0}),
    "partly": lambda place: Outcome({"error": 0.5}, {"error": 1.0}, "trl is not installed"),
    "fails": _fails,
    "cannot run": _cannot_run,
    "second": _in_this_process,
    "breaks the device": _breaks_the_device,
    "third": _in_this_process,
    "ends": lambda place: os._exit(3),
    "hangs": lambda place: time.sleep(60),
    "last": _in_this_process,
}
