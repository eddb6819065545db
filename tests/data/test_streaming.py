"""Streams as training and evaluation data: the same run as on the same rows at hand.

Files: ``data/evaluation.py``.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from support.configs import config_of
from support.resume_runs import make_trainer
from support.resume_runs import prompts as lettered
from support.runs import WORDS, chats, policy, prompts, tokenizer, trainer

from groupwise import ConfigError
from groupwise.data.prompt_source import RankSlice
from groupwise.data.sources import StreamPrompts

_TIMING = re.compile(
    r"(eval_)?(time|memory)/.*|step_time|.*_runtime|.*_per_second|.*preparation_time|train_loss|epoch"
)


def weights(run):
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


def history(run):
    """Without what counts seconds, and without the epoch, which of a stream is the share of the run."""
    return [{k: v for k, v in line.items() if not _TIMING.fullmatch(k)} for line in run.state.log_history]


@pytest.fixture(autouse=True)
def no_pause_at_the_end_of_a_stream(monkeypatch):
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


def trained(directory, **given):
    run = trainer(directory, **given)
    run.train()
    return run


def assert_same_run(one, other):
    assert torch.equal(weights(one), weights(other))
    assert history(one) == history(other)


def stream(dataset: Dataset) -> IterableDataset:
    return dataset.to_iterable_dataset(num_shards=2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_stream_trains_as_a_dataset_of_the_same_rows(tmp_path, workers):
    common = {"max_steps": 5, "shuffle_dataset": False, "num_iterations": 2, "steps_per_generation": 2}
    assert_same_run(
        trained(tmp_path / "a", train_dataset=prompts(6), **common),
        trained(tmp_path / "b", train_dataset=stream(prompts(6)), dataloader_num_workers=workers, **common),
    )


@pytest.mark.slow
def test_a_stream_is_shuffled_by_its_own_buffer(tmp_path):
    # 6 rows: one pass is as many steps.
    shuffled = stream(prompts(6)).shuffle(seed=7)
    rows = list(shuffled)
    assert [row["row"] for row in rows] != list(range(6))
    common = {"max_steps": 6, "data_seed": 7}
    assert_same_run(
        trained(tmp_path / "a", train_dataset=stream(prompts(6)), **common),
        trained(tmp_path / "b", train_dataset=Dataset.from_list(rows), shuffle_dataset=False, **common),
    )


def test_every_epoch_of_a_stream_has_a_different_order():
    def passes(workers):
        config = config_of(seed=0, dataloader_num_workers=workers)
        source = StreamPrompts(stream(prompts(8)), RankSlice(1), lambda row, index: None, config)
        numbers = [row["row"] for row in source.take(24)]
        return [numbers[start : start + 8] for start in (0, 8, 16)]

    first, second, third = passes(0)
    assert sorted(first) == sorted(second) == sorted(third) == list(range(8))
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert passes(2) == [first, second, third]


class Counting(torch.utils.data.IterableDataset):
    """A stream without methods of its own."""

    def __iter__(self):
        return iter({"prompt": WORDS[i % 28], "row": i} for i in itertools.count())


def test_rows_of_a_stream_are_checked_with_their_numbers():
    seen = []
    source = StreamPrompts(
        Counting(),
        RankSlice(1),
        lambda row, index: seen.append((row["row"], index)),
        config_of(shuffle_dataset=False),
    )
    source.take(3)
    assert seen == [(0, 0), (1, 1), (2, 2)]


def test_an_endless_stream_of_any_kind_is_trained_on(tmp_path, caplog):
    seen: list[int] = []

    def reward(row, completions, **_: Any):
        seen.extend(row[::4])
        return [float(len(text)) for text in completions]

    trainer(tmp_path, reward, train_dataset=Counting(), max_steps=3).train()
    assert seen == [0, 1, 2]
    assert "a Counting has no shuffle()" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"dataloader_num_workers": 1}, {"dynamic_sampling": True}], ids=str)
def test_a_streamed_run_resumes(tmp_path, given):
    # 5 rows and 2 for each of 6 steps: the third step begins the second pass, shuffled anew.
    def build(directory, **changes):
        settings = {"train_dataset": stream(lettered(5)), **given, **changes}
        return make_trainer(directory, **settings)

    whole = build(tmp_path / "whole")
    whole.train()
    for step in (1, 3):
        resumed = build(tmp_path / f"from-{step}", save_strategy="no")
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert torch.equal(weights(resumed), weights(whole))
        assert history(resumed) == history(whole)


class Recorded(torch.utils.data.IterableDataset):
    """A stream that remembers the rows that were read from it."""

    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __iter__(self):
        for row in self.rows:
            self.read.append(row["row"])
            yield row


def metrics_without_time(metrics):
    return {name: value for name, value in metrics.items() if not _TIMING.fullmatch(name)}


# 3 prompts, 2 completions each, in batches of 4: the last one has 2. Greedy: a dataloader draws a seed.
EVALUATION = {
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 4,
    "eval_generation_kwargs": {"temperature": 0.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_of_a_stream_is_that_of_the_same_rows_at_hand(tmp_path, workers):
    expected = trainer(tmp_path / "a", eval_dataset=prompts(3), **EVALUATION).evaluate()
    given = stream(prompts(3))
    run = trainer(tmp_path / "b", eval_dataset=given, dataloader_num_workers=workers, **EVALUATION)
    assert run.eval_dataset is given
    found = run.evaluate()
    assert metrics_without_time(found) == metrics_without_time(expected)
    assert found["eval_samples_per_second"] * found["eval_runtime"] == pytest.approx(6, rel=0.01)
    assert run.evaluate(eval_dataset=stream(chats(2)))["eval_reward"] >= 0


def test_an_evaluation_reads_a_stream_batch_by_batch_and_again_each_time(tmp_path):
    recorded, seen = Recorded(list(prompts(5))), []

    def reward(row, **_):
        seen.append((list(row), list(recorded.read)))
        return [0.0] * len(row)

    run = trainer(tmp_path, reward, eval_dataset=recorded, **EVALUATION)
    assert recorded.read == []  # nothing is read before it is evaluated
    run.evaluate()
    assert seen == [
        ([0, 0, 1, 1], [0, 1]),
        ([2, 2, 3, 3], [0, 1, 2, 3]),
        ([4, 4], [0, 1, 2, 3, 4]),
    ]
    run.evaluate()
    assert recorded.read == [0, 1, 2, 3, 4] * 2


@pytest.mark.parametrize("limit", [2, 3, 4])
def test_an_evaluation_ends_after_the_most_rows(tmp_path, limit):
    given = {**EVALUATION, "eval_max_samples": limit}
    expected = trainer(tmp_path / "a", eval_dataset=prompts(limit), **EVALUATION).evaluate()
    recorded = Recorded(itertools.chain(list(prompts(limit)), itertools.repeat({"prompt": "", "row": -1})))
    for name, dataset in {"set": prompts(6), "stream": recorded}.items():
        found = trainer(tmp_path / name, eval_dataset=dataset, **given).evaluate()
        assert metrics_without_time(found) == metrics_without_time(expected)
    assert recorded.read == list(range(limit))


def test_prompts_beyond_the_most_rows_are_not_checked(tmp_path):
    rows = [*prompts(2), {"prompt": "", "row": 2}]
    run = trainer(tmp_path, eval_dataset=rows, eval_max_samples=2, **EVALUATION)
    assert run.evaluate()["eval_reward"] >= 0
    with pytest.raises(ConfigError, match="eval_dataset, row 2: the prompt is empty"):
        trainer(tmp_path, eval_dataset=rows, **EVALUATION)


def test_a_long_evaluation_of_a_stream_names_the_limit(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("groupwise.data.evaluation._MANY_ROWS", 3)
    trainer(tmp_path / "a", eval_dataset=stream(prompts(5)), eval_max_samples=5, **EVALUATION).evaluate()
    assert "eval_max_samples" not in caplog.text
    trainer(tmp_path / "b", eval_dataset=stream(prompts(5)), **EVALUATION).evaluate()
    assert caplog.text.count("eval_dataset has given 3 rows and is read to its end; eval_max_samples") == 1


def test_an_evaluation_of_a_stream_that_can_be_read_once(tmp_path):
    once = iter(list(prompts(3)))
    run = trainer(tmp_path, eval_dataset={"far": once}, **EVALUATION)
    run.evaluate()
    with pytest.raises(ConfigError, match=r"eval_dataset\['far'\] gave no rows; .*iterated again"):
        run.evaluate()


def test_an_evaluation_of_which_every_row_is_dropped_is_refused(tmp_path):
    given = {**EVALUATION, "per_device_eval_batch_size": 8, "dataloader_drop_last": True}  # 4 rows of 2
    expected = trainer(tmp_path / "a", eval_dataset=prompts(4), **given).evaluate()
    for name, dataset in {"set": prompts(7), "stream": stream(prompts(7))}.items():
        run = trainer(tmp_path / name, eval_dataset=dataset, **given)
        assert metrics_without_time(run.evaluate()) == metrics_without_time(expected)
        with pytest.raises(ConfigError, match=r"has 3 rows, less than an evaluation batch of 4, which"):
            run.evaluate(prompts(3))
    run = trainer(tmp_path, eval_dataset=stream(prompts(3)), **given)
    with pytest.raises(ConfigError, match="no rows but less than 4, which dataloader_drop_last=True drops"):
        run.evaluate()
    with pytest.raises(ConfigError, match="eval_dataset has 3 rows"):  # not after the first steps
        trainer(tmp_path, eval_dataset=prompts(3), eval_strategy="steps", eval_steps=1, **given)


def test_several_evaluation_sets_some_of_them_streams(tmp_path):
    run = trainer(
        tmp_path,
        eval_dataset={"near": prompts(2), "far": stream(chats(3))},
        num_generations_eval=1,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=1,
    )
    run.train()
    logged = {name for line in run.state.log_history for name in line}
    assert {"eval_near_reward", "eval_far_reward"} <= logged


# Rows that cannot be trained on.


def with_prompt(prompt, at=2):
    rows = list(prompts(6))
    rows[at] = {**rows[at], "prompt": prompt}
    return rows


LONG = " ".join(WORDS)

BAD = [
    ("", r"row 2: the prompt is empty; remove the row"),
    ([], r"row 2: the prompt is empty"),
    (None, r"row 2: the prompt is None \(NoneType\); allowed: a string, or a list of messages"),
    ([{"content": "w1"}], r"row 2: the prompt is \[\{'content': 'w1'\}\] \(list\)"),
    (
        LONG,
        r"row 2: the prompt has 28 tokens, but a context of 32 \(max_position_embeddings\) leaves "
        r"26 beside max_completion_length=6; .*set max_prompt_length=26",
    ),
    ([{"role": "user", "content": LONG}], r"row 2: the prompt has 30 tokens"),  # <user> and <assistant>
]


@pytest.mark.parametrize(("prompt", "message"), BAD, ids=lambda value: str(value)[:30])
def test_a_bad_row_is_found_before_the_weights_are_read(tmp_path, prompt, message):
    model = policy(max_position_embeddings=32)
    model.config.save_pretrained(tmp_path)  # and no weights
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="train_dataset, " + message):
        trainer(tmp_path, model=str(tmp_path), train_dataset=with_prompt(prompt))
    with pytest.raises(ConfigError, match=r"eval_dataset\['far'\], " + message):
        trainer(tmp_path, model=str(tmp_path), eval_dataset={"near": prompts(2), "far": with_prompt(prompt)})


@pytest.mark.parametrize(("prompt", "message"), BAD, ids=lambda value: str(value)[:30])
def test_a_bad_row_of_a_stream_is_found_when_it_is_read(tmp_path, prompt, message):
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(with_prompt(prompt))

    model = policy(max_position_embeddings=32)
    run = trainer(tmp_path, model=model, train_dataset=Rows(), max_steps=3)
    with pytest.raises(ConfigError, match="train_dataset, " + message):
        run.train()
    assert run.state.global_step == 2
    run = trainer(tmp_path, model=model, eval_dataset={"far": Rows()}, num_generations_eval=4)
    with pytest.raises(ConfigError, match=r"eval_dataset\['far'\], " + message):
        run.evaluate()


def test_an_invalid_row_computed_on_access_is_named(tmp_path):
    class Made(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return with_prompt("")[index]

    run = trainer(tmp_path, train_dataset=Made(), max_steps=6)
    with pytest.raises(ConfigError, match="train_dataset, row 2: the prompt is empty"):
        run.train()


def test_a_stream_without_prompts_is_refused(tmp_path):
    answers = Dataset.from_dict({"question": ["w1"]})
    with pytest.raises(ConfigError, match="train_dataset has no 'prompt' column; its columns are 'question'"):
        trainer(tmp_path, train_dataset=stream(answers.repeat(2)))
    nameless = IterableDataset.from_generator(lambda: iter([{"question": "w1"}]))
    with pytest.raises(
        ConfigError, match="train_dataset, row 0: no 'prompt' column; its columns are 'question'"
    ):
        trainer(tmp_path, train_dataset=nameless, max_steps=1).train()


def test_a_stream_needs_a_number_of_steps(tmp_path):
    with pytest.raises(ConfigError, match="whose length is not known, and max_steps=-1; set max_steps"):
        trainer(tmp_path, train_dataset=Counting(), max_steps=-1)


def test_max_prompt_length_applies_before_the_length_check(tmp_path):
    model = policy(max_position_embeddings=32)
    trainer(tmp_path, model=model, train_dataset=with_prompt(LONG), max_prompt_length=26)
    with pytest.raises(ConfigError, match="row 2: the prompt has 27 tokens"):
        trainer(tmp_path, model=model, train_dataset=with_prompt(LONG), max_prompt_length=27)


def test_a_completion_that_fills_the_context_leaves_no_room(tmp_path):
    with pytest.raises(ConfigError, match=r"row 0: .*leaves 0 beside max_completion_length=200"):
        trainer(tmp_path, max_completion_length=200)
