"""Readers of the files that runs write: HTML report, run files, meaning of metrics."""
