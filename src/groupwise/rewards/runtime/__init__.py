"""Calling machinery of reward functions: time limits, partial results, process isolation, sandbox."""
