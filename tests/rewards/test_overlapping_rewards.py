"""Rewards of finished prompts run while the others are still generated, and nothing else changes."""

from __future__ import annotations

import threading

import pytest
from support import runs
from support.fakes.fake_backend import EchoBackend
from support.fakes.fake_vllm import GENERATE, FakeVLLM, with_tokenizer

from groupwise import register_backend
from groupwise.errors import RewardError
from groupwise.generation.vllm.client import HttpClient
from groupwise.rewards import per_sample_reward

LONG = 60.0  # seconds after which a wait is given up; no test takes them


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(HttpClient, "first_pause", 0.02)
    server = with_tokenizer(FakeVLLM(), runs.tokenizer())
    yield server
    server.close()


def run_for(fake, directory, rewards, kind=runs.GRPOTrainer, **given):
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": fake.url}
    settings |= {"vllm_server_timeout": 2 * LONG, "per_device_train_batch_size": 8, "max_steps": 1}
    return runs.trainer(directory, rewards, kind=kind, **{**settings, **given})


def even_tokens(completion_ids, row, log_extra, log_metric, **_):
    rewards = [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]
    log_extra("row", row)
    log_metric("even", sum(rewards) / len(rewards))
    return rewards


def as_async(function):
    async def rewards(**columns):
        return function(**columns)

    rewards.__name__ = function.__name__
    return rewards


def lines(run):
    timeless = ("time", "memory/", "_per_second", "step_time", "runtime")
    return [
        {name: value for name, value in line.items() if not any(part in name for part in timeless)}
        for line in run.state.log_history
    ]


@pytest.mark.parametrize("wrap", [lambda function: function, as_async])
def test_a_prompt_is_rewarded_while_another_one_is_generated(fake, tmp_path, wrap):
    scored, seen = threading.Event(), []

    def note(completion_ids, **_):
        seen.append(len(completion_ids))
        scored.set()
        return [0.0] * len(completion_ids)

    waited = []
    # The second answer is not given before the first one has its rewards.
    fake.failures[GENERATE] = [None, lambda: waited.append(scored.wait(LONG))]
    run_for(fake, tmp_path, per_sample_reward(wrap(note))).train()
    assert waited == [True] and seen == [4, 4]


@pytest.mark.parametrize("wrap", [lambda function: function, as_async])
def test_a_registered_backend_reports_finished_prompts(tmp_path, wrap):
    scored, waited, seen = threading.Event(), [], []

    class InTwoParts(EchoBackend):
        """Generates the second prompt when the completions of the first one have rewards."""

        def generate(self, prompts, sampling):
            first = super().generate(prompts[:4], sampling)
            sampling.on_finished(range(4), first)
            waited.append(scored.wait(LONG))
            second = super().generate(prompts[4:], sampling)
            sampling.on_finished(range(4, 8), second)
            return first + second

    def note(completion_ids, row, **_):
        seen.append(row)
        scored.set()
        return [float(len(ids)) for ids in completion_ids]

    register_backend("in_two_parts", lambda *_: InTwoParts())
    settings = {"per_device_train_batch_size": 8, "max_steps": 1, "shuffle_dataset": False}
    runs.trainer(tmp_path, per_sample_reward(wrap(note)), backend="in_two_parts", **settings).train()
    assert waited == [True] and seen == [[0] * 4, [1] * 4]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda function: function, as_async])
def test_partial_calls_do_not_change_history_and_table(fake, tmp_path, wrap):
    histories, tables = [], []
    for mark in (lambda function: function, per_sample_reward):
        run = run_for(fake, tmp_path, [mark(wrap(even_tokens)), runs.count_reward], max_steps=2)
        table, score = [], run.compute_rewards
        run.compute_rewards = lambda *given, score=score, table=table: (
            table.append(score(*given)) or table[-1]
        )
        run.train()
        histories.append(lines(run))
        tables.append([(scored.columns, scored.rewards_NF.tolist()) for scored in table])
    assert histories[0] == histories[1] and "even" in histories[0][0]
    assert tables[0] == tables[1] and len(tables[0][0][0]["row"]) == 8


def test_partial_calls_do_not_change_the_error(fake, tmp_path):
    def wrong(completion_ids, row, **_):
        return ["bad" if number == row[-1] else 0.0 for number in row]

    messages = []
    for mark in (lambda function: function, per_sample_reward):
        with pytest.raises(RewardError) as caught:
            run_for(fake, tmp_path, mark(wrong)).train()
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "for row 4" in messages[0]


def test_other_functions_are_called_once_with_everything(fake, tmp_path):
    sizes = []

    def whole(completion_ids, **_):
        sizes.append(len(completion_ids))
        return runs.count_reward(completion_ids)

    run_for(fake, tmp_path, [whole, per_sample_reward(even_tokens)]).train()
    assert sizes == [8]


def test_an_overridden_compute_rewards_gets_no_partial_calls(fake, tmp_path):
    class Own(runs.GRPOTrainer):
        def compute_rewards(self, rollout, *given):
            sizes.clear()
            return super().compute_rewards(rollout, *given)

    sizes = []

    @per_sample_reward
    def count(completion_ids, **_):
        sizes.append(len(completion_ids))
        return runs.count_reward(completion_ids)

    run_for(fake, tmp_path, count, kind=Own).train()
    assert sizes == [8]


def test_a_server_that_lost_its_weights_changes_no_reward(fake, tmp_path):
    undisturbed = run_for(fake, tmp_path / "one", per_sample_reward(even_tokens))
    undisturbed.train()

    def forget():
        fake.version = "default"

    fake.failures[GENERATE] = [None, forget]
    disturbed = run_for(fake, tmp_path / "two", per_sample_reward(even_tokens))
    disturbed.train()
    assert fake.failures[GENERATE] == [] and lines(disturbed) == lines(undisturbed)
