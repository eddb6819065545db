"""The design rules as functions from source text to a list of violations."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator


def mixin_classes(source: str) -> Iterator[ast.ClassDef]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Mixin"):
            yield node


def methods(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}


def annotated(node: ast.ClassDef) -> set[str]:
    return {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def used_on_self(node: ast.AST) -> set[str]:
    return {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self"
    }


def assigned_on_self(node: ast.AST) -> set[str]:
    return {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and isinstance(item.value, ast.Name)
        and item.value.id == "self"
    }


def has_init(source: str) -> list[str]:
    return [node.name for node in mixin_classes(source) if "__init__" in methods(node)]


def calls_super(source: str) -> list[str]:
    return [
        node.name
        for node in mixin_classes(source)
        for item in ast.walk(node)
        if isinstance(item, ast.Name) and item.id == "super"
    ]


def overrides(source: str, taken: set[str]) -> list[str]:
    """Methods and owned attributes of a mixin that the Trainer defines too."""
    found = []
    for node in mixin_classes(source):
        own = methods(node) | assigned_on_self(node)
        found += [f"{node.name}.{name}" for name in sorted(own & taken)]
    return found


def undeclared(source: str) -> list[str]:
    """Uses of ``self.x`` where x is neither a method nor annotated in the class body."""
    found = []
    for node in mixin_classes(source):
        known = methods(node) | annotated(node)
        found += [f"{node.name}.{name}" for name in sorted(used_on_self(node) - known)]
    return found


def reflection(source: str) -> list[str]:
    """``hasattr(self, …)`` and ``getattr(self, …)``."""
    return [
        f"line {item.lineno}"
        for item in ast.walk(ast.parse(source))
        if isinstance(item, ast.Call)
        and isinstance(item.func, ast.Name)
        and item.func.id in ("hasattr", "getattr", "setattr")
        and item.args
        and isinstance(item.args[0], ast.Name)
        and item.args[0].id == "self"
    ]


def imported_modules(source: str) -> set[str]:
    """Absolute names of everything a file imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def beyond_torch(source: str) -> list[str]:
    """Imports of ``core/`` that are neither torch, the standard library nor ``core/`` itself."""
    allowed = {"torch", *sys.stdlib_module_names}
    return sorted(
        name
        for name in imported_modules(source)
        if name.split(".")[0] not in allowed and not name.startswith("groupwise.core")
    )


def long_functions(source: str, most: int = 60) -> list[str]:
    return [
        f"{node.name}: {length} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or 0) - node.lineno + 1) > most
    ]


def attribute_reads(source: str, name: str) -> int:
    return sum(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(ast.parse(source)))
