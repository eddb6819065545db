"""Tables of what settings choose by name: objectives, normalizers, advantages, aggregations, backends."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from groupwise.errors import ConfigError, nearest_name

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Components by name, in the order of registration.

    Args:
        kind: noun for error messages, for example "backend".
        entries: built-in components, each the object or ``"module:attribute"``, imported at its first use.
    """

    def __init__(self, kind: str, entries: Mapping[str, T | str] | None = None) -> None:
        self.kind = kind
        self._entries = dict(entries or {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> T:
        """Return the component ``name``.

        Raises:
            ConfigError: no such component; the message lists the registered names and the nearest one.
        """
        if name not in self._entries:
            raise ConfigError(
                f"unknown {self.kind} {name!r}; registered: {', '.join(sorted(self))}; "
                f"nearest valid: {nearest_name(name, self)!r}"
            )
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self._entries[name] = getattr(importlib.import_module(module), attribute)
        return entry  # type: ignore[return-value]  # a str was replaced by what it names

    def register(self, name: str, entry: T) -> None:
        """Add ``entry`` under a new name.

        Raises:
            ConfigError: the name is taken; the message lists the registered names.
        """
        if name in self._entries:
            raise ConfigError(
                f"{self.kind} {name!r} is already registered; registered: {', '.join(sorted(self))}; "
                "choose another name"
            )
        self._entries[name] = entry
