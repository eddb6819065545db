"""Edits of ``groupwise.data``."""

from __future__ import annotations

from mutation import Mutation

DATA: list[Mutation] = []
