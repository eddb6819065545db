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
from support.batches import micro_batch
from support.configs import config_of
from support.fakes.ranks import on_ranks
from support.runs import count_reward, prompts, trainer
from support.serialization import reloaded

from groupwise.core.metrics import Mean
from groupwise.core.padding import length_mask
from groupwise.data.budget import MicroBatchBudget
from groupwise.data.rebalancing import rebalance
from groupwise.errors import ConfigError
from groupwise.records import Completion, RewardBatch, RolloutBatch
from groupwise.reporting.metrics import BY, MetricBuffer, entropy_by_value, metrics_by_value

G = 4
LENGTHS = ("completions/mean_length", "completions/clipped_ratio")


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


def test_entropy_by_value_is_that_of_rows_that_rebalancing_moves_to_another_rank():
    """Two ranks of six rows; all of the first and one of the second have an advantage."""
    values = ["a", None, "b", "a", 7, "b", "a", "b", 7, "a", None, "b"]
    lengths = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 2, 4]
    advantages = [1.0] * 6 + [0.0] * 3 + [1.0, 0.0, 0.0]
    mask_NT = length_mask(lengths, 6, device="cpu")
    number_N1, two_N2 = torch.arange(12)[:, None], torch.ones(12, 2).long()
    rows_N = micro_batch(
        *(two_N2, two_N2, number_N1 * mask_NT, mask_NT),
        advantages_BX=torch.tensor(advantages)[:, None],
        token_weights_BT=mask_NT.float(),
        sequence_weight_B1=torch.ones(12, 1),
        metric_values=tuple(values),
    )

    def on_rank(rank, gather, exchange):
        budget = MicroBatchBudget(False, 3, 6, skip_zero_advantage=True, world_size=2, rank=rank)
        window = rows_N.select(range(6 * rank, 6 * rank + 6)).split(3)
        batches, _ = rebalance(window, "padded", budget, gather, exchange)
        buffer, others = MetricBuffer(), 0
        for batch in filter(None, batches):
            numbers_BT, mask_BT = batch.completion_ids_BT, batch.loss_mask_BT
            others += sum(number // 6 != rank for number in numbers_BT[:, 0].tolist())
            entropy_BT = numbers_BT + 0.1 * torch.arange(mask_BT.shape[1]) + 9.0 * (mask_BT == 0)
            buffer.record(entropy_by_value(batch, entropy_BT.requires_grad_()))
        return buffer.drain(lambda part: gather([part]))[0], others

    tokens = defaultdict(list)
    for row, (value, length, advantage) in enumerate(zip(values, lengths, advantages, strict=True)):
        if value is not None and advantage:
            tokens[f"entropy/{value}"] += [row + 0.1 * place for place in range(length)]
    (first, _), (second, others) = on_ranks(2, on_rank)
    assert first == second == pytest.approx({name: fmean(each) for name, each in tokens.items()})
    assert others  # rows of the first rank, on the second


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
        f"{name}/maths" for name in ("reward", "frac_reward_zero_std", *LENGTHS, "entropy")
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
    assert {name for name in found if "entropy" in name} == {
        f"eval_entropy{of}" for of in ("", "/maths", "/code")
    }
    assert found["eval_entropy"] == pytest.approx(fmean(found[f"eval_entropy/{of}"] for of in seen), abs=0.2)


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
        ConfigError,
        match="'rows' is no column of train_dataset; there are 'prompt', 'row'; nearest name: 'row'",
    ):
        trainer(tmp_path, metrics_by="rows")
