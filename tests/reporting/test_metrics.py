"""MetricBuffer: metrics of a logging interval, merged over ranks."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from support.serialization import reloaded

import groupwise
from groupwise.core.metrics import Mean, Sum
from groupwise.reporting.documented import documented_metrics
from groupwise.reporting.metrics import MetricBuffer


def alone(part):
    return [part]


def test_drain_merges_ranks_and_starts_the_next_interval():
    ranks = [MetricBuffer(), MetricBuffer()]
    for buffer, (total, count) in zip(ranks, [(6.0, 3.0), (2.0, 1.0)], strict=True):
        buffer.record({"reward": Mean(total, count), "num_tokens": Sum(10.0)})
    parts = []
    ranks[1].drain(lambda part: parts.append(part) or [part])
    values, _ = ranks[0].drain(lambda part: [part, *parts])
    assert values == {"reward": 2.0, "num_tokens": 20.0}  # (6 + 2) / (3 + 1)
    # num_tokens counts from the start of the run
    assert ranks[0].drain(alone)[0] == {"num_tokens": 10.0}


def test_a_phase_is_a_metric_of_the_next_log():
    buffer = MetricBuffer()
    with buffer.phase("generate"):
        pass
    assert buffer.drain(alone)[0].keys() == {"time/generate", "memory/generate"}
    assert buffer.drain(alone)[0] == {}


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 3.0)])
def test_recorded_values_are_reduced(reduction, expected):
    buffer = MetricBuffer()
    for value in (1, 2.0, torch.tensor([3.0])):
        buffer.record_metric("length", value, reduction)
    assert buffer.drain(alone)[0] == {"length": expected}


def test_the_default_reduction_is_the_mean():
    buffer = MetricBuffer()
    buffer.record_metric("length", 1.0)
    buffer.record_metric("length", 4.0)
    assert buffer.drain(alone)[0] == {"length": 2.5}


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, None, "3", [1.0], torch.tensor([1.0, 2.0])])
def test_a_value_that_is_not_one_finite_number_is_refused(value):
    with pytest.raises(ValueError, match=r"record_metric\('x', .*one finite number"):
        MetricBuffer().record_metric("x", value)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction='median' is unknown; allowed: mean, sum, min, max"):
        MetricBuffer().record_metric("x", 1.0, "median")


def test_two_reductions_of_one_name_are_refused():
    buffer = MetricBuffer()
    buffer.record_metric("x", 1.0)
    with pytest.raises(ValueError, match=r"record_metric\('x'.*metric 'x' is both Mean and Sum"):
        buffer.record_metric("x", 1.0, "sum")
    assert buffer.drain(alone)[0] == {"x": 1.0}


def recorded_names() -> set[str]:
    """Names that a reduction is recorded under in the library, ``length`` for every variable part."""
    source = "".join(path.read_text() for path in Path(groupwise.__file__).parent.rglob("*.py"))
    found = re.findall(r'f?"([\w/{}]+)"\]?(?:: | = )(?:Mean|Sum|Min|Max|masked_mean)\(', source)
    names = {re.sub(r"{\w+}", "length", name) for name in found}
    assert {"num_tokens", "kl", "rewards/length/mean", "time/reward/length"} <= names and len(names) > 40
    return names - {"time/length", "memory/length", "length/mean", "length/min", "length/max"}


def test_a_metric_of_the_trainer_is_refused():
    for name in [*recorded_names(), "grad_norm", "pass@4"]:
        with pytest.raises(ValueError, match=rf"the trainer logs '{name}' itself; .* 'custom/{name}'"):
            MetricBuffer().record_metric(name, 1.0)
        MetricBuffer().record_metric(f"custom/{name}", 1.0)


def examples(name: str) -> set[str]:
    """Expand the placeholders of a documented name: ``a/<b, c>`` is a/b and a/c, ``<name>`` is length."""
    placeholder = re.search(r"<([^>]+)>", name)
    if placeholder is None:
        return set(name.split(", _")[:1])
    choices = placeholder[1].split(", ") if ", " in placeholder[1] else ["length"]
    return set().union(*(examples(name.replace(placeholder[0], choice, 1)) for choice in choices))


def test_the_page_of_metrics_has_every_metric_and_no_other():
    documented = set().union(*(examples(name) for group in documented_metrics().values() for name in group))
    assert recorded_names() - documented == set()
    for name in documented - {"epoch", "learning_rate", "grad_norm"}:
        number = re.sub(r"@(length|k|n)", "@4", name)
        with pytest.raises(ValueError, match="the trainer logs"):
            MetricBuffer().record_metric(number, 1.0)


def test_the_state_survives_a_checkpoint():
    buffer, resumed = MetricBuffer(), MetricBuffer()
    buffer.record_metric("x", 2.0)
    resumed.restore(reloaded(buffer.snapshot()))
    resumed.record_metric("x", 4.0)
    assert resumed.drain(alone)[0] == {"x": 3.0}
