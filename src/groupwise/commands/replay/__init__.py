"""Replays of recorded steps, and bug reports."""
