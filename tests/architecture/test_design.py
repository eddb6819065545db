"""The source tree obeys the design; every rule is also shown a violation that it must see."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import transformers
from support import design_rules as rules

from groupwise import mixins

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "groupwise"
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
MIXINS = {name: source for name, source in FILES.items() if name.startswith("mixins/")}
TEXT_ROOMS = (".ci", "benchmarks", "docs", "examples", "scripts", "src", "tests")
TEXT_ENDINGS = (".py", ".sh", ".md", ".toml", ".yaml", ".yml", ".txt")
CLASSES = [getattr(mixins, name) for name in mixins.__all__]

#: Rooms from the lowest level to the highest: a room imports itself and the levels below its own.
LEVELS = (
    ("errors",),
    ("compat", "files", "registry", "threads"),
    ("core",),
    ("records", "distributed"),
    ("config", "cpu", "tokenization", "random_state"),
    ("policy",),
    ("data", "rewards", "reporting"),
    ("generation",),
    ("agents",),
    ("mixins", "hf"),
    ("trainer",),
    ("sandbox",),
    ("commands", "trl_hooks"),
    ("cli",),
)
LAYERS = {
    room: {below for lower in LEVELS[:level] for below in lower}
    for level, rooms in enumerate(LEVELS)
    for room in rooms
}
LAYERS["commands"].add("__version__")
# Hooks of transformers' Trainer get prompts and backend from the trainer: they are those of any algorithm.
LAYERS["hf"] -= {"agents", "data", "generation", "rewards"}

#: Functions and rooms that read what a run has written.
READERS = {"groupwise.reporting.metrics_file.read_metrics", "groupwise.commands.report"}

#: Symbols of other libraries' submodules that functions of ``compat/`` import.
WRAPPED = set().union(
    *(rules.wrapped_symbols(source) for name, source in FILES.items() if name.startswith("compat/"))
)


def taken_by_trainer() -> set[str]:
    """Methods of the Trainer, and the attributes that it sets on itself."""
    tree = ast.parse(inspect.getsource(transformers.Trainer))
    return {name for name in dir(transformers.Trainer) if not name.startswith("__")} | rules.assigned_on_self(
        tree
    )


def violations(rule, names):
    """What ``rule`` finds in the source of each file, without the files where it finds nothing."""
    return {name: found for name in names if (found := rule(FILES[name]))}


def test_mixins_have_no_constructor_and_call_no_super():
    assert violations(rules.has_init, MIXINS) == {}
    assert violations(rules.calls_super, MIXINS) == {}


def test_a_constructor_and_super_are_seen():
    source = "class AMixin:\n    def __init__(self):\n        super().__init__()\n"
    assert rules.has_init(source) == ["AMixin"] and rules.calls_super(source) == ["AMixin"]


def test_mixins_override_nothing_of_the_trainer():
    taken = taken_by_trainer()
    assert violations(lambda source: rules.overrides(source, taken), MIXINS) == {}


def test_overrides_are_seen():
    source = "class AMixin:\n    evaluate = 1\n    args: int\n    def train(self):\n        self.state = 1\n"
    assert rules.overrides(source, taken_by_trainer()) == ["AMixin.evaluate", "AMixin.state", "AMixin.train"]


def test_no_attribute_is_in_two_bases_of_the_trainer():
    from groupwise import GRPOTrainer
    from groupwise.config.changes import TrainerAttributes
    from groupwise.hf.base import BaseTrainer

    assert set(GRPOTrainer.__bases__) == {*CLASSES, TrainerAttributes, BaseTrainer}
    assert GRPOTrainer.__bases__[-1] is BaseTrainer
    assert BaseTrainer.__bases__ == (transformers.Trainer,)
    sources = [FILES["config/changes.py"], FILES["hf/base.py"], *MIXINS.values()]
    assert rules.defined_twice(sources, {cls.__name__ for cls in GRPOTrainer.__bases__}) == set()


def test_an_attribute_in_two_bases_is_seen():
    one = "class One:\n    f = 1\n    note: int\n    def g(self):\n        self.h = 1\n"
    other = "class Other:\n    note: int\n    def f(self):\n        self.h = 2\n"
    assert rules.defined_twice([one, other], {"One", "Other"}) == {"f", "h"}
    assert rules.defined_twice([one, other], {"One"}) == set()


@pytest.mark.slow
def test_one_class_extends_the_trainer():
    assert [name for source in FILES.values() for name in rules.subclasses(source, "Trainer")] == [
        "BaseTrainer"
    ]


def test_subclasses_are_seen():
    source = "class A(Trainer): ...\nclass B(A, transformers.Trainer): ...\nclass C(A): ...\n"
    assert rules.subclasses(source, "Trainer") == ["A", "B"]


def test_everything_a_mixin_uses_of_self_is_declared():
    assert violations(rules.undeclared, MIXINS) == {}
    assert violations(rules.reflection, MIXINS) == {}


def test_undeclared_uses_and_reflection_are_seen():
    source = (
        "class AMixin:\n    x: int\n    def f(self):\n        return self.x + self.y + getattr(self, 'z')\n"
    )
    assert rules.undeclared(source) == ["AMixin.y"] and rules.reflection(source) == ["line 4"]


def test_the_core_needs_only_torch():
    assert violations(rules.beyond_torch, [name for name in FILES if name.startswith("core/")]) == {}


def test_other_imports_in_the_core_are_seen():
    source = (
        "import math, transformers\nfrom groupwise.config.grpo_config import GRPOConfig\n"
        "from groupwise.core import kl\nfrom . import ratios\nfrom .. import records\n"
        "import groupwise.core_of_another\n"
    )
    assert rules.beyond_torch(source) == [
        *("groupwise.config.grpo_config", "groupwise.core_of_another", "groupwise.records", "transformers")
    ]


@pytest.mark.slow
def test_imports_follow_the_layers():
    names = [name for name in FILES if name not in ("__init__.py", "trainer.py")]
    found = {name: rules.across_layers(name, FILES[name], LAYERS) for name in names}
    assert {name: rooms for name, rooms in found.items() if rooms} == {}


@pytest.mark.parametrize(
    ("line", "room"),
    [
        ("from groupwise.trainer import GRPOTrainer", "trainer"),
        ("from groupwise import trainer", "trainer"),
        ("from groupwise import GRPOTrainer", "GRPOTrainer"),
        ("from ... import trainer", "trainer"),
        ("from ...trainer import GRPOTrainer", "trainer"),
        ("import groupwise.trainer", "trainer"),
        ("import groupwise", "groupwise"),
        ("x = importlib.import_module('groupwise.trainer')", "trainer"),
    ],
)
def test_an_import_across_the_layers_is_seen(line, room):
    assert rules.across_layers("policy/heads/dense.py", line, LAYERS) == [room]


def test_imports_within_a_room_and_from_outside_are_allowed():
    source = (
        "from . import dense\nfrom .dense import f\nimport torch\nfrom groupwise.errors import ConfigError\n"
    )
    assert rules.across_layers("policy/heads/chunked.py", source, LAYERS) == []


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle():
    order = list(TopologicalSorter(rules.import_graph(FILES)).static_order())  # raises CycleError
    config = [order.index(f"groupwise.config.{name}") for name in ("settings", "fields", "grpo_config")]
    assert config == sorted(config) and order.index("groupwise.trainer") > config[-1]


@pytest.mark.parametrize(
    "line",
    [
        "from groupwise.data.buffer import Buffer",
        "from groupwise.data import buffer",
        "import groupwise.data.buffer",
        "from . import buffer",
        "from .buffer import Buffer",
        "from groupwise import data\nfrom groupwise.data import buffer as b",
        "def f():\n    from groupwise.data.buffer import Buffer",
        "if TYPE_CHECKING:\n    from groupwise.data.buffer import Buffer",
        "module = importlib.import_module('groupwise.data.buffer')",
    ],
)
def test_a_circle_is_seen(line):
    files = {
        "__init__.py": "",
        "data/__init__.py": "",
        "data/window.py": line,
        "data/buffer.py": "from groupwise.data.window import f\nfrom groupwise.data.buffer import g",
    }
    graph = rules.import_graph(files)
    assert "groupwise.data.buffer" in graph["groupwise.data.window"]
    assert graph["groupwise.data.buffer"] == {"groupwise.data.window"}
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


def test_hooks_of_the_trainer_read_nothing_that_a_run_has_written():
    def readers(source):
        symbols = {f"{module}.{symbol}" for module, symbol in rules.imported_symbols(ast.parse(source))}
        return [one for one in symbols if one.startswith(tuple(READERS))]

    assert violations(readers, [name for name in FILES if name.startswith("hf/")]) == {}


def test_readers_and_data_in_hooks_of_the_trainer_are_seen():
    line = "from groupwise.{} import f\n"
    for room in ("data.buffer", "generation.base", "commands.report.run_files"):
        assert rules.across_layers("hf/base.py", line.format(room), LAYERS) == [room.split(".")[0]]
    annotation = "if TYPE_CHECKING:\n    " + line.format("data.buffer")
    assert rules.across_layers("hf/base.py", annotation, LAYERS) == []
    assert all(importlib.import_module(one.rpartition(".")[0]) for one in READERS)


@pytest.mark.slow
def test_private_symbols_of_other_libraries_are_used_only_in_compat():
    names = [name for name in FILES if not name.startswith("compat/")]
    assert violations(lambda source: rules.private_uses(source, WRAPPED), names) == {}


@pytest.mark.parametrize(
    ("line", "symbol"),
    [
        ("model._prefill(x)", "_prefill"),
        ("a.b._value = 1", "_value"),
        ("getattr(model, '_is_stateful', False)", "_is_stateful"),
        ("'_old_forward' in vars(module)", "_old_forward"),
        ("vars(module).get('_old_forward')", "_old_forward"),
        ("del vars(module)['_old_forward']", "_old_forward"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils.data._utils import worker", "torch.utils.data._utils.worker"),
        ("from torch import _C", "torch._C"),
        (
            "def f():\n    from vllm.platforms import current_platform",
            "vllm.platforms.current_platform",
        ),
    ],
)
def test_a_private_symbol_of_another_library_is_seen(line, symbol):
    assert rules.private_uses(line, WRAPPED) == {symbol}


def test_own_private_names_and_documented_ones_are_allowed():
    source = (
        "from __future__ import annotations\nfrom groupwise.core.kl import _f\n"
        "class A(Trainer):\n    def _g(self, other):\n        self._x = other._x + other._g(self)\n"
        "        return super()._save(self._y), other._replace(x=1), getattr(self, '_z'), other.__dict__\n"
    )
    assert rules.private_uses(source, WRAPPED) == set()


def test_modules_have_a_docstring():
    assert violations(lambda source: not ast.get_docstring(ast.parse(source)), FILES) == {}


@pytest.mark.slow
def test_the_backend_is_chosen_in_one_place():
    checked = {
        name: source for name, source in FILES.items() if not name.startswith(("config", "validation"))
    }
    assert sum(rules.reads(source, "use_vllm") for source in checked.values()) <= 1


def test_every_reading_of_an_attribute_is_seen():
    source = "a.use_vllm\ngetattr(a, 'use_vllm')\nf(use_vllm=1)\nb = 'use_vllm'\n"
    assert rules.reads(source, "use_vllm") == 2


def test_nothing_is_left_undone():
    """The text of the project names no work for later: what is missing is said where a user looks for it."""
    texts = [path for room in TEXT_ROOMS for path in sorted((ROOT / room).rglob("*"))]
    texts += [path for path in sorted(ROOT.iterdir()) if path.is_file()]
    named = [path for path in texts if path.suffix in TEXT_ENDINGS or path.name == "Makefile"]
    assert [str(path) for path in named if rules.unfinished(path.read_text(encoding="utf-8"))] == []


def test_a_mark_of_undone_work_is_seen():
    mark = "TO" + "DO"
    assert rules.unfinished(f"x = 1  # {mark}: y\nto_do, todo, {mark}S\n") == [mark]


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

    for name in groupwise.__all__:
        assert getattr(groupwise, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    import groupwise

    with pytest.raises(AttributeError, match="GRPOtrainer"):
        groupwise.GRPOtrainer  # noqa: B018
