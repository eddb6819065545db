"""Every recipe of ``examples/papers`` against its paper's equation: value and gradient in float64."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
from support import duals, paper_equations
from support.paper_equations import EQUATIONS
from support.paper_loss import Gradient, loss_and_gradient, reward_columns
from support.paper_samples import Samples, samples

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "papers"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))
#: Largest error of the loss and of a partial derivative, relative to the largest one.
TOLERANCE = 1e-9


def run(recipe: str) -> dict[str, Any]:
    """Run the file of a recipe, which registers its names, and return its variables."""
    return runpy.run_path(str(FOLDER / f"{recipe}.py"))


def library(found: dict[str, Any], given: Samples, stretch: int = 1) -> tuple[float, Gradient]:
    lengths = [len(row) * stretch for row in given.logps]
    return loss_and_gradient(found["config"], given, reward_columns(found.get("reward_funcs", ()), lengths))


def test_every_recipe_has_an_equation():
    assert sorted(EQUATIONS) == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_its_equation(recipe):
    found, equation = run(recipe), EQUATIONS[recipe]
    size = min(found["config"].num_generations, 8)
    largest = 0.0
    for seed, kind in enumerate(equation.rewards):
        for on_policy in (False, True):
            given = samples(kind, equation.columns, size, seed=seed, on_policy=on_policy)
            expected = equation.loss(given)
            value, gradient = library(found, given, equation.stretch)
            scale = max(map(abs, expected.partials.values()))
            errors = {name: abs(g - expected.partials.get(name, 0.0)) for name, g in gradient.items()}
            assert abs(value - expected.value) <= TOLERANCE * max(abs(expected.value), scale)
            assert max(errors.values()) <= TOLERANCE * scale, max(errors, key=errors.get)
            largest = max(largest, scale)
    assert largest > 1e-7


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_short(recipe):
    """At most 15 lines beside imports and the configuration."""
    tree = ast.parse((FOLDER / f"{recipe}.py").read_text())
    counted = [
        node
        for node in tree.body[1:]
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "config")
    ]
    lines = sum((node.end_lineno or 0) - first_line(node) + 1 for node in counted)
    assert lines <= 15


def first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


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
