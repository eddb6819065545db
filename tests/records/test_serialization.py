"""Copies of records on the host, and files of them."""

from __future__ import annotations

import gzip
import io
import pickle

import numpy as np
import pytest
import torch
from support.serialization import reloaded

from groupwise import ConfigError
from groupwise.core.metrics import Max, Mean
from groupwise.records import Completion, ImageInputs, RolloutBatch, SamplingMask
from groupwise.records.serialization import NotSaved, host_copy, load, to_bytes


def test_a_view_is_copied_without_the_storage_around_it():
    whole = torch.arange(12.0).view(3, 4)
    (copy,) = host_copy([whole[:, 1:3]])
    assert copy.equal(whole[:, 1:3]) and copy.untyped_storage().nbytes() == 6 * 4
    parameter = torch.ones(2, requires_grad=True)
    assert not host_copy(parameter * 2).requires_grad


def test_what_is_on_the_host_is_not_copied():
    whole, ids = torch.arange(4), [5, 6]
    copied = host_copy({"whole": whole, "ids": ids, "same": [ids, torch.ones(1).expand(3)]})
    assert copied["whole"].data_ptr() == whole.data_ptr() and copied["ids"] is ids is copied["same"][0]
    assert reloaded(copied)["same"][1].tolist() == [1.0] * 3


def test_compressed_bytes_have_the_same_content():
    value = {"ids": torch.arange(1000), "rows": [[5] * 1000]}
    packed = to_bytes(value, compressed=True)
    found = load(io.BytesIO(gzip.decompress(packed)))
    assert found["ids"].equal(value["ids"]) and found["rows"] == value["rows"]
    assert len(packed) < len(to_bytes(value)) / 2


def test_records_and_containers_keep_their_types():
    value = {
        "metrics": {"kl": Mean(torch.tensor(1.5), 2.0), "longest": Max(3)},
        "completion": Completion([5, 6], sampling_mask=SamplingMask.from_lists([[5, 7], [6]])),
        "pair": (1, [None, True, b"x"], slice(0, 2), range(3)),
        "share": np.float64(0.5),
    }
    loaded = reloaded(value)
    assert loaded["metrics"] == value["metrics"] and type(loaded["share"]) is float
    assert loaded["pair"] == value["pair"] and loaded["share"] == 0.5
    assert loaded["completion"].token_ids == [5, 6]
    assert loaded["completion"].sampling_mask.ids.tolist() == [5, 7, 6]


def test_one_record_in_several_places_stays_one():
    images = ImageInputs({"pixels": torch.ones(2)}, {"types": range(2)}, images=[object()])
    text = RolloutBatch([{}] * 2, ["a"] * 2, [[1]] * 2, [Completion([2])] * 2, ["b"] * 2, images=[images] * 2)
    loaded = reloaded(text)
    assert loaded.images[0] is loaded.images[1] and loaded.row_ids == [0, 1]
    assert loaded.images[0].images == ()  # only of this process


def test_fields_that_a_record_of_an_earlier_version_lacks_get_their_default():
    earlier = Completion([5, 6], logps=[-0.5, -0.25])
    del vars(earlier)["turns"]  # as it is read from its file
    loaded = reloaded([earlier])[0]
    assert loaded.turns is None and loaded.logps == [-0.5, -0.25]


def test_parts_for_this_process_alone_are_none():
    assert host_copy({"run": NotSaved(object()), "seed": 3}) == {"run": None, "seed": 3}


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"rows": [1, {"image": object()}]}, r"state\['rows'\]\[1\]\['image'\] holds a object"),
        (Mean(object()), r"state\.total holds a object"),
        ({(1, object()): 2}, r"a key of state\[1\] holds a object"),
        ([Completion], r"state\[0\] holds a type"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named(value, place):
    with pytest.raises(ConfigError, match=place):
        host_copy(value, "state")


class Foreign:
    pass


def test_other_classes_are_not_read():
    file = io.BytesIO()
    torch.save(Foreign(), file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="Foreign"):
        load(file)
