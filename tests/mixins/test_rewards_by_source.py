"""Reward functions of some sources of a mixture: they are called with the rows of these, and others get None.

Files: ``mixins/reward.py``, ``rewards/runtime/calling.py``, ``data/dataset_checks.py``.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.runs import trainer

from groupwise.errors import ConfigError
from groupwise.records import Completion, RolloutBatch
from groupwise.rewards import per_sample_reward
from groupwise.rewards.runtime.calling import call_rewards
from groupwise.rewards.texts import RewardLog


def batch(values):
    rows = [{"prompt": "w1", "value": value} for value in values]
    size = len(rows)
    return RolloutBatch(rows, ["w1"] * size, [[5]] * size, [Completion([3])] * size, ["x"] * size)


def test_a_function_is_called_with_its_rows():
    def even(value, log_extra, **_):
        assert value == [0, 2]
        log_extra("parsed", ["a", "b"])
        return [0.5, None]

    async def odd(value, completion_ids, log_extra, **_):
        assert value == [1, 3] and len(completion_ids) == 2
        log_extra("parsed", ["c", "d"])
        return torch.tensor([1.0, 3.0])

    def never(**_):
        raise AssertionError("called without rows")

    def model(value, **_):  # on all ranks, with all rows
        return [float(one) for one in value]

    model.runs_in_caller_thread = True
    log = RewardLog(4)
    calls = call_rewards(
        [even, odd, never, model, model],
        ["even", "odd", "never", "model", "model_2"],
        batch(range(4)),
        rows_F=[[0, 2], [1, 3], [], [3], None],
        log_extra=log.log_extra,
    )
    nan = math.nan
    expected = [[0.5, nan, nan, nan], [nan, 1, nan, 3], [nan] * 4, [nan, nan, nan, 3], [0, 1, 2, 3]]
    torch.testing.assert_close(torch.tensor(calls.rewards_FB), torch.tensor(expected), equal_nan=True)
    assert log.columns == {"parsed": ["a", "c", "b", "d"]}
    with pytest.raises(ValueError, match=r"has 1 values for 2 completions"):
        log.log_extra("parsed", ["a"], rows=[1, 3])


def rows(kind, count):
    return [{"prompt": f"w{i}", kind: i} for i in range(count)]


MIXTURE = {"maths": rows("answer", 2), "code": rows("tests", 2)}


@pytest.mark.parametrize("mark", [lambda function: function, per_sample_reward])
def test_a_run_with_rewards_by_source(tmp_path, mark):
    @mark
    def solved(completion_ids, answer, source, **_):
        assert {*source} == {"maths"} and None not in answer
        return [float(len(ids)) for ids in completion_ids]

    @mark
    def passed(completion_ids, tests, source, **_):
        assert {*source} == {"code"} and None not in tests
        return [-float(len(ids)) for ids in completion_ids]

    def brief(completion_ids, **_):
        return [0.25 for _ in completion_ids]

    made = trainer(
        tmp_path,
        {"maths": [solved, brief], "code": [brief, passed]},
        train_dataset=MIXTURE,
        eval_dataset={"maths": rows("answer", 2)},
        max_steps=1,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=4,
    )
    assert made.reward_func_names == ["solved", "brief", "passed"]
    kept = []
    compute = made.compute_advantages
    made.compute_advantages = lambda rewards: kept.append(rewards) or compute(rewards)
    made.train()
    scored = ~kept[0].rewards_NF.isnan()  # solved and brief for maths, brief and passed for code
    assert scored.sum(0).tolist() == [8, 16, 8] and (scored.sum(1) == 2).all()
    logs = made.state.log_history[0]
    assert logs["reward/maths"] == pytest.approx(0.25 + logs["rewards/solved/mean"])
    assert logs["reward/code"] == pytest.approx(0.25 + logs["rewards/passed/mean"])
    found = made.evaluate()
    assert found["eval_maths_reward"] == pytest.approx(0.25 + found["eval_maths_rewards/solved/mean"])


@pytest.mark.parametrize(
    ("rewards", "dataset", "message"),
    [
        (
            {"math": len, "code": len},
            MIXTURE,
            "reward_funcs has 'math', no source of train_dataset; .*'maths'",
        ),
        (
            {"maths": len},
            MIXTURE,
            "reward_funcs has 'maths' and lacks 'code'; give each source of train_dataset an entry",
        ),
        ({"maths": len}, MIXTURE["maths"], "reward_funcs by source needs datasets by name"),
    ],
)
def test_functions_of_other_sources_are_refused(tmp_path, rewards, dataset, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, rewards, train_dataset=dataset)
