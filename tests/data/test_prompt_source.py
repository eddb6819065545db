"""Order of the prompts, share of each rank, mark and rollback, and the loaders and samplers of subclasses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runs import prompts, trainer
from torch.utils.data import DataLoader, Sampler

from groupwise import ConfigError, GRPOTrainer
from groupwise.data.prompt_source import DatasetPrompts, LoaderPrompts, PromptSource, RankShare
from groupwise.data.sampler import GroupSampler

ONE = RankShare(num_generations=1)


def letters(epoch):
    return [f"{epoch}{letter}" for letter in "abc"]


def test_epochs_follow_each_other():
    source = PromptSource(letters, ONE)
    assert source.take(2) == ["0a", "0b"]
    assert source.take(3) == ["0c", "1a", "1b"]
    assert source.take(5) == ["1c", "2a", "2b", "2c", "3a"]
    source.mark()
    assert source.state_dict() == {"epoch": 3, "index": 1}


def test_every_completion_has_a_row_of_its_own():
    source = PromptSource(lambda epoch: [{"items": [1, 2], "more": {"a": [3]}}], RankShare(num_generations=2))
    for row in source.take(1):
        assert row == {"items": [1, 2], "more": {"a": [3]}}
        row["items"].clear()
        row["more"]["a"].clear()
        row["new"] = True
    source.rollback()
    assert source.take(1) == [{"items": [1, 2], "more": {"a": [3]}}] * 2


def test_a_source_continues_from_every_state():
    def read(epoch):
        return [(epoch, place) for place in range(4)]

    whole = PromptSource(read, ONE).take(11)
    for taken in range(11):
        first, second = PromptSource(read, ONE), PromptSource(read, ONE)
        if taken:
            first.take(taken)
        first.mark()
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
        assert second.take(11 - taken) == whole[taken:]
        second.mark()
        assert second.state_dict() == {"epoch": 2, "index": 3}


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "mark", "rollback", "upcoming"]), st.integers(1, 5)), max_size=12
    )
)
def test_a_rollback_returns_every_prompt_since_the_mark(actions):
    source = PromptSource(letters, ONE)
    expected, position, mark = [p for epoch in range(40) for p in letters(epoch)], 0, 0
    for action, count in actions:
        if action == "take":
            assert source.take(count) == expected[position : position + count]
            position += count
        elif action == "mark":
            source.mark()
            mark = position
        elif action == "rollback":
            source.rollback()
            position = mark
        else:  # batches of two prompts, after the next one
            later = list(source.upcoming(count, 2))
            start = position + 2
            assert later == [expected[start + 2 * i : start + 2 * i + 2] for i in range(count)]
        assert source.state_dict()["epoch"] * 3 + source.state_dict()["index"] == mark


def test_another_epoch_starts_at_its_first_prompt():
    source = PromptSource(letters, ONE)
    source.take(2)
    assert list(source.upcoming(1, 1)) == [["1a"]]  # after the next one, "0c"
    source.seek(3)
    assert source.state_dict() == {"epoch": 3, "index": 0}
    source.rollback()  # prompts of the other epoch do not come back
    assert source.take(2) == ["3a", "3b"]


def test_a_mark_after_a_rollback_is_the_same_mark():
    source = PromptSource(letters, ONE)
    source.take(2)
    source.rollback()
    source.mark()
    assert source.state_dict() == {"epoch": 0, "index": 0}


def test_a_source_without_prompts_is_an_error():
    with pytest.raises(ConfigError, match="train_dataset gave no rows in epoch 1;"):
        PromptSource(lambda epoch: [], ONE).take(1)
    once = iter(range(3))
    with pytest.raises(ConfigError, match="no rows in epoch 2: it can be read only once"):
        PromptSource(lambda epoch: once, ONE).take(4)
    with pytest.raises(ConfigError, match="after row 5 of train_dataset, which now has only 3"):
        PromptSource(lambda epoch: range(3), ONE).load_state_dict({"epoch": 0, "index": 5})


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_share_the_completions_of_the_prompts(world_size):
    rows = [{"n": 0}, {"n": 1}, {"n": 2}]
    parts = [
        PromptSource(lambda epoch: rows, RankShare(4, rank, world_size)).take(3) for rank in range(world_size)
    ]
    assert {len(part) for part in parts} == {12 // world_size}
    assert [row["n"] for part in parts for row in part] == [0] * 4 + [1] * 4 + [2] * 4


class Rows:
    """Rows by index, which notes what is read."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        return {"prompt": str(index), "row": index}


def dataset_prompts(rows, rank=0, world_size=1, sampler=None, **given):
    settings = {"prompts_per_batch": 3, "repeats": 4, **given}
    if sampler is None:
        sampler = GroupSampler(rows, num_generations=2, prompts_per_batch=3, repeats=4, shuffle=True, seed=5)
    return DatasetPrompts(rows, sampler, RankShare(2, rank, world_size), **settings)


def test_the_first_repeat_of_a_sampler_counts_and_the_order_is_that_of_its_indices():
    class AnyOrder(Sampler):
        """The same indices from a class that is not known."""

        def __init__(self, inner):
            self.inner = inner

        def set_epoch(self, epoch):
            self.inner.set_epoch(epoch)

        def __iter__(self):
            return iter(self.inner)

        def __len__(self):
            return len(self.inner)

    rows = Rows(11)  # 3 batches of 3 prompts; 2 prompts are dropped
    sampler = GroupSampler(rows, num_generations=2, prompts_per_batch=3, repeats=4, shuffle=True, seed=5)
    taken = [row["row"] for row in dataset_prompts(rows).take(18)]
    assert [row["row"] for row in dataset_prompts(rows, sampler=AnyOrder(sampler)).take(18)] == taken
    expected = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        indices = list(sampler)
        expected += [index for start in range(0, len(indices), 24) for index in indices[start : start + 6]]
    assert taken == expected


class Drawing(Sampler):
    """Indices of batches of 3 prompts, 2 generations and 4 repeats; each epoch draws from one generator."""

    def __init__(self, count):
        self.count, self.generator = count, torch.Generator().manual_seed(3)

    def __iter__(self):
        order = torch.randperm(self.count, generator=self.generator).tolist()
        for start in range(0, self.count, 3):
            for _ in range(4):
                yield from [index for index in order[start : start + 3] for _ in range(2)]


def test_a_sampler_without_epochs_is_drawn_from_once_per_epoch():
    def source(**given):
        return dataset_prompts(Rows(8), sampler=Drawing(8), **given)

    whole = source()
    epochs = [[row["row"] for row in whole.take(6)[::2]] for _ in range(3)]  # 2 of 8 prompts are dropped
    assert len({tuple(epoch) for epoch in epochs}) == 3
    resumed = source()
    resumed.load_state_dict({"epoch": 2, "index": 4})
    assert [row["row"] for row in resumed.take(2)[::2]] == epochs[2][4:]
    assert sorted(row["row"] for row in source(drop_last=False).take(8)[::2]) == list(range(8))


def test_a_loader_is_made_once_and_the_first_repeat_of_an_item_counts():
    epochs = []

    class Loader(list):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    source = LoaderPrompts(lambda: Loader([["a"], ["a2"], ["b"], ["b2"], ["c"], ["c2"]]), ONE, repeats=2)
    assert [source.take(5) for _ in range(4)] == [["a"], ["b"], ["c"], ["a"]]
    assert list(source.upcoming(2, 5)) == [["c"], ["a"]]  # after the next one, "b"
    assert epochs == [0, 1, 2]
    made = [Loader([["first"]]), Loader([["second"]])]
    source = LoaderPrompts(lambda: made.pop(0), ONE, repeats=1)
    assert [source.take(1) for _ in range(2)] == [["first"]] * 2


def test_a_rank_reads_only_the_rows_of_its_completions():
    rows = Rows(9)
    source = dataset_prompts(rows, rank=1, world_size=3)  # prompt 1 of each batch of three
    taken = source.take(3)
    assert rows.read == [taken[0]["row"]] and taken[0] == taken[1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_workers_read_the_same_rows(world_size):
    for rank in range(world_size):
        plain, workers = (
            dataset_prompts(Rows(11), rank, world_size, num_workers=number) for number in (0, 1)
        )
        for _ in range(4):  # more than an epoch
            assert workers.take(3) == plain.take(3)
        workers.rollback()
        plain.rollback()
        assert workers.take(3) == plain.take(3)


@pytest.mark.parametrize("own_sampler", [False, True])
def test_workers_start_once_per_epoch_after_a_rollback(own_sampler, monkeypatch):
    """The same index is in every epoch: an epoch that is read again goes on in its own order."""
    starts, start = [], DatasetPrompts._loader_from
    monkeypatch.setattr(DatasetPrompts, "_loader_from", lambda *given: starts.append(1) or start(*given))
    plain, workers = (
        dataset_prompts(Rows(9), sampler=Drawing(9) if own_sampler else None, num_workers=number)
        for number in (0, 1)
    )
    for source in (plain, workers):
        source.take(3)
        source.mark()  # inside the first epoch, which has 9 prompts
    before = workers.take(6) + workers.take(6)
    assert before == plain.take(6) + plain.take(6)
    assert len(starts) == 2
    workers.rollback()
    assert workers.take(6) + workers.take(6) == before
    assert len(starts) == 2  # the rows since the mark were kept
    workers.mark()
    assert workers.take(6) == plain.take(6) and len(starts) == 3  # the third epoch
    assert list(workers._order) == [1, 2]  # orders before the mark are dropped
    assert min(workers._rows_read) == (1, 6)  # and so are rows


@pytest.mark.parametrize("world_size", [1, 3])
def test_workers_start_once_per_epoch_when_later_batches_are_looked_at(world_size, monkeypatch):
    """A server that generates ahead is sent the rows of later batches before the next batch is taken."""
    starts, start = [], DatasetPrompts._loader_from
    monkeypatch.setattr(DatasetPrompts, "_loader_from", lambda *given: starts.append(1) or start(*given))
    for rank in range(world_size):
        plain, workers = (dataset_prompts(Rows(9), rank, world_size, num_workers=number) for number in (0, 1))
        for _ in range(5):  # a batch is 3 prompts, an epoch 3 batches
            assert list(workers.upcoming(2, 3)) == list(plain.upcoming(2, 3))
            assert workers.take(3) == plain.take(3)
            workers.mark()
    assert len(starts) == 3 * world_size  # the fifth batch looks into the third epoch


def test_dynamic_sampling_drops_no_prompt():
    taken = [row["row"] for row in dataset_prompts(Rows(11), drop_last=False).take(11)][::2]
    assert sorted(taken) == list(range(11))


def test_a_sampler_without_groups_is_refused():
    with pytest.raises(ConfigError, match="does not yield groups"):
        dataset_prompts(Rows(24), sampler=torch.utils.data.RandomSampler(range(24))).take(3)


def test_a_sampler_of_a_subclass_decides_the_order(tmp_path):
    seen = []

    def reward(row, completion_ids, **_):
        seen.append(row[::4])
        return [float(len(ids)) for ids in completion_ids]

    class Backwards(GRPOTrainer):
        def _get_train_sampler(self, train_dataset=None):
            sampler = super()._get_train_sampler(train_dataset)
            sampler.prompt_order = lambda: list(range(len(self.train_dataset)))[::-1]
            return sampler

    trainer(tmp_path, reward, kind=Backwards, max_steps=3).train()
    assert seen == [[7], [6], [5]]


@pytest.mark.parametrize("iterations", [1, 2])
def test_prompts_come_from_the_loader_of_a_subclass(tmp_path, iterations):
    seen = []

    def reward(row, completion_ids, **_):
        seen.append(row)
        return [float(i) for i in range(len(completion_ids))]

    class OwnLoader(GRPOTrainer):
        def get_train_dataloader(self):
            # Items are repeated once per micro-batch that is trained on them, as TRL's are.
            rows = [self.train_dataset[i] for i in (5, 2) for _ in range(4 * iterations)]
            return DataLoader(rows, batch_size=4, collate_fn=list)

    settings = {"num_iterations": iterations, "max_steps": -1, "num_train_epochs": 2}
    run = trainer(tmp_path, reward, kind=OwnLoader, **settings)
    run.train()
    assert seen == [[5] * 4, [2] * 4] * 2
    assert run.state.global_step == 4 * iterations


def test_a_loader_of_a_subclass_cannot_sample_dynamically(tmp_path):
    class OwnLoader(GRPOTrainer):
        def get_train_dataloader(self):
            return DataLoader([self.train_dataset[0]] * 4, batch_size=4, collate_fn=list)

    with pytest.raises(ConfigError, match="override _get_train_sampler instead"):
        trainer(tmp_path, kind=OwnLoader, dynamic_sampling=True)


def test_a_failed_step_loses_no_prompt(tmp_path):
    """The reward fails in the second step: its prompt is the next one to be trained on."""
    seen, fail = [], [False, True, False, False]

    def reward(row, completion_ids, **_):
        if fail.pop(0):
            raise ValueError("planted")
        seen.append(row[0])
        return [float(len(ids)) for ids in completion_ids]

    run = trainer(tmp_path, reward, max_steps=2, shuffle_dataset=False)
    with pytest.raises(Exception, match="planted"):
        run.train()
    assert (run.prompts.epoch, run.prompts.index) == (0, 1)
    assert [row["row"] for row in run.prompts.take(1)] == [1] * 4


def test_prompts_are_read_from_a_plain_loader_of_positions(tmp_path):
    run = trainer(tmp_path, train_dataset=prompts(6), num_iterations=2)
    loader = run.get_train_dataloader()
    assert len(loader) == 12 and run.num_examples(loader) == 6
    state = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), state)  # counting draws nothing
