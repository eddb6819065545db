"""Replays of recorded steps, bug reports, and objectives compared on recorded data."""
