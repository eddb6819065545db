"""Reductions merge exactly, whatever the split, and survive the way to another rank.

Files: ``core/metrics.py``.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from groupwise.core.metrics import (
    Max,
    Mean,
    Min,
    Sum,
    attach_metrics,
    detach_metrics,
    masked_mean,
    merge_metrics,
)


def test_a_mean_weighs_by_count_not_by_part():
    """(1 + 2 + 3 + 10) / 4 = 4, where the mean of the means would be (2 + 10) / 2 = 6."""
    assert Mean(6.0, 3.0).merge(Mean(10.0, 1.0)).value() == 4.0


def test_a_mean_of_nothing_is_nan_and_merges_as_nothing():
    assert math.isnan(Mean(0.0, 0.0).value())
    assert Mean(0.0, 0.0).merge(Mean(3.0, 2.0)).value() == 1.5


def test_the_kinds():
    parts = [
        {"m": Mean(1.0), "s": Sum(1.0), "hi": Max(1.0), "lo": Min(1.0)},
        {"m": Mean(2.0), "s": Sum(2.0), "hi": Max(-5.0), "lo": Min(-5.0)},
    ]
    merged = {name: reduction.value() for name, reduction in merge_metrics(parts).items()}
    assert merged == {"m": 1.5, "s": 3.0, "hi": 1.0, "lo": -5.0}


def test_tensors_and_numbers_mix():
    for kind, best in [(Max, 3.0), (Min, -2.0)]:
        for a, b in [
            (torch.tensor(3.0), -2.0),
            (-2.0, torch.tensor(3.0)),
            (torch.tensor(-2), torch.tensor(3.0)),
        ]:
            assert kind(a).merge(kind(b)).value() == best
    # A whole number does not make the other one whole.
    assert Max(torch.tensor(2)).merge(Max(torch.tensor(2.5))).value() == 2.5
    assert Min(torch.tensor(3)).merge(Min(2.5)).value() == 2.5
    assert Mean(torch.tensor(3.0), torch.tensor(2)).merge(Mean(1.0)).value() == pytest.approx(4 / 3)
    assert Sum(torch.tensor(3.0)).merge(Sum(1)).value() == 4.0


@pytest.mark.parametrize("seed", range(5))
def test_any_split_gives_the_whole(seed):
    rng = random.Random(seed)
    # Multiples of 1/8 add without rounding, so equality is exact.
    values = [rng.randrange(-80, 80) / 8 for _ in range(40)]
    cuts = sorted(rng.sample(range(1, 40), 6))
    parts = [values[a:b] for a, b in zip([0, *cuts], [*cuts, 40], strict=True)]
    merged = merge_metrics(
        {"m": Mean(sum(p), float(len(p))), "s": Sum(sum(p)), "hi": Max(max(p)), "lo": Min(min(p))}
        for p in parts
    )
    assert merged["m"].value() == sum(values) / 40
    assert merged["s"].value() == sum(values)
    assert merged["hi"].value() == max(values)
    assert merged["lo"].value() == min(values)


def test_ranks_with_different_keys():
    """A key that a rank lacks contributes nothing: no zero to a mean, a minimum or a maximum."""
    ranks = [
        {"kl": Mean(6.0, 3.0), "tools": Mean(4.0, 2.0)},
        {"kl": Mean(2.0, 1.0), "lowest": Min(5.0), "highest": Max(-5.0)},
    ]
    sent = [detach_metrics(rank) for rank in ranks]
    merged = merge_metrics(attach_metrics(rank) for rank in sent)
    values = {name: reduction.value() for name, reduction in merged.items()}
    assert values == {"kl": 2.0, "tools": 2.0, "lowest": 5.0, "highest": -5.0}
    backwards = merge_metrics(attach_metrics(rank) for rank in reversed(sent))
    assert {name: reduction.value() for name, reduction in backwards.items()} == values


def test_detached_metrics_are_plain_and_complete():
    metrics = {
        "m": Mean(torch.tensor(3.0), torch.tensor(2)),
        "many": Mean(torch.tensor([2.5]), torch.tensor(2**24 + 1)),  # no float32 has this count
        "s": Sum(1.5),
        "hi": Max(torch.tensor(2.0)),
        "lo": Min(0),
    }
    plain = detach_metrics(metrics)
    assert plain == {
        "m": ("Mean", (3.0, 2)),
        "many": ("Mean", (2.5, 2**24 + 1)),
        "s": ("Sum", (1.5,)),
        "hi": ("Max", (2.0,)),
        "lo": ("Min", (0.0,)),
    }
    assert all(type(number) in (float, int) for _, numbers in plain.values() for number in numbers)
    again = attach_metrics(plain)
    assert {name: type(r) for name, r in again.items()} == {name: type(r) for name, r in metrics.items()}
    values = {name: again[name].value() for name in ("m", "s", "hi", "lo")}
    assert values == {"m": 1.5, "s": 1.5, "hi": 2.0, "lo": 0.0}


def test_one_name_of_two_kinds_is_refused():
    with pytest.raises(TypeError, match=r"'kl' is both Mean and Sum"):
        merge_metrics([{"kl": Mean(1.0)}, {"kl": Sum(1.0)}])


def test_merging_does_not_change_the_parts():
    part = {"kl": Mean(1.0)}
    merge_metrics([part, {"kl": Mean(5.0), "more": Sum(1.0)}])
    assert part == {"kl": Mean(1.0)}


def test_masked_mean():
    """Per token: (1 + 4 + 5) / 3. One value per sequence: (1 + 4) / 2, the mask does not weigh sequences."""
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    values = torch.tensor([[1.0, 99.0], [4.0, 5.0]], requires_grad=True)
    mean = masked_mean(values, mask)
    assert mean.value() == pytest.approx(10 / 3)
    assert not mean.total.requires_grad
    assert masked_mean(values[:, :1], mask).value() == 2.5
    assert masked_mean(values[:, 1:], mask[:, 1:]).value() == 5.0
