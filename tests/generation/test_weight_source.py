"""Weights that engines read on other threads, packed, or as changes."""

from __future__ import annotations

import threading

import torch

from groupwise.generation.vllm.weight_source import EngineWeights


def test_every_tensor_begins_at_a_multiple_of_its_item_size() -> None:
    """In the order of the model, as far as that is possible."""
    pairs = [
        ("half", torch.zeros(3, dtype=torch.float16)),
        ("bytes", torch.zeros(8, dtype=torch.uint8)),
        ("byte", torch.zeros(1, dtype=torch.uint8)),
        ("long", torch.zeros(1, dtype=torch.int64)),
        ("float", torch.zeros(3)),
        ("matrix", torch.zeros(2, 2, dtype=torch.bfloat16)),
    ]
    weights = EngineWeights()
    weights.begin(lambda: iter(pairs))
    offset = 0
    order = []
    for name, tensor in weights:
        assert offset % tensor.element_size() == 0, name
        offset += tensor.nbytes
        order.append(name)
    assert order == ["bytes", "long", "matrix", "float", "half", "byte"]
    assert list(weights) == []  # a pass is read once
    assert [name for name, _ in weights.metadata()] == order
    found = weights.metadata()[3][1]
    assert found.is_meta and (found.dtype, found.shape) == (torch.float32, (3,))
    assert [one.nbytes for _, one in weights.metadata()] == [8, 8, 8, 12, 6, 1]


def test_metadata_reads_the_weights_once() -> None:
    passes = []

    def read():
        passes.append(1)
        yield "w", torch.zeros(4)

    weights = EngineWeights()
    for _ in range(3):
        weights.begin(read)
        assert [name for name, _ in weights.metadata()] == ["w"] and len(list(weights)) == 1
    assert len(passes) == 1 + 3


def test_a_pass_ends_after_the_tensor_that_is_being_made() -> None:
    """Another thread merges an adapter into a tensor: the caller must not see the merged policy."""
    for read_rest in (False, True):
        merging, go_on, restored = threading.Event(), threading.Event(), []

        def read(merging=merging, go_on=go_on, restored=restored):
            merging.set()
            go_on.wait(30)
            for name in ("first", "second", "third"):
                restored.append(name)
                yield name, torch.zeros(2)

        weights, got = EngineWeights(), []
        weights.begin(read)
        reader = threading.Thread(target=lambda weights=weights, got=got: got.extend(weights))
        reader.start()
        assert merging.wait(30)
        threading.Timer(0.05, go_on.set).start()
        weights.end(read_rest=read_rest)
        at_end = list(restored)
        assert at_end[0] == "first" and (len(at_end) == 3 or not read_rest)
        reader.join(30)
        assert restored == at_end and [name for name, _ in got] == at_end[: len(got)]
