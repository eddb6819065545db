"""The source tree obeys the design; every rule is also shown a violation that it must see."""

from __future__ import annotations

import ast
import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import design_rules as rules
import pytest
import transformers

from groupwise import mixins

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "groupwise"
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
MIXINS = {name: source for name, source in FILES.items() if name.startswith("mixins/")}
CLASSES = [getattr(mixins, name) for name in mixins.__all__]

#: Who may import whom: a room may use itself and the rooms listed.
LAYERS = {
    "core": {"core"},
    "errors": set(),
    "stages": {"core"},
    "prompts": set(),
    "protocols": {"stages"},
    "heads": {"errors"},
    "layout": {"heads", "protocols", "stages"},
    "data": {"stages"},
    "logbook": {"core", "stages"},
    "config": {"errors", "core", "validation", "config_rules", "config_conflicts"},
    "validation": {"errors", "core", "config", "config_rules", "config_conflicts"},
    "config_rules": {"errors", "core", "config", "config_conflicts"},
    "config_conflicts": {"errors", "core", "config", "config_rules"},
    "checkpoint": {"errors"},
    "models": {"errors", "heads"},
    "reference": {"config", "errors"},
    "backends": {"core", "errors", "stages"},
    "rewards": {"errors", "prompts", "stages"},
    "reporting": {"config"},
    "setup": {"config", "data", "errors", "models", "rewards"},
    "mixins": {
        *("backends", "config", "core", "data", "errors", "layout", "prompts", "protocols", "reference", "rewards"),
        "stages",
    },
}


def taken_by_trainer() -> set[str]:
    """Methods of the Trainer, and the attributes that it sets on itself."""
    tree = ast.parse(inspect.getsource(transformers.Trainer))
    return {name for name in dir(transformers.Trainer) if not name.startswith("__")} | rules.assigned_on_self(
        tree
    )


def room(module: str) -> str:
    return module.removeprefix("groupwise.").split(".")[0]


def forbidden_imports(name: str, source: str) -> list[str]:
    own = name.removesuffix(".py").split("/")[0]
    used = {room(m) for m in rules.imported_modules(source) if m.startswith("groupwise.")}
    return sorted(used - LAYERS[own] - {own})


@pytest.mark.parametrize("name", MIXINS)
def test_mixins_have_no_constructor_and_call_no_super(name):
    assert rules.has_init(MIXINS[name]) == []
    assert rules.calls_super(MIXINS[name]) == []


def test_a_constructor_and_super_are_seen():
    source = "class AMixin:\n    def __init__(self):\n        super().__init__()\n"
    assert rules.has_init(source) == ["AMixin"] and rules.calls_super(source) == ["AMixin"]


@pytest.mark.parametrize("name", MIXINS)
def test_mixins_override_nothing_of_the_trainer(name):
    assert rules.overrides(MIXINS[name], taken_by_trainer()) == []


def test_overrides_are_seen():
    source = "class AMixin:\n    def train(self):\n        self.state = 1\n"
    assert rules.overrides(source, taken_by_trainer()) == ["AMixin.state", "AMixin.train"]


def test_names_of_two_mixins_never_meet():
    names = [{name for name in vars(cls) if not name.startswith("__")} for cls in CLASSES]
    for one, other in itertools.combinations(names, 2):
        assert one & other == set()


def test_any_order_of_the_mixins_resolves_the_same():
    for order in itertools.permutations(CLASSES):
        combined = type("Combined", order, {})
        for cls in CLASSES:
            for name in vars(cls):
                if not name.startswith("__"):
                    assert getattr(combined, name) is getattr(cls, name)


@pytest.mark.parametrize("name", MIXINS)
def test_everything_a_mixin_uses_of_self_is_declared(name):
    assert rules.undeclared(MIXINS[name]) == []
    assert rules.reflection(MIXINS[name]) == []


def test_undeclared_uses_and_reflection_are_seen():
    source = (
        "class AMixin:\n    x: int\n    def f(self):\n        return self.x + self.y + getattr(self, 'z')\n"
    )
    assert rules.undeclared(source) == ["AMixin.y"] and rules.reflection(source) == ["line 4"]


#: What the trainer and ``transformers.Trainer`` own; everything else belongs to exactly one mixin.
SHARED = {"args", "accelerator", "state", "processing_class"}


def test_no_mixin_reads_what_another_owns():
    owners: dict[str, str] = {}
    for source in MIXINS.values():
        for node in rules.mixin_classes(source):
            for name in (rules.annotated(node) | rules.methods(node)) - SHARED:
                assert name not in owners, f"{name} belongs to {owners[name]} and {node.name}"
                owners[name] = node.name


def test_mixins_are_small():
    for name, source in MIXINS.items():
        assert len(source.splitlines()) <= 170, name
    for source in MIXINS.values():
        for node in rules.mixin_classes(source):
            assert len(rules.annotated(node) - SHARED) <= 3, node.name


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("core/")])
def test_the_core_needs_only_torch(name):
    assert rules.beyond_torch(FILES[name]) == []


def test_other_imports_in_the_core_are_seen():
    source = (
        "import math, transformers\nfrom groupwise.config import GRPOConfig\nfrom groupwise.core import kl\n"
    )
    assert rules.beyond_torch(source) == ["groupwise.config", "transformers"]


@pytest.mark.parametrize(
    "name", [name for name in FILES if name not in ("__init__.py", "trainer.py", "cli.py")]
)
def test_imports_follow_the_layers(name):
    assert forbidden_imports(name, FILES[name]) == []


def test_an_import_across_the_layers_is_seen():
    assert forbidden_imports("heads/dense.py", "from groupwise.trainer import GRPOTrainer\n") == ["trainer"]


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_stay_short_and_modules_say_what_they_are(name):
    assert len(FILES[name].splitlines()) <= 400
    assert rules.long_functions(FILES[name]) == []
    assert ast.get_docstring(ast.parse(FILES[name]))


def test_a_long_function_is_seen():
    assert rules.long_functions("def f():\n" + "    x = 1\n" * 60) == ["f: 61 lines"]


def test_the_backend_is_chosen_in_one_place():
    checked = {
        name: source for name, source in FILES.items() if not name.startswith(("config", "validation"))
    }
    assert sum(rules.attribute_reads(source, "use_vllm") for source in checked.values()) <= 1


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, groupwise; groupwise.ConfigError; "
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported():
    import groupwise

    assert set(groupwise.__all__) == set(groupwise._MODULES)
    for name in groupwise.__all__:
        assert getattr(groupwise, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    import groupwise

    with pytest.raises(AttributeError, match="GRPOtrainer"):
        groupwise.GRPOtrainer  # noqa: B018
