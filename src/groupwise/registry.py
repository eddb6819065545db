"""Registries of components that settings choose by name; built-in ones are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from groupwise.errors import ConfigError, nearest_name

T = TypeVar("T")


class Registry(Generic[T]):
    """Components by name.

    Args:
        kind: noun for error messages, for example "backend".
        entries: built-in components, each the object or ``"module:attribute"``, which :meth:`get` imports.
    """

    def __init__(self, kind: str, entries: Mapping[str, T | str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def register(self, name: str, entry: T) -> None:
        """Add ``entry``, or replace the one of the same name."""
        self._entries[name] = entry

    def get(self, name: str) -> T:
        """Return the component ``name``.

        Raises:
            ConfigError: no such component; the message lists the registered names and the nearest one.
        """
        if name not in self._entries:
            nearest = nearest_name(name, self)
            raise ConfigError(
                f"unknown {self.kind} {name!r}; registered: {', '.join(self)}; nearest valid: {nearest!r}"
            )
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self._entries[name] = getattr(importlib.import_module(module), attribute)
        return entry  # type: ignore[return-value]  # a str was replaced by what it names
