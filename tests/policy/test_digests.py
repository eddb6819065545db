"""Digests of weights: their sum, what changes them, and the comparison with reports of engines.

Files: ``generation/vllm/weight_places.py``, ``generation/vllm/weight_check.py``.
"""

from __future__ import annotations

import pytest
import torch
from support.fakes.tiny_engine import TinyEngine
from support.runs import policy

from groupwise.errors import BackendError
from groupwise.generation.vllm.weight_check import WeightCheck
from groupwise.generation.vllm.weight_places import DigestReport, Place, find_places
from groupwise.policy import digests
from groupwise.policy.digests import (
    columns_of,
    part_digest,
    position_weights,
    tensor_digest,
)
from groupwise.policy.weight_iterator import weight_iterator

ROW, COLUMN = digests._ROW, digests._COLUMN


def weight(index: int, seed: int) -> int:
    """The weight of a position, by Python's integers."""
    mask = 2**64 - 1

    def shifted(number: int, bits: int) -> int:  # arithmetic, of a signed number
        return ((number - 2**64 if number >> 63 else number) >> bits) & mask

    mixed = (index + seed) * digests._MIX_1 & mask
    mixed = (mixed ^ shifted(mixed, 31)) * digests._MIX_2 & mask
    return (mixed ^ shifted(mixed, 29)) | 1


def by_loops(matrix: torch.Tensor) -> int:
    bits = (matrix.float() + 0.0).view(torch.int32)
    rows, columns = matrix.shape
    total = sum(
        weight(i, ROW) * weight(j, COLUMN) * int(bits[i, j]) for i in range(rows) for j in range(columns)
    )
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_digest_is_the_double_sum_of_the_documentation(dtype):
    matrix = torch.randn(5, 7).to(dtype)
    assert tensor_digest(matrix).item() == by_loops(matrix)


@pytest.mark.parametrize("chunk", [1, 10, 2**16])
def test_the_digest_does_not_depend_on_how_the_tensor_is_cut_or_stored(chunk, monkeypatch):
    matrix = torch.randn(6, 5)
    expected = by_loops(matrix)
    monkeypatch.setattr(digests, "_CHUNK", {"cpu": chunk})
    assert tensor_digest(matrix).item() == expected
    assert tensor_digest(matrix.T.contiguous().T).item() == expected


def test_positions_have_different_odd_weights():
    values = position_weights(torch.arange(100_000), ROW)
    assert values.unique().numel() == 100_000 and (values & 1).all()


def test_parts_add_up_to_the_whole():
    whole = torch.randn(4, 6, 5)
    columns = columns_of(whole.shape)
    expected = tensor_digest(whole).item()
    experts = [part_digest(whole[i], i * 30, (5, 1), columns).item() for i in range(4)]
    shards = [part_digest(whole[..., i : i + 1], i, (30, 5, 1), columns).item() for i in range(5)]
    transposed = part_digest(whole.permute(2, 0, 1), 0, (1, 30, 5), columns).item()
    flat = part_digest(whole.flatten(), 0, (1,), columns).item()
    for parts in (experts, shards, [transposed], [flat]):
        assert (sum(parts) - expected) % 2**64 == 0
    with pytest.raises(ValueError, match="no ranges of rows and columns"):
        part_digest(whole.flatten()[:7], 1, (1,), columns)


def test_zeros_around_a_matrix_add_nothing():
    padded = torch.zeros(9, 8)
    padded[:3, :4] = torch.randn(3, 4)
    assert tensor_digest(padded).item() == tensor_digest(padded[:3, :4]).item()


def test_equal_values_have_equal_digests_in_every_dtype():
    values = torch.randn(4, 4).bfloat16()
    assert tensor_digest(values).item() == tensor_digest(values.float()).item()
    assert tensor_digest(torch.tensor([0.0, 1.0])).item() == tensor_digest(torch.tensor([-0.0, 1.0])).item()


def test_every_changed_bit_changes_the_digest():
    matrix = torch.randn(3, 5)
    before = tensor_digest(matrix).item()
    bits = matrix.view(torch.int32)
    for i in range(3):
        for j in range(5):
            for bit in range(32):
                bits[i, j] ^= 1 << bit if bit < 31 else -(2**31)
                assert tensor_digest(matrix).item() != before
                bits[i, j] ^= 1 << bit if bit < 31 else -(2**31)
    assert tensor_digest(matrix).item() == before


@pytest.mark.parametrize("change", [torch.Tensor.neg, torch.Tensor.T.__get__, lambda m: m.roll(1, 0)])
def test_changes_of_many_elements_change_the_digest(change):
    """Signs of all elements differ in the highest bit alone, for which the bound is the weakest."""
    for seed in range(200):
        matrix = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))
        assert tensor_digest(matrix).item() != tensor_digest(change(matrix)).item()


@pytest.fixture
def weights():
    return {name: tensor.detach().clone() for name, tensor in weight_iterator(policy())}


def compared(weights, engine, dtype="float32"):
    """Load ``weights`` into an engine and compare; returns their digest."""
    fetch = lambda adapter, given: [("the engine", dtype, engine.collective_rpc("", given))]  # noqa: E731
    check = WeightCheck("every_sync", [dtype], fetch)
    engine.start_weight_update()
    engine.update_weights({"update_info": {"weights": list(check.record(weights.items()))}})
    engine.finish_weight_update("0")
    return check.compare()


def compare_reports(weights, reports):
    """Compare with a report of each worker."""
    check = WeightCheck("every_sync", ["float32"], lambda *_: [("it", "float32", [[one] for one in reports])])
    list(check.record(weights.items()))
    return check.compare()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_loaded_the_weights_agrees(weights, dtype):
    engine = TinyEngine(weights.items(), getattr(torch, dtype))
    first = compared(weights, engine, dtype)
    assert first == compared(weights, engine, dtype)
    weights["model.norm.weight"][0] += 1
    assert len(first) == 16 and first != compared(weights, engine, dtype)


def test_vectors_that_an_engine_keeps_in_float32_are_compared_unrounded(weights):
    engine = TinyEngine(weights.items(), torch.bfloat16)
    weights["model.norm.weight"] += 1e-4  # below the resolution of bfloat16
    engine.parameters["model.norm.weight"] = engine.parameters["model.norm.weight"].float()
    compared(weights, engine, "bfloat16")
    engine.damage = lambda engine: engine.parameters["model.norm.weight"].copy_(torch.ones(()))
    with pytest.raises(BackendError, match=r"model\.norm\.weight has other values"):
        compared(weights, engine, "bfloat16")


def test_a_tensor_that_comes_twice_is_refused(weights):
    check = WeightCheck("every_sync", ["float32"], lambda *_: [])
    with pytest.raises(BackendError, match=r"two tensors named model\.norm\.weight"):
        list(check.record([("model.norm.weight", torch.ones(3))] * 2))


def test_two_passes_over_the_weights_do_not_mix(weights):
    """A source that is asked for metadata reads all weights once more, before the pass that it has begun."""
    check = WeightCheck("every_sync", ["float32"], lambda *_: [])
    first = check.record(weights.items())
    assert [name for name, _ in check.record(weights.items())] == [*weights] == [name for name, _ in first]
    assert check.own.keys() == weights.keys()
    assert check.compare() == compared(weights, TinyEngine(weights.items()))


def test_a_tensor_that_the_policy_does_not_send_is_found_by_what_is_empty(weights):
    engine = TinyEngine(weights.items())
    name = next(name for name in weights if "k_proj" in name)
    del weights[name]
    with pytest.raises(BackendError, match=r"qkv_proj\.weight got no weights"):
        compared(weights, engine)


def test_tensors_that_a_loader_transforms_are_named_and_left_out(caplog):
    parameters = {"a": torch.empty(2, 3, device="meta"), "b": torch.empty(3, device="meta")}

    def load(weights):
        for name, tensor in weights:
            parameters[name].copy_(tensor.exp() if name == "b" else tensor)

    shapes = {"a": [2, 3], "b": [3]}
    places = find_places(load, shapes, parameters, torch.float32)
    assert places.opaque == {"b"} and not places.empty and list(places.by_parameter) == ["a"]
    own = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    entry = [tensor_digest(own["a"]).item(), 6, "float32"]
    compare_reports(own, [{"tensors": {"a": entry}, "opaque": ["b"], "empty": []}])
    assert "1 of 2 tensors of it cannot be compared" in caplog.text and ": b" in caplog.text


@pytest.mark.parametrize(
    "join",
    [
        lambda a, b: torch.cat([b, a]),
        lambda a, b: torch.stack((a, b))[:, 0],
        lambda a, b: torch.cat([torch.cat([a]), b * 2]),
    ],
)
def test_a_loader_may_join_tensors_before_it_copies_them(join):
    parameters = {"joined": torch.empty(2, 3, device="meta"), "c": torch.empty(3, device="meta")}

    def load(weights):
        given = dict(weights)
        parameters["joined"].copy_(join(given["a"], given["b"]))
        parameters["c"].copy_(given["c"])

    places = find_places(load, {"a": [1, 3], "b": [1, 3], "c": [3]}, parameters, torch.float32)
    assert places.opaque == {"a", "b"} and not places.empty and list(places.by_parameter) == ["c"]


def test_rows_of_a_repacked_matrix_on_two_workers_add_up():
    matrix = torch.randn(6, 40)

    def report(worker: int, kernel: torch.Tensor) -> dict:
        made = DigestReport({"a": [6, 40]})
        place = Place("a", (3, 40), (40, 1), 0, (40, 1), 120 * worker)
        made.add_repacked([place], 40, kernel.dtype, lambda: kernel, digests.row_digests(kernel))
        return made.result()

    compare_reports({"a": matrix}, [report(worker, matrix[3 * worker :][:3]) for worker in range(2)])
    with pytest.raises(BackendError, match="a has other values"):
        compare_reports({"a": matrix}, [report(0, matrix[:3]), report(1, matrix[:3])])


def test_a_worker_without_rows_of_a_sharded_tensor_has_no_place_of_it():
    parameters = {"a": torch.empty(2, 3, device="meta"), "b": torch.empty(3, device="meta")}

    def load(weights):
        for name, tensor in weights:
            rows = 0 if name == "a" else 3
            parameters[name][:rows].copy_(tensor[:rows])
            parameters[name][rows:].fill_(0)

    places = find_places(load, {"a": [2, 3], "b": [3]}, parameters, torch.float32)
    assert list(places.by_parameter) == ["b"] and not places.empty and not places.opaque


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (None, "was not loaded"),
        ([0, 3, "float32"], "was loaded in part"),
        ([0, 6, "float32"], "has other values"),
        ([0, 6, "bfloat16"], "is held in bfloat16, not in float32"),
    ],
)
def test_a_problem_is_named(entry, problem):
    tensors = {} if entry is None else {"a": entry}
    report = {"tensors": tensors, "opaque": [], "empty": []}
    with pytest.raises(BackendError, match=f"it does not compute with the trainer's weights: a {problem}"):
        compare_reports({"a": torch.ones(2, 3)}, [report])


def test_shards_and_copies_of_several_workers_add_up():
    matrix, vector = torch.randn(4, 6), torch.randn(3)
    reports = [
        {
            "tensors": {
                "a": [part_digest(matrix[:, 3 * i : 3 * i + 3], 3 * i, (6, 1), 6).item(), 12, "float32"],
                "b": [tensor_digest(vector).item(), 3, "float32"],
            },
            **{"opaque": [], "empty": []},
        }
        for i in range(2)
    ]
    compare_reports({"a": matrix, "b": vector}, reports)
    reports[1]["tensors"]["b"][0] += 1  # one of two copies
    with pytest.raises(BackendError, match="b has other values"):
        compare_reports({"a": matrix, "b": vector}, reports)
