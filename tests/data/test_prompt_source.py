"""Order of the prompts, share of each rank, mark and rollback, and the loaders and samplers of subclasses.

Files: ``data/sampler.py``, ``data/loaders.py``.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.configs import config_of
from support.runs import prompts, trainer
from torch.utils.data import DataLoader, RandomSampler, Sampler

from groupwise import ConfigError, GRPOTrainer
from groupwise.data.loaders import GenerationBatches
from groupwise.data.prompt_source import DatasetPrompts, PromptSource, RankSlice
from groupwise.data.sampler import FirstRepeats, GroupSampler, PromptSampler
from groupwise.data.sources import LoaderPrompts
from groupwise.trl_hooks.state import InputsBuffer

ONE = RankSlice(num_generations=1)


def letters(epoch):
    return [f"{epoch}{letter}" for letter in "abc"]


def test_epochs_follow_each_other():
    source = PromptSource(letters, ONE)
    assert source.take(2) == ["0a", "0b"]
    assert source.take(3) == ["0c", "1a", "1b"]
    assert source.take(5) == ["1c", "2a", "2b", "2c", "3a"]
    assert source.snapshot() == {"epoch": 3, "index": 1}


def made_row():
    return {"items": [1, 2], "more": {"a": [3]}}


@pytest.mark.parametrize(
    "source",
    [
        PromptSource(lambda epoch: [made_row()], RankSlice(num_generations=2)),
        LoaderPrompts(lambda: [[made_row()] * 2], ONE, repeats=1),
    ],
    ids=["prompts", "loader"],
)
def test_every_completion_has_a_row_of_its_own(source):
    start = source.snapshot()
    for row in source.take(1):
        assert row == made_row()
        row["items"].clear()
        row["more"]["a"].clear()
        row["new"] = True
    source.restore(start)
    assert source.take(1) == [made_row()] * 2


def test_a_source_continues_from_every_state():
    def read(epoch):
        return [(epoch, place) for place in range(4)]

    whole = PromptSource(read, ONE).take(11)
    for taken in range(11):
        first, second = PromptSource(read, ONE), PromptSource(read, ONE)
        if taken:
            first.take(taken)
        second.restore(first.snapshot())
        assert second.snapshot() == first.snapshot()
        assert second.take(11 - taken) == whole[taken:]
        assert second.snapshot() == {"epoch": 2, "index": 3}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "snapshot", "restore", "restore the first", "upcoming"]),
            st.integers(1, 5),
        ),
        max_size=12,
    )
)
def test_a_source_returns_to_its_snapshots(actions):
    source = PromptSource(letters, ONE)
    expected, position = [p for epoch in range(40) for p in letters(epoch)], 0
    snapshots = [(source.snapshot(), position)]
    for action, count in actions:
        if action == "take":
            assert source.take(count) == expected[position : position + count]
            position += count
        elif action == "snapshot":
            snapshots.append((source.snapshot(), position))
        elif action.startswith("restore"):
            snapshot, position = snapshots[-1 if action == "restore" else 0]
            source.restore(snapshot)
        else:  # batches of two prompts, after the next one
            later = list(source.upcoming(count, 2))
            start = position + 2
            assert later == [expected[start + 2 * i : start + 2 * i + 2] for i in range(count)]
        assert source.epoch * 3 + source.index == position


def test_another_epoch_starts_at_its_first_prompt():
    source = PromptSource(letters, ONE)
    source.take(2)
    assert list(source.upcoming(1, 1)) == [["1a"]]  # after the next one, "0c"
    source.seek(3)
    assert source.take(2) == ["3a", "3b"]
    source.restore({"epoch": 3, "index": 0})  # prompts of the other epoch do not come back
    assert source.take(2) == ["3a", "3b"]


def test_a_source_without_prompts_is_an_error():
    with pytest.raises(ConfigError, match="train_dataset gave no rows in epoch 1;"):
        PromptSource(lambda epoch: [], ONE).take(1)
    once = iter(range(3))
    with pytest.raises(ConfigError, match="no rows in epoch 2: it can be read only once"):
        PromptSource(lambda epoch: once, ONE).take(4)
    with pytest.raises(ConfigError, match="after row 5 of train_dataset, which now has only 3"):
        PromptSource(lambda epoch: range(3), ONE).restore({"epoch": 0, "index": 5})


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_share_the_completions_of_the_prompts(world_size):
    rows = [{"n": 0}, {"n": 1}, {"n": 2}]
    parts = [
        PromptSource(lambda epoch: rows, RankSlice(4, rank, world_size)).take(3) for rank in range(world_size)
    ]
    assert {len(part) for part in parts} == {12 // world_size}
    assert [row["n"] for part in parts for row in part] == [0] * 4 + [1] * 4 + [2] * 4


class Rows:
    """Rows by index, which notes what is read in this process, and fails for some."""

    def __init__(self, count, unreadable=()):
        self.count, self.unreadable, self.read = count, unreadable, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        assert index not in self.unreadable
        self.read.append(index)
        return {"prompt": str(index), "row": index}


def dataset_prompts(rows, rank=0, world_size=1, make_sampler=None, **given):
    config = batches(**given)
    make = (lambda: repeated(make_sampler(), config)) if make_sampler else lambda: prompt_sampler(rows)
    return DatasetPrompts(rows, make, RankSlice(2, rank, world_size), config)


def repeated(sampler, config):
    return FirstRepeats(sampler, config, drop_last=not config.dynamic_sampling)


def batches(**given):
    """Settings of generation batches of 3 prompts, 2 generations and 4 micro-batches."""
    sizes = {"generation_batch_size": 6, "steps_per_generation": 2, "num_iterations": 2}
    return config_of(num_generations=2, seed=5, **sizes, **given)


def prompt_sampler(rows):
    return PromptSampler(rows, batches())


def group_sampler(rows, **given):
    return GroupSampler(prompt_sampler(rows), batches(**given))


class Rotating(Sampler):
    """Batches of 3 prompts, 2 generations and 4 repeats; every epoch starts one prompt later."""

    def __init__(self, count):
        self.count, self.epoch = count, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count * 8

    def __iter__(self):
        self.read_epoch()
        order = [(index + self.epoch) % self.count for index in range(self.count)]
        for start in range(0, self.count, 3):
            self.read_batch()
            for _ in range(4):
                yield from [index for index in order[start : start + 3] for _ in range(2)]

    def read_epoch(self):
        """Called with the first index of an epoch."""

    def read_batch(self):
        """Called with the first index of a generation batch."""


def test_the_first_repeat_of_a_sampler_counts_and_each_iteration_is_an_epoch():
    rows = Rows(11)  # 3 batches of 3 prompts; 2 prompts are dropped
    sampler, expected = group_sampler(rows), []
    for _ in range(2):
        indices = list(sampler)
        assert len(indices) == len(sampler) == 72  # 9 prompts, 2 generations, 4 repeats
        expected += [index for start in range(0, 72, 24) for index in indices[start : start + 6]]
    assert expected[:18] != expected[18:]
    for make_sampler in (None, lambda: group_sampler(rows)):
        source = dataset_prompts(rows, make_sampler=make_sampler)
        assert [row["row"] for _ in range(6) for row in source.take(3)] == expected


def test_a_sampler_with_epochs_is_set_to_each():
    source = dataset_prompts(Rows(6), make_sampler=lambda: Rotating(6))
    assert [row["row"] for row in source.take(12)[::2]] == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 0]
    source.restore({"epoch": 2, "index": 3})
    assert [row["row"] for row in source.take(3)[::2]] == [5, 0, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_source_continues_in_a_later_epoch_and_reads_no_row_before(workers):
    whole = dataset_prompts(Rows(11))
    epochs = [[row["row"] for row in whole.take(9)[::2]] for _ in range(3)]
    rows = Rows(11, unreadable=epochs[2][:6])
    resumed = dataset_prompts(rows, dataloader_num_workers=workers)
    resumed.restore({"epoch": 2, "index": 6})
    assert [row["row"] for row in resumed.take(3)[::2]] == epochs[2][6:]
    assert sorted(rows.read) == ([] if workers else sorted(epochs[2][6:]))  # elsewhere by a worker
    resumed = dataset_prompts(Rows(11), dataloader_num_workers=workers)
    resumed.seek(2)
    resumed.take(3)
    resumed.seek(1)  # an epoch that the sampler is past
    assert [row["row"] for row in resumed.take(3)[::2]] == epochs[1][:3]


@pytest.mark.parametrize("dynamic", [True, False])
def test_an_incomplete_batch_is_kept_for_dynamic_sampling_alone(dynamic):
    given = {"dynamic_sampling": dynamic}
    for make_sampler in (lambda: Rotating(8), lambda: group_sampler(Rows(8), **given)):
        source = dataset_prompts(Rows(8), make_sampler=make_sampler, **given)
        for _ in range(2):
            taken = [row["row"] for row in source.take(8 if dynamic else 6)[::2]]
            assert len(set(taken)) == len(taken)  # an epoch


def test_a_sampler_without_end_is_read_as_far_as_its_length():
    class Endless(Sampler):
        def __len__(self):
            return 48

        def __iter__(self):
            for index in itertools.count():
                yield index // 2 % 3 + index // 24 * 3  # 4 repeats of 3 prompts, each twice

    source = dataset_prompts(Rows(99), make_sampler=Endless)
    assert [row["row"] for row in source.take(9)[::2]] == [0, 1, 2, 3, 4, 5, 0, 1, 2]


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


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_workers_read_the_rows_of_a_rank(world_size):
    for rank in range(world_size):
        plain, workers = (
            dataset_prompts(Rows(11), rank, world_size, dataloader_num_workers=number) for number in (0, 1)
        )
        for source in (plain, workers):
            source.take(3)
            snapshot = source.snapshot()  # inside the first epoch, which has 9 prompts
        for _ in range(2):
            for _ in range(4):
                assert list(workers.upcoming(2, 3)) == list(plain.upcoming(2, 3))
                assert workers.take(3) == plain.take(3)
            workers.restore(snapshot)
            plain.restore(snapshot)
        assert workers.dataset.read == []  # in this process


def test_a_batch_of_another_size_has_rows_that_a_worker_left_to_another_rank():
    plain, workers = (dataset_prompts(Rows(9), 1, 2, dataloader_num_workers=number) for number in (0, 1))
    for size in (3, 4, 2, 1, 8):
        assert workers.take(size) == plain.take(size)
    assert workers.dataset.read


def read_as_trl(source, window, left=0):
    """Begin a window as ``groupwise.trl_hooks`` does."""
    InputsBuffer(num_left=left).read_prompts(source, window, batches())


@pytest.mark.parametrize(
    ("window", "left", "ahead"),
    [
        (4, 0, 2),  # a window is a generation: the next one is read too
        (2, 0, 1),  # half of a generation
        (2, 2, 1),  # its other half: the next one
        (2, 4, 0),  # the middle of a generation that is used twice
        (8, 0, 3),  # two generations
        (6, 0, 2),
        (6, 2, 2),
    ],
)
def test_a_sampler_is_read_one_micro_batch_further_than_the_window(window, left, ahead):
    class Noting(Rotating):
        def read_batch(self):
            read.append(1)

    read = []
    source = dataset_prompts(Rows(12), make_sampler=lambda: Noting(12))
    source.take(3)  # the present generation
    read_as_trl(source, window, left)
    assert len(read) - 1 == ahead
    assert [row["row"] for row in source.take(9)[::2]] == list(range(3, 12))


@pytest.mark.parametrize(("prefetch_factor", "ahead"), [(None, 2), (3, 3)])
def test_a_worker_is_ahead_by_generation_batches(prefetch_factor, ahead):
    class Noting(Rotating):
        def read_batch(self):
            read.append(1)

    read = []
    given = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": prefetch_factor}
    dataset_prompts(Rows(18), make_sampler=lambda: Noting(18), **given).take(3)
    assert len(read) == 1 + ahead


def test_every_iteration_of_the_train_dataloader_is_an_epoch():
    config = config_of(num_generations=1, generation_batch_size=2, steps_per_generation=3)
    items = GenerationBatches(lambda: PromptSource(letters, ONE), config, count=3)
    assert list(items) == [["0a", "0b"]] * 3
    assert list(items) == [["1a", "1b"]] * 3


def test_an_epoch_is_not_read_before_its_first_window():
    class Noting(Rotating):
        def read_epoch(self):
            epochs.append(self.epoch)

    epochs = []
    source = dataset_prompts(Rows(6), make_sampler=lambda: Noting(6))
    for expected in ([0], [0], [0, 1]):
        read_as_trl(source, window=4)
        assert epochs == expected
        source.take(3)
        source.snapshot()


def test_a_sampler_without_groups_is_refused():
    with pytest.raises(ConfigError, match="does not yield groups"):
        dataset_prompts(Rows(24), make_sampler=lambda: RandomSampler(range(24))).take(3)


def test_a_sampler_of_a_subclass_decides_the_order(tmp_path):
    seen = []

    def reward(row, completion_ids, **_):
        seen.append(row[::4])
        return [float(len(ids)) for ids in completion_ids]

    class Backwards(GRPOTrainer):
        def _get_train_sampler(self, train_dataset=None):
            sampler = super()._get_train_sampler(train_dataset)
            sampler.prompts = range(len(self.train_dataset))[::-1]
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
    with pytest.raises(ConfigError, match=r"prompt_filter or curriculum takes.*override _get_train_sampler"):
        trainer(tmp_path, kind=OwnLoader, prompt_filter={"max": 0.9})


def test_a_sampler_that_follows_rewards_is_read_after_them(tmp_path):
    rewarded, read = [], []

    class Curriculum(Sampler):
        def __len__(self):
            return 48

        def __iter__(self):
            for start in range(0, 6, 3):
                read.append(len(rewarded))
                for _ in range(4):
                    yield from [index for index in range(start, start + 3) for _ in range(2)]

    def reward(completion_ids, **_):
        rewarded.append(1)
        return [float(len(ids)) for ids in completion_ids]

    class Trainer(GRPOTrainer):
        def _get_train_sampler(self, train_dataset=None):
            return Curriculum()

    batches = {"per_device_train_batch_size": 3, "steps_per_generation": 2, "num_iterations": 2}
    batches |= {"num_generations": 2, "gradient_accumulation_steps": 4}
    trainer(tmp_path, reward, kind=Trainer, max_steps=3, **batches).train()
    assert read == [0, 1, 2]


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
