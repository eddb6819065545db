"""Metrics of each source of a mixture, and of each value of a column.

Files: ``mixins/reward.py``, ``reporting/metrics.py``, ``reporting/evaluation.py``.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from itertools import chain
from statistics import fmean

import pytest
import torch
from support.configs import config_of
from support.runs import count_reward, prompts, trainer
from support.serialization import reloaded

from groupwise.core.metrics import Mean
from groupwise.errors import ConfigError
from groupwise.records import Completion, RewardBatch, RolloutBatch
from groupwise.reporting.metrics import BY, MetricBuffer, metrics_by_value

G = 4


def ranks(values, rewards, completions, size):
    """Completions of consecutive ranks of ``size`` rows, and the rewards of all."""
    for first in range(0, len(values), size):
        own = slice(first, first + size)
        rows = [{"prompt": "w1"} if value is None else {"kind": value} for value in values[own]]
        rollouts = RolloutBatch(rows, ["w1"] * size, [[5]] * size, completions[own], ["x"] * size, G)
        yield rollouts, RewardBatch(torch.tensor(rewards), torch.ones(1), G, local=own)


@pytest.mark.parametrize("size", [24, 12, 6, 2])
def test_every_group_counts_once_on_any_number_of_ranks(size):
    """Six groups of four; at 6 and 2 rows per rank a group is on several ranks. None is no value."""
    draw = random.Random(3)
    kinds = ["a", "b", "a", None, "b", 7]
    values = [kind for kind in kinds for _ in range(G)]
    rewards = [[1.0 if row < 8 else float(draw.randrange(3))] for row in range(24)]
    rewards[5] = rewards[21] = [math.nan]
    lengths = [draw.randint(1, 9) for _ in range(24)]
    completions = [Completion([3] * n, truncated=n == 9, dropped=row == 2) for row, n in enumerate(lengths)]
    rewards[2] = [math.nan]  # as that of any dropped completion

    expected = {}
    for kind in ("a", "b", 7):
        groups = [range(G * i, G * i + G) for i in range(6) if kinds[i] == kind]
        scored = [[rewards[row][0] for row in g if not math.isnan(rewards[row][0])] for g in groups]
        kept = [row for g in groups for row in g if row != 2]
        expected |= {
            f"reward/{kind}": fmean(chain(*scored)),
            f"frac_reward_zero_std/{kind}": fmean(len(set(one)) == 1 for one in scored),
            f"completions/mean_length/{kind}": fmean(lengths[row] for row in kept),
            f"completions/clipped_ratio/{kind}": fmean(lengths[row] == 9 for row in kept),
        }

    buffers = []
    for rollouts, batch in ranks(values, rewards, completions, size):
        buffers.append(MetricBuffer())
        buffers[-1].record(metrics_by_value(rollouts, batch, "kind", "sum_then_normalize"))
    parts = []
    for buffer in buffers[1:]:
        buffer.drain(lambda part: parts.append(part) or [part])
    logged, _ = buffers[0].drain(lambda part: [part, *parts])
    assert logged == pytest.approx(expected)


def test_at_most_32_values_have_metrics_of_their_own():
    buffer, resumed = MetricBuffer(), MetricBuffer()

    def log(numbers):
        for number in numbers:
            buffer.record({f"reward{BY}v{number:02}": Mean(float(number))})
        return buffer.drain(lambda part: [part])[0]

    assert log(range(30, 60)) == {f"reward/v{number}": float(number) for number in range(30, 60)}
    resumed.restore(reloaded(buffer.snapshot()))
    buffer = resumed  # v00 and v01 are the last with their own; of the others 2 + 3 and 70
    assert log([3, 2, 1, 0, 70]) == {"reward/v00": 0.0, "reward/v01": 1.0, "reward/other": 25.0}
    assert log([5, 31]) == {"reward/other": 5.0, "reward/v31": 31.0}
    assert buffer.merge([buffer.snapshot()] * 2, config_of())["values"] == sorted(
        [*(f"v{n}" for n in range(30, 60)), "v00", "v01"], key=lambda v: (v < "v30", v)
    )


def test_a_metric_of_user_code_of_the_same_name_is_replaced_with_a_warning(caplog):
    buffer = MetricBuffer()
    buffer.record_metric("reward/maths", 3.0)
    buffer.record({f"reward{BY}maths": Mean(1.0)})
    assert buffer.drain(lambda part: [part])[0] == {"reward/maths": 1.0}
    assert "'reward/maths' of user code is replaced" in caplog.text


def rows(kind, count):
    return [{"prompt": f"w{i}", kind: i} for i in range(count)]


def test_a_mixture_has_metrics_by_source_in_training_and_evaluation(tmp_path):
    seen = defaultdict(list)

    def reward(completion_ids, source, trainer_state, **_):
        rewards = count_reward(completion_ids)
        for name, value in zip(source, rewards, strict=True):
            seen[name].append(value)
        return rewards

    made = trainer(
        tmp_path,
        reward,
        train_dataset={"maths": rows("answer", 4), "code": rows("tests", 4)},
        eval_dataset=[{"prompt": f"w{i}", "source": "code" if i % 2 else "maths"} for i in range(4)],
        max_steps=1,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        eval_pass_at_k=[1],
        eval_pass_threshold=2.0,
    )
    made.train()
    logs = made.state.log_history[0]
    sampled = {name: list(values) for name, values in seen.items()}
    assert {n for n in logs if n.endswith("/maths")} == {
        f"{name}/maths"
        for name in ("reward", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio")
    }
    assert {name: logs[f"reward/{name}"] for name in sampled} == pytest.approx(
        {name: fmean(values) for name, values in sampled.items()}
    )
    seen.clear()
    found = made.evaluate()
    for name, values in seen.items():
        assert found[f"eval_reward/{name}"] == pytest.approx(fmean(values))
        assert found[f"eval_pass@1/{name}"] == pytest.approx(fmean(value > 2 for value in values))
    assert len(seen) == 2


def test_zero_is_a_value_of_an_evaluation(tmp_path):
    made = trainer(
        tmp_path, eval_dataset=prompts(2), per_device_eval_batch_size=8, metrics_by="row", eval_pass_at_k=[1]
    )
    found = made.evaluate()
    assert {name for name in found if name.startswith(("eval_pass@1/", "eval_reward/"))} == {
        *("eval_pass@1/0", "eval_pass@1/1", "eval_reward/0", "eval_reward/1"),
    }


def test_a_column_that_no_dataset_has_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="metrics_by='rows' is no column of train_dataset; nearest name: 'row'"
    ):
        trainer(tmp_path, metrics_by="rows")
