"""Every recipe of ``examples/papers`` against its paper's equation: value and gradient in float64."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from paper_index import SECTIONS, TRL_INDEX, papers_page
from support.fakes import duals
from support.oracles import paper_equations
from support.oracles.paper_equations import EQUATIONS, Equation
from support.oracles.paper_loss import Gradient, loss_and_gradient, reward_columns
from support.oracles.paper_samples import Samples, samples

from groupwise.core.entropy import EntropyControl

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "papers"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))
#: Largest error of the loss and of a partial derivative, relative to the largest one.
TOLERANCE = 1e-9
FIRST_ENTROPY = 0.1


def run(recipe: str) -> dict[str, Any]:
    """Run the file of a recipe, which registers its names, and return its variables."""
    return runpy.run_path(str(FOLDER / f"{recipe}.py"))


def library(found: dict[str, Any], given: Samples, equation: Equation) -> tuple[float, Gradient]:
    """Compute loss and gradient of one optimizer step with the recipe, from rewards."""
    lengths = [len(row) * equation.stretch for row in given.logps]
    solved = [row[0] > 0 for row in given.rewards]
    columns = [] if equation.solved_only else [list(column) for column in zip(*given.rewards, strict=True)]
    columns += reward_columns(found.get("reward_funcs", ()), lengths, solved)
    config = found["config"]
    control = EntropyControl(config.entropy_coef)
    if config.use_adaptive_entropy:  # a step before, of low entropy
        control = control.step(FIRST_ENTROPY, config.entropy_target, config.entropy_coef_delta, 0.0, 1.0)
    return loss_and_gradient(config, given, columns, control)


def test_every_recipe_has_an_equation():
    assert sorted(EQUATIONS) == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_its_equation(recipe):
    found, equation = run(recipe), EQUATIONS[recipe]
    size = min(found["config"].num_generations, 8)
    largest = 0.0
    for kind in equation.rewards:
        for seed, on_policy in enumerate((False, True, False)):
            given = samples(kind, equation.columns, size, seed=seed, on_policy=on_policy)
            expected = equation.loss(given)
            value, gradient = library(found, given, equation)
            scale = max(map(abs, expected.partials.values()))
            errors = {name: abs(g - expected.partials.get(name, 0.0)) for name, g in gradient.items()}
            assert abs(value - expected.value) <= TOLERANCE * max(abs(expected.value), scale)
            assert max(errors.values()) <= TOLERANCE * scale, max(errors, key=errors.get)
            largest = max(largest, scale)
    assert largest > 1e-7


def num_lines(recipe):
    """Lines beside imports and the configuration."""
    tree = ast.parse((FOLDER / f"{recipe}.py").read_text())
    counted = [
        node
        for node in tree.body[1:]
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "config")
    ]
    return sum((node.end_lineno or 0) - first_line(node) + 1 for node in counted)


def test_recipes_are_short():
    assert {recipe: lines for recipe in RECIPES if (lines := num_lines(recipe)) > 15} == {}


def first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def test_every_recipe_is_in_one_section_of_the_page():
    assert sorted(name for names in SECTIONS.values() for name in names) == RECIPES
    assert len(RECIPES) >= 30
    assert {name for names in TRL_INDEX.values() for name in names} <= set(RECIPES)


def test_the_page_covers_the_papers_that_trl_names():
    trl = pytest.importorskip("trl")
    folder = Path(trl.__file__).parent / "trainer"
    text = "".join((folder / f"grpo_{module}.py").read_text() for module in ("config", "trainer"))
    named = set(re.findall(r"papers/(\d{4}\.\d{5})", text)) - {"2305.14314"}  # QLoRA
    assert {"2402.03300", "2503.14476"} <= named
    page = papers_page()
    assert [paper for paper in sorted(named) if f"arXiv {paper}" not in page] == []


def test_derivatives_of_scalars():
    """Central differences of one expression with every operation."""

    def expression(x: duals.Number, y: duals.Number) -> duals.Number:
        ratio = duals.exp(x - y) / (1.0 + duals.sigmoid(y)) + duals.log(1.5 + x * y) ** 2.0
        return (
            2.0 * duals.minimum(ratio, 9.0) - duals.clip(x, -1.0, 1.0) / 3.0 + (1.0 - y) * duals.maximum(y, x)
        )

    at = {"x": 0.7, "y": 0.4}
    found = expression(*(duals.Dual(value, {name: 1.0}) for name, value in at.items()))
    for name in at:
        ends = [expression(**{**at, name: at[name] + step}) for step in (1e-6, -1e-6)]
        assert found.partials[name] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-8)


def test_the_equations_import_nothing_of_the_library():
    for module in (paper_equations, duals):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert imported and not any("groupwise" in line or "torch" in line for line in imported)
