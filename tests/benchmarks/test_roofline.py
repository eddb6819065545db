"""The floor of a step counts every matrix product once."""

from __future__ import annotations

import sys

import pytest
import torch
from support.runs import policy
from test_common import BENCHMARKS


@pytest.fixture
def roofline():
    path = [*sys.path]  # the folder does not stay on it
    sys.path.append(str(BENCHMARKS))
    import roofline

    yield roofline
    sys.path[:] = path


def test_linear_layers_are_counted_by_shape_without_the_output_layer(roofline):
    # Of two layers: q and o; k and v with one key-value head; gate and up; down.
    shapes = {(16, 16): 4, (8, 16): 4, (32, 16): 4, (16, 32): 2}
    assert roofline.linear_shapes(policy()) == shapes


def test_the_time_of_a_product_is_that_of_a_call(roofline, monkeypatch):
    clock = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])  # the warm-up reads no clock
    monkeypatch.setattr(roofline.time, "process_time", lambda: next(clock))
    calls: list[int] = []
    assert roofline.processor_seconds(lambda: calls.append(1)) == 1.0 and len(calls) == 4
    monkeypatch.undo()
    for seconds in (roofline.forward_seconds, roofline.backward_seconds):
        assert seconds((32, 16), 8, torch.float32) > 0


def test_attention_counts_its_products(roofline, monkeypatch):
    """Two of queries x keys x features per query head, and the four of their gradients."""
    flops: list[int] = []

    def count(compute):
        product = torch.bmm
        monkeypatch.setattr(torch, "bmm", lambda a, b: flops.append(a.numel() * b.shape[2]) or product(a, b))
        compute()
        monkeypatch.setattr(torch, "bmm", product)
        return 1.0

    monkeypatch.setattr(roofline, "processor_seconds", count)
    config = policy().config
    one = 3 * config.num_attention_heads * 8 * 5 * config.head_dim
    for backward, products in ((False, 2), (True, 4)):
        seconds = roofline.attention_seconds(8, 5, config, torch.float32, batch=3, backward=backward)
        assert seconds == products and set(flops) == {one}
