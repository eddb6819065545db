"""Mixtures of datasets by source: order, resume, columns that a source lacks, streams, errors.

File: ``data/dataset_checks.py``.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from datasets import Dataset, DatasetDict
from support.configs import config_of
from support.runs import count_reward, trainer

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.data import dataset_checks
from groupwise.errors import ConfigError


def rows(name, count):
    return [{"prompt": f"w{i}", name: i} for i in range(count)]


def mix_sources(dataset, config):
    return dataset_checks.mix_sources(dataset, None, config)[0]


MIXTURE = {"maths": rows("answer", 6), "code": rows("tests", 3)}


def test_without_weights_every_row_is_there_once():
    mixed = mix_sources(MIXTURE, config_of())
    assert mixed["source"][:] == ["maths"] * 6 + ["code"] * 3
    assert mixed["answer"][5:] == [5, None, None, None] and mixed["tests"][5:] == [None, 0, 1, 2]


@pytest.mark.parametrize("seed", [3, 4])
def test_with_weights_a_source_that_ends_begins_again(seed):
    big = {"maths": rows("answer", 300), "code": rows("tests", 3)}
    mixed = mix_sources(big, config_of(dataset_weights={"maths": 3, "code": 1}, seed=seed))
    counts = Counter(mixed["source"])
    # The epoch ends with the last row of maths. Draws of code before 300 of maths: mean 100, deviation 11.5.
    assert counts["maths"] == 300 and 50 < counts["code"] < 150
    assert [i for i in mixed["answer"] if i is not None] == list(range(300))
    assert [i for i in mixed["tests"] if i is not None] == [i % 3 for i in range(counts["code"])]
    again = mix_sources(big, config_of(dataset_weights={"code": 0.5, "maths": 1.5}, seed=0, data_seed=seed))
    assert again["source"][:] == mixed["source"][:]
    other = mix_sources(big, config_of(dataset_weights={"maths": 3, "code": 1}, seed=seed + 2))
    assert other["source"][:50] != mixed["source"][:50]


@pytest.mark.parametrize("weights", [None, {"maths": 1, "code": 9}])
def test_streams_are_mixed_too(weights):
    streams = {"maths": Dataset.from_list(MIXTURE["maths"]).to_iterable_dataset(), "code": MIXTURE["code"]}
    mixed = [*mix_sources(streams, config_of(dataset_weights=weights))]
    assert all(row.keys() == {"prompt", "answer", "tests", "source"} for row in mixed)
    code = [row["tests"] for row in mixed if row["source"] == "code"]
    assert code == [i % 3 for i in range(len(code))]
    assert [row["answer"] for row in mixed if row["source"] == "maths"] == list(range(6))
    assert len(code) >= (30 if weights else 5)  # 9 for each of maths in the mean; in turn


def test_two_sources_of_other_types_are_refused():
    with pytest.raises(ConfigError, match=r"joining the sources of train_dataset raised.*prompt"):
        mix_sources({**MIXTURE, "chat": [{"prompt": [{"role": "user", "content": "w1"}]}]}, config_of())


class Lazy:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"prompt": "w1"}


@pytest.mark.parametrize(
    ("dataset", "weights", "message"),
    [
        (
            MIXTURE,
            {"math": 2, "code": 1},
            "has 'math', no source of train_dataset; there are 'maths', 'code'; nearest name: 'maths'",
        ),
        (MIXTURE, {"maths": 2}, "dataset_weights has 'maths' and lacks 'code'; give each source of train"),
        (MIXTURE, {}, "dataset_weights has no entry and lacks 'maths', 'code'; give"),
        (MIXTURE["code"], {"code": 1}, "dataset_weights by source needs datasets by name"),
        ({**MIXTURE, "chat": []}, None, r"train_dataset\['chat'\] is empty"),
        ({**MIXTURE, "chat": [{"text": "w1"}]}, None, r"train_dataset\['chat'\] has no 'prompt' column"),
        ({"chat": [{"prompt": "w1", "source": "x"}]}, None, r"\['chat'\] has a column 'source'"),
        ({"chat": Lazy()}, None, r"\['chat'\] is a Lazy whose rows are computed on access"),
    ],
)
def test_sources_that_cannot_be_mixed_are_named(tmp_path, dataset, weights, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, train_dataset=dataset, dataset_weights=weights)


def test_splits_and_columns_are_no_mixture(tmp_path):
    with pytest.raises(ConfigError, match="is a DatasetDict of 'train'; pass one"):
        trainer(tmp_path, train_dataset=DatasetDict(train=Dataset.from_list(MIXTURE["maths"])))
    with pytest.raises(ConfigError, match="is a dict of columns"):
        trainer(tmp_path, train_dataset={"prompt": ["w1", "w2"]})


def solved(completion_ids, answer, **_):
    return count_reward(completion_ids)


def passed(completion_ids, tests, **_):
    return count_reward(completion_ids)


def of(source, **columns):
    return [{"prompt": "w1", "source": source, **columns}] * 4


@pytest.mark.parametrize(
    ("evaluated", "message"),
    [
        (rows("answer", 4), r"eval_dataset has no column 'source', .*there are 'prompt', 'answer'; nearest"),
        (
            {"held": rows("sorce", 4)},
            r"eval_dataset\['held'\] has no column 'source'.* nearest name: 'sorce'",
        ),
        (Dataset.from_list(rows("answer", 4)).to_iterable_dataset(), "eval_dataset has no column 'source'"),
        (
            of("code", tests=1) + of("math", tests=1),
            "eval_dataset has rows of the source 'math', which has no reward; there are 'code', 'maths'; "
            "nearest name: 'maths'",
        ),
        (Dataset.from_list(of("maths", answer=1) + of(None)), "has rows of the source None"),
        (
            of("code", tests=1) + of("maths", answr=1),
            r"'solved' requires 'answer', which is no column of eval_dataset \(source 'maths'\): 'prompt', "
            "'source', 'tests', 'answr'; nearest: 'answr'",
        ),
        ({"maths": rows("tests", 4)}, r"'solved' requires 'answer', .*eval_dataset\['maths'\] \(source"),
    ],
)
def test_an_evaluation_set_that_rewards_by_source_cannot_score_is_named(tmp_path, evaluated, message):
    with pytest.raises(ConfigError, match=message):
        trainer(
            tmp_path,
            {"maths": [solved], "code": [passed]},
            train_dataset=MIXTURE,
            eval_dataset=evaluated,
            kind=NeverLoads,
        )


def test_rewards_by_source_read_the_source_of_the_dataset_with_a_rollout_func_too(tmp_path):
    with pytest.raises(ConfigError, match="eval_dataset has no column 'source'"):
        trainer(
            tmp_path,
            {"maths": [solved], "code": [passed]},
            train_dataset=MIXTURE,
            eval_dataset=rows("answer", 4),
            rollout_func=lambda prompts, trainer: {"source": ["maths"] * len(prompts)},
            kind=NeverLoads,
        )


class NeverLoads(GRPOTrainer):
    """A trainer whose checks have to end the construction."""

    def __init__(self, model, *args, **kwargs):
        super().__init__("no/such-model", *args, **kwargs)


def test_rewards_by_source_need_the_columns_of_their_rows_alone(tmp_path):
    """A set of one source lacks the columns of the others; rows that no evaluation reads may be of any."""
    made = trainer(
        tmp_path,
        {"maths": [solved, count_reward], "code": [passed, count_reward]},
        train_dataset=MIXTURE,
        eval_dataset=DatasetDict(
            maths=Dataset.from_list(rows("answer", 2)),
            held=Dataset.from_list(of("code", tests=1)[:2] + of("math", tests=1)),
        ),
        eval_max_samples=2,
        per_device_eval_batch_size=8,
        eval_pass_at_k=[1],
    )
    found = made.evaluate()
    assert {"eval_maths_pass@1/maths", "eval_held_pass@1/code"} <= found.keys()
    assert found["eval_held_rewards/passed/mean"] == found["eval_held_rewards/count_reward/mean"]
    assert "eval_held_rewards/solved/mean" not in found


@pytest.mark.parametrize("weight", [0, -1, float("inf"), "2", True, None])
def test_a_weight_is_a_number_above_0(weight):
    with pytest.raises(ConfigError, match=r"dataset_weights\['code'\]=.*allowed: finite numbers > 0"):
        GRPOConfig("unused", use_cpu=True, dataset_weights={"code": weight})


@pytest.mark.slow
def test_a_resumed_run_continues_the_mixture(tmp_path):
    """Prompts and rewards see the rows of one process, in an order that a resumed run continues."""

    def run(steps, resume=None, **given):
        seen = []

        def reward(completion_ids, source, answer, tests, **_):
            seen.append([*zip(source, answer, tests, strict=True)][::4])
            return [float(len(ids) + sum(ids) % 3) for ids in completion_ids]

        made = trainer(
            tmp_path / given.pop("name"), reward, train_dataset=MIXTURE, max_steps=steps, seed=5,
            dataset_weights={"maths": 1, "code": 2}, per_device_train_batch_size=8,
            lr_scheduler_type="constant", **given,
        )  # fmt: skip
        made.train(resume_from_checkpoint=resume)
        return seen, made.model.state_dict()

    seen, weights = run(3, name="one")
    before, _ = run(2, name="two", save_strategy="steps", save_steps=2)
    after, again = run(3, name="two", resume=str(tmp_path / "two" / "checkpoint-2"))
    assert before + after == seen and all(weights[name].equal(again[name]) for name in weights)
    for source, answer, tests in chain(*seen):
        assert (answer is None, tests is None) == (source == "code", source == "maths")
