"""Dictionaries under TRL's names: built from records, shuffled, split, and turned into records again.

Files: ``trl_hooks/inputs.py``.
"""

from __future__ import annotations

import logging

import pytest
import torch

from groupwise import ConfigError, GRPOConfig
from groupwise.core.objectives import policy_loss
from groupwise.mixins.loss import objective_settings
from groupwise.records import Experience
from groupwise.trl_hooks import inputs as hook_inputs

NAN = torch.nan


def experience(**changes):
    """Prompts [5, 6] and [7], completions [8, 2] and [9]."""
    given = {
        "prompt_ids_BL": torch.tensor([[5, 6], [0, 7]]),
        "prompt_mask_BL": torch.tensor([[1, 1], [0, 1]]),
        "completion_ids_BT": torch.tensor([[8, 2], [9, 0]]),
        "completion_mask_BT": torch.tensor([[1, 1], [1, 0]]),
        "loss_mask_BT": torch.tensor([[1, 1], [1, 0]]),
        "group_ids_B": torch.tensor([0, 1]),
        "old_logps_BT": torch.full((2, 2), NAN),
        "advantages_BX": torch.tensor([[0.7], [-0.7]]),
        **changes,
    }
    return Experience(**given)


def plain(inputs):
    return {name: value.tolist() for name, value in inputs.items()}


def test_a_batch_sampled_by_the_current_policy():
    made = hook_inputs.make_inputs(experience(advantages_BX=torch.tensor([[0.5], [-2.0]])), torch.tensor(3))
    assert plain(made) == {
        "prompt_ids": [[5, 6], [0, 7]],
        "prompt_mask": [[1, 1], [0, 1]],
        "completion_ids": [[8, 2], [9, 0]],
        "completion_mask": [[1, 1], [1, 0]],
        "advantages": [0.5, -2.0],
        "num_items_in_batch": 3,
    }


def test_fields_that_trl_has_only_sometimes():
    given = experience(
        old_logps_BT=torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
        sampler_logps_BT=torch.tensor([[-1.5, NAN], [-2.5, NAN]]),
        ref_logps_BT=torch.tensor([[-4.0, -5.0], [-6.0, 0.0]]),
        advantages_BX=torch.tensor([[0.5, 1.0], [-2.0, 0.0]]),
    )
    made = hook_inputs.make_inputs(given, torch.tensor(3), correction_BX=torch.tensor([[0.9], [1.1]]))
    assert made["old_per_token_logps"].tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    assert made["ref_per_token_logps"].tolist() == [[-4.0, -5.0], [-6.0, 0.0]]
    assert str(made["sampling_per_token_logps"].tolist()) == "[[-1.5, nan], [-2.5, 0.0]]"  # padding is 0
    assert made["importance_sampling_ratio"].flatten().tolist() == pytest.approx([0.9, 1.1])
    assert made["advantages"].tolist() == [[0.5, 1.0], [-2.0, 0.0]]


def test_tokens_of_tools_and_masked_completions():
    """The second row has no token with loss: its mask is empty, as of a truncated completion in TRL."""
    given = experience(loss_mask_BT=torch.tensor([[1, 0], [0, 0]]))
    made = hook_inputs.make_inputs(given, torch.tensor(1), with_tool_mask=True)
    assert made["completion_mask"].tolist() == [[1, 1], [0, 0]]
    assert made["tool_mask"].tolist() == [[1, 0], [0, 0]]
    assert hook_inputs.loss_mask(made).tolist() == [[1, 0], [0, 0]]


def test_rows_are_permuted_by_one_draw_from_the_global_generator():
    inputs = {
        "nothing": None,
        "x": torch.arange(6).view(3, 2),
        "texts": ["a", "b", "c"],
        "scalar": torch.tensor(3),
        "number": 0.5,
    }
    torch.manual_seed(3)
    order = torch.randperm(3).tolist()
    after = torch.rand(())
    torch.manual_seed(3)
    shuffled = hook_inputs.shuffle_rows(inputs)
    assert torch.rand(()) == after and order != [0, 1, 2]
    assert shuffled["x"].tolist() == [[2 * row, 2 * row + 1] for row in order]
    assert shuffled["texts"] == [["a", "b", "c"][row] for row in order]
    assert shuffled["nothing"] is None and shuffled["scalar"] == 3 and shuffled["number"] == 0.5


def test_the_shuffle_and_the_split_are_those_of_trl():
    utils = pytest.importorskip("trl.trainer.utils")
    inputs = {"x": torch.rand(8, 3), "texts": list("abcdefgh"), "scalar": torch.tensor(3)}
    torch.manual_seed(0)
    theirs = utils.split_tensor_dict(utils.shuffle_sequence_dict(inputs), 4)
    torch.manual_seed(0)
    ours = hook_inputs.split_rows(hook_inputs.shuffle_rows(inputs), 4)
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert one["texts"] == other["texts"] and one["scalar"] == other["scalar"]
        assert torch.equal(one["x"], other["x"])


def test_rows_that_do_not_fill_a_micro_batch_are_dropped_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        parts = hook_inputs.split_rows({"x": torch.arange(5), "texts": list("abcde")}, 2)
        hook_inputs.split_rows({"x": torch.arange(5)}, 2)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [part["texts"] for part in parts] == [["a", "b"], ["c", "d"]]
    assert [record.getMessage().endswith("1 row(s) are not trained on") for record in caplog.records] == [
        True
    ]


def test_fewer_rows_than_micro_batches_are_an_error():
    with pytest.raises(ConfigError, match="returned 2 rows, but a generation batch is split into 4"):
        hook_inputs.split_rows({"x": torch.arange(2)}, 4)


@pytest.mark.parametrize(
    ("mask", "gaps"),
    [
        ([[0, 1, 1, 0]], False),
        ([[1, 1, 0, 0]], False),  # no token of the completion counts
        ([[1, 0, 1, 1]], True),
        ([[1, 1, 0, 1]], True),
    ],
)
def test_gaps_in_a_mask_are_seen(mask, gaps):
    assert hook_inputs.has_gaps(torch.tensor(mask), 2) is gaps


def test_the_record_of_a_micro_batch():
    inputs = hook_inputs.make_inputs(experience(), torch.tensor(3))
    made = hook_inputs.micro_batch(
        inputs,
        token_weights_BT=torch.ones(2, 2),
        entropy_mask_BT=inputs["completion_mask"],
        entropy_weights_BT=None,
        share=0.5,
    )
    assert made.old_logps_BT.isnan().all() and made.old_logps_BT.shape == (2, 2)
    assert made.advantages_BX.shape == (2, 1) and made.ref_logps_BT is None
    assert made.sequence_weight_B1.tolist() == [[0.25], [0.25]]


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_a_loss_without_a_factor_in_the_dictionary_is_not_corrected(loss_type):
    """A hook that takes the factor out leaves the sampler's log-probs, from which the loss computes one."""
    given = experience(
        old_logps_BT=torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
        sampler_logps_BT=torch.tensor([[-1.5, -1.0], [-2.5, 0.0]]),
    )
    inputs = hook_inputs.make_inputs(given, torch.tensor(3), correction_BX=torch.tensor([[0.9], [1.1]]))
    logps_BT = torch.tensor([[-1.1, -1.9], [-2.9, 0.0]])
    settings = objective_settings(GRPOConfig("x", loss_type=loss_type))

    def loss(*without):
        made = hook_inputs.micro_batch(
            {name: value for name, value in inputs.items() if name not in without},
            token_weights_BT=torch.ones(2, 2) / 3,
            entropy_mask_BT=inputs["completion_mask"],
            entropy_weights_BT=None,
            share=1.0,
        )
        return policy_loss(made, logps_BT, None, settings)[0].item()

    uncorrected = loss("importance_sampling_ratio", "sampling_per_token_logps")
    assert loss("importance_sampling_ratio") == uncorrected != loss()
