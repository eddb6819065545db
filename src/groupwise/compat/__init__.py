"""Private and undocumented symbols of other libraries, and versions of optional packages.

One function per symbol, with the versions it was seen in. Code outside this package imports only documented
symbols of other libraries. Imports are lazy: importing a module of this package loads nothing heavy.
``tests/compat`` checks that every symbol exists with the expected signature.
"""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement
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


def unmet(package: str, names: tuple[str, ...]) -> list[str]:
    """Return the requirements of an installed package on ``names`` that installed versions do not meet.

    Those of its extras count too, where the package that they ask for is installed.
    """
    found = []
    for asked in map(Requirement, importlib.metadata.requires(package) or ()):
        if asked.name in names:
            try:
                installed = importlib.metadata.version(asked.name)
            except importlib.metadata.PackageNotFoundError:
                continue
            if not asked.specifier.contains(installed, prereleases=True):
                found.append(f"{asked.name}{asked.specifier} (installed: {installed})")
    return list(dict.fromkeys(found))
