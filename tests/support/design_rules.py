"""The design rules as functions from source text to a list of violations."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: Rooms whose annotations name what is handed over to them: records to equations, data and backend to hooks.
NAMES_WHAT_IT_GETS = ("core", "hf")


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


def assigned_in_class(node: ast.ClassDef) -> set[str]:
    """Names that the class body gives a value; a bare annotation gives none."""
    targets = [target for item in node.body if isinstance(item, ast.Assign) for target in item.targets]
    targets += [item.target for item in node.body if isinstance(item, ast.AnnAssign) and item.value]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def called(node: ast.Call) -> str:
    """The last part of what is called: ``import_module`` for ``importlib.import_module(…)``."""
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


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
        own = methods(node) | assigned_on_self(node) | assigned_in_class(node)
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
    """Access to ``self`` by a name in a string, such as ``hasattr(self, …)``."""
    return [
        f"line {item.lineno}"
        for item in ast.walk(ast.parse(source))
        if isinstance(item, ast.Call)
        and called(item) in ("hasattr", "getattr", "setattr", "delattr", "vars")
        and item.args
        and isinstance(item.args[0], ast.Name)
        and item.args[0].id == "self"
    ]


def defined_twice(sources: list[str], names: set[str]) -> set[str]:
    """Methods and attributes that two of the classes called ``names`` define; annotations define nothing."""
    seen: set[str] = set()
    twice: set[str] = set()
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                own = methods(node) | assigned_in_class(node) | assigned_on_self(node)
                own = {name for name in own if not name.startswith("__")}
                twice |= own & seen
                seen |= own
    return twice


def subclasses(source: str, base: str) -> list[str]:
    """Classes that name ``base`` among their bases."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and any(base in (getattr(item, "id", None), getattr(item, "attr", None)) for item in node.bases)
    ]


def imports(source: str, package: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import in a file of ``package``, wherever and however it stands.

    Modules are absolute; the name is "" if the module itself is imported.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            yield from ((arg.value, "") for arg in node.args[:1] if isinstance(arg, ast.Constant))


def imported_modules(source: str, package: str = "groupwise") -> set[str]:
    """Absolute names of everything a file of ``package`` imports."""
    # ``from groupwise import trainer`` names a module as well as ``import groupwise.trainer`` does.
    pairs = imports(source, package)
    return {f"{module}.{name}" if name and module == "groupwise" else module for module, name in pairs}


def import_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules of the package that each of its modules imports.

    Imports in functions and for annotations count too: a file can be read after those that it names.
    """
    paths = {".".join(["groupwise", *Path(name).with_suffix("").parts]): name for name in files}
    modules = {path.removesuffix(".__init__"): files[name] for path, name in paths.items()}
    graph = {}
    for path in paths:
        module, package = path.removesuffix(".__init__"), path.rpartition(".")[0]
        pairs = imports(modules[module], package)
        named = {whole if (whole := f"{parent}.{name}") in modules else parent for parent, name in pairs}
        graph[module] = named & modules.keys() - {module}
    return graph


def imported_at_run_time(source: str) -> str:
    """``source`` without ``if TYPE_CHECKING``: an equation may name the record that it reads."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if ast.unparse(getattr(node, "test", node)) != "TYPE_CHECKING"]
    return ast.unparse(tree)


def beyond_torch(source: str) -> list[str]:
    """Imports of ``core/`` that are neither torch, the standard library nor ``core/`` and ``registry``."""
    allowed = {"torch", *sys.stdlib_module_names}
    return sorted(
        name
        for name in imported_modules(imported_at_run_time(source), "groupwise.core")
        if name.split(".")[0] not in allowed
        and name.split(".")[:2] not in (["groupwise", "core"], ["groupwise", "registry"])
    )


def across_layers(name: str, source: str, layers: dict[str, set[str]]) -> list[str]:
    """Rooms that the file ``name`` (relative to the package) imports and that its own room may not."""
    own = name.removesuffix(".py").split("/")[0]
    package = ".".join(["groupwise", *name.split("/")[:-1]])
    used = {
        module.split(".")[1] if "." in module else module  # the package itself would bring everything
        for module in imported_modules(
            imported_at_run_time(source) if own in NAMES_WHAT_IT_GETS else source, package
        )
        if module.split(".")[0] == "groupwise"
    }
    return sorted(used - layers[own] - {own})


def is_private(name: str) -> bool:
    """Return True for ``_name``, except for names that the Python documentation documents."""
    documented = {"_asdict", "_exit", "_fields", "_make", "_replace"}  # of named tuples and os
    return name.startswith("_") and not name.startswith("__") and name not in documented


def defined(tree: ast.AST) -> set[str]:
    """Functions, classes, variables and attributes of ``self`` that a file defines."""
    found = assigned_on_self(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def imported_symbols(tree: ast.AST) -> set[tuple[str, str]]:
    """Module and name of each absolute ``from module import name``."""
    return {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }


def wrapped_symbols(source: str) -> set[tuple[str, str]]:
    """Symbols of submodules of other libraries that the functions of a file import."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    symbols = set().union(*map(imported_symbols, functions))
    return {(module, name) for module, name in symbols if "." in module}


def key_of_vars(node: ast.AST) -> tuple[ast.expr, str] | None:
    """The object and the name of ``"name" in vars(x)``, ``vars(x)["name"]`` and ``vars(x).get("name")``."""
    container, key = None, None
    if isinstance(node, ast.Compare):
        container, key = node.comparators[0], node.left
    elif isinstance(node, ast.Subscript):
        container, key = node.value, node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        container, key = node.func.value, node.args[0]
    if isinstance(container, ast.Call) and called(container) == "vars" and isinstance(key, ast.Constant):
        return container.args[0], str(key.value)
    return None


def private_uses(source: str, wrapped: set[tuple[str, str]]) -> set[str]:
    """Private names of other libraries in a file: attributes, imports, and imports of ``wrapped`` symbols.

    Attributes of ``self``, ``cls`` and ``super()``, and names that the file defines, are its own.
    """
    tree = ast.parse(source)
    own, found = defined(tree), set()
    for node in ast.walk(tree):
        owner, name = None, ""
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and called(node) in ("delattr", "getattr", "hasattr", "setattr"):
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                owner, name = node.args[0], str(node.args[1].value)
        elif looked_up := key_of_vars(node):
            owner, name = looked_up
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if any(map(is_private, alias.name.split(".")))}
        of_self = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
        of_super = isinstance(owner, ast.Call) and called(owner) == "super"
        if is_private(name) and name not in own and not of_self and not of_super:
            found.add(name)
    for module, name in imported_symbols(tree):
        private = any(map(is_private, [*module.split("."), name])) and module.split(".")[0] != "groupwise"
        if private or (module, name) in wrapped:
            found.add(f"{module}.{name}")
    return found


def reads(source: str, name: str) -> int:
    """Number of reads of an attribute in a file, by a dot or by ``getattr`` with its name."""
    return sum(
        (isinstance(node, ast.Attribute) and node.attr == name)
        or (
            isinstance(node, ast.Call)
            and called(node) == "getattr"
            and any(isinstance(arg, ast.Constant) and arg.value == name for arg in node.args)
        )
        for node in ast.walk(ast.parse(source))
    )


def unfinished(text: str) -> list[str]:
    """Marks of work left undone."""
    marks = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"])
    return re.findall(rf"\b(?:{marks})\b", text)
