"""Edits of ``groupwise.mixins``."""

from __future__ import annotations

from mutation import Mutation

MIXINS: list[Mutation] = []
