"""Calls of reward functions: time limits, isolation and the sandbox."""
