"""Helpers that several tests share: tiny models, runs, fakes, reference loops and worker scripts."""
