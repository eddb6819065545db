"""Versions of optional packages."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from groupwise.errors import ConfigError


def check_version(package: str, oldest: str, needed_by: str, consequence: str) -> None:
    """Check the version of an optional package.

    Raises:
        ConfigError: it is older than ``oldest``.
    """
    installed = importlib.metadata.version(package)
    if Version(installed) < Version(oldest):
        raise ConfigError(
            f"{needed_by} needs {package}>={oldest}, and {installed} is installed, {consequence}"
        )
