"""Generations prefetched by a server: their rows, order and staleness, and a resume in between."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from peft import LoraConfig
from support import agent_runs, runs
from support.fakes.fake_vllm import GENERATE, FakeVLLM, with_tokenizer
from support.runs import answered_before_updates
from transformers import TrainerCallback

from groupwise.generation.vllm.client import HttpClient, ServerUnavailableError
from groupwise.records import Completion


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(HttpClient, "first_pause", 0.02)
    server = with_tokenizer(FakeVLLM(), runs.tokenizer())
    server.logprob = lambda position: -math.log(32)  # about what the tiny policy gives every token
    yield server
    server.close()


def run_for(fake, directory, make=runs.trainer, **given):
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": fake.url, "max_steps": 4}
    return make(directory, **{**settings, "vllm_server_timeout": 60.0, **given})


def run_with_tool(fake, directory, **given):
    """A run whose turns call a tool or end, as their seeds decide."""
    tokenizer = agent_runs.tokenizer()
    agent_runs.with_calls(fake, tokenizer)
    given = {"tools": [agent_runs.measure], "generation_kwargs": None, "max_completion_length": 60, **given}
    given = {"processing_class": tokenizer, "per_device_train_batch_size": 4, **given}
    return run_for(fake, directory, agent_runs.trainer, **given)


class Quiz:
    """Observation: the prompt backwards. Reward: letters that the tool has measured."""

    made: ClassVar[list[Quiz]] = []

    def __init__(self) -> None:
        self.made.append(self)

    def reset(self, prompt: Any, **row: Any) -> str:
        self.length, self.shown = 0, f" {prompt[0]['content'][::-1]}"
        return self.shown

    def measure(self, text: str) -> int:
        """Measure a text.

        Args:
            text: what to measure.
        """
        self.length += len(text)
        return self.length

    def get_reward(self) -> float:
        return float(self.length)


class Dice(Quiz):
    """Draws from all generators."""

    def reset(self, prompt: Any, **row: Any) -> str:
        numbers = torch.rand(()).item(), random.random(), np.random.rand()
        self.length, self.shown = 0, " ".join(f"{number:.6f}" for number in numbers)
        return self.shown

    def measure(self, text: str) -> int:
        self.length += len(text) + int(torch.randint(9, ()))
        return self.length

    measure.__doc__ = Quiz.measure.__doc__

    def get_reward(self) -> float:
        return self.length + float(self.shown[:6]) + torch.rand(()).item()


class Held(Quiz):
    """Its tool, beside the update, answers once the server has the weights of the batch's own step."""

    run: ClassVar[Any] = None

    def reset(self, prompt: Any, **row: Any) -> str:
        # The first step resets the batch of the second step before its own.
        batch = {0: 1, 1: 0}.get(place := len(self.begun) // 4, place)
        self.begun.append(batch)
        self.batch = batch
        return super().reset(prompt)

    begun: ClassVar[list[int]] = []

    async def measure(self, text: str) -> int:
        while (self.run.backend.version or 0) < self.batch:
            await asyncio.sleep(0.005)
        return super().measure(text)

    measure.__doc__ = Quiz.measure.__doc__


@pytest.fixture
def held(fake, tmp_path):
    """Four steps in double precision; later turns are sampled after the update. Its rollouts and rewards."""
    fake.logprob = lambda position: -1 - int(fake.version.split(":")[-1]) / 100
    return run_held(fake, tmp_path / "held", **in_double())


def run_held(fake, directory, **given):
    Held.begun.clear()
    run = Held.run = run_with_environment(fake, directory, Held, rollout_staleness=1, **given)
    generate_rollouts, found, rewards = run.generate_rollouts, [], []

    class FirstTurnsAreThere(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            (*_, batch) = [*run.agents.ahead.values()] or [None]
            while batch is not None and any(not each.trajectory.turns for each in batch.rollouts):
                time.sleep(0.005)

    run.add_callback(FirstTurnsAreThere())

    def watched(request: Any) -> Any:
        found.append(rollouts := generate_rollouts(request))
        rewards.append([environment.get_reward() for environment in run.environments])
        return rollouts

    run.generate_rollouts = watched
    run.train()
    return run, found, rewards


def in_double():
    text = agent_runs.tokenizer()
    return {"model": agent_runs.policy(len(text)).double(), "logprob_mismatch_check": "off"}


class Talk:
    """Runs the rollouts itself: two turns."""

    time_limit, uses_tools = 20.0, False

    async def run_rollout(self, row: dict[str, Any], chat: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"{row['prompt'][0]['content']} {torch.rand(()).item():.6f}"}]
        response = await chat(messages, [])
        await chat([*messages, response.message, {"role": "user", "content": "more"}], [])
        return {"content": messages[0]["content"]}

    def reward_funcs(self) -> list[Any]:
        return [lambda content, **_: [float(text[-6:]) for text in content]]


def matching(environments: list[Any], prompts: list[Any], **_: Any) -> list[float]:
    """A reward that fails if an environment is that of another rollout, or was reset since."""
    shown = [environment.shown for environment in environments]
    assert [prompt[-1]["content"][-len(s) :] for prompt, s in zip(prompts, shown, strict=True)] == shown
    return [0.0] * len(prompts)


def run_with_environment(fake, directory, environment=Dice, **given):
    rewards = {} if environment is Talk else {"reward_funcs": matching}
    factory = Talk() if environment is Talk else environment
    given = {"tools": None, "environment_factory": factory, **rewards, **given}
    return run_with_tool(fake, directory, **given)


run_with_quiz = partial(run_with_environment, environment=Quiz)
run_with_dialogue = partial(run_with_environment, environment=Talk)
run_with_environment_and_rounds = partial(
    run_with_environment, dynamic_sampling=True, per_device_train_batch_size=8
)


def given_reward(given, **_):
    return given


def varies_but_in_one_row(completion_ids, row, **_):
    """No variance in the groups of row 0."""
    return [float(ids[2] * (number > 0)) for ids, number in zip(completion_ids, row, strict=True)]


def run_with_rounds(fake, directory, **given):
    """Dynamic sampling of four groups per step, with two rounds in most steps."""
    given = {"rewards": varies_but_in_one_row, "dynamic_sampling": True, **given}
    return run_for(fake, directory, **{"per_device_train_batch_size": 16, **given})


def asked(fake):
    """The first prompt token and seed of every request, in order."""
    bodies = [body for path, body in fake.bodies if path == GENERATE]
    return [(body["token_ids"], body["sampling_params"]["seed"]) for body in bodies]


def losses(run):
    return [line["loss"] for line in run.state.log_history if "loss" in line]


def staleness(run):
    return [line.get("staleness") for line in run.state.log_history if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 5])  # an epoch has 8 steps
def test_batches_are_prefetched_once(fake, tmp_path, depth):
    run_for(fake, tmp_path / "on_policy", max_steps=10).train()
    on_policy = asked(fake)
    fake.bodies.clear()
    ahead = run_for(fake, tmp_path / "ahead", max_steps=10, rollout_staleness=depth)
    answered_before_updates(ahead).train()
    # The same prompts with the same seeds, none beyond the end.
    assert sorted(asked(fake)) == sorted(on_policy)
    assert staleness(ahead) == [min(step, depth) for step in range(10)]


def test_the_next_batch_is_requested_before_the_update(fake, tmp_path):
    seen = []

    class Count(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            seen.append(fake.seen[GENERATE])

    answered_before_updates(run_for(fake, tmp_path, rollout_staleness=1, callbacks=[Count()])).train()
    assert seen == [2, 3, 4, 4]


@pytest.mark.slow
def test_the_first_round_of_a_batch_is_requested_before_the_update(fake, tmp_path):
    make = run_with_rounds
    make(fake, tmp_path / "on_policy").train()
    on_policy = sorted(asked(fake))
    fake.bodies.clear()
    run = answered_before_updates(make(fake, tmp_path / "ahead", rollout_staleness=1))
    ahead, calls, before_update = {}, {}, []

    class Updates(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            before_update.append(len(ahead))

    run.add_callback(Updates())
    prefetch, generate = run.backend.prefetch, run.backend.generate

    def watched_prefetch(prompts, sampling, *, step):
        ahead[step] = prompts
        prefetch(prompts, sampling, step=step)

    def watched_generate(prompts, sampling):
        calls.setdefault(run.state.global_step, []).append(prompts)
        return generate(prompts, sampling)

    run.backend.prefetch, run.backend.generate = watched_prefetch, watched_generate
    run.train()
    assert sorted(asked(fake)) == on_policy  # the same prompts with the same seeds, none beyond the end
    assert ahead == {step: calls[step][0] for step in (1, 2, 3)}
    assert sum(map(len, calls.values())) > 4  # several rounds
    assert before_update == [1, 2, 3, 3]
    assert staleness(run)[0] == 0 and all(0 < steps <= 1 for steps in staleness(run)[1:])


async def measure_slowly(text: str) -> int:
    await asyncio.sleep(0.03)
    return agent_runs.measure(text)


measure_slowly.__doc__ = agent_runs.measure.__doc__
measure_slowly.__name__ = "measure"
run_with_async_tool = partial(run_with_tool, tools=[measure_slowly])


class WholeBatches(TrainerCallback):
    """The update begins once the conversations of the next batch have gone as far as they can beside it."""

    def __init__(self, run: Any) -> None:
        self.run, self.ended = run, []

    def on_pre_optimizer_step(self, *args, **kwargs):
        for batch in self.run.agents.ahead.values():
            batch.thread.result(timeout=120)
            self.ended.append([rollout.request is None and not rollout.calls for rollout in batch.rollouts])


def test_whole_conversations_are_sampled_beside_the_update(fake, tmp_path):
    run = run_with_async_tool(fake, tmp_path, rollout_staleness=1)
    whole, calls, generate = WholeBatches(run), [], run.backend.generate
    run.add_callback(whole)
    run.backend.generate = lambda *given: calls.append(run.state.global_step) or generate(*given)
    run.train()
    assert whole.ended == [[True] * 4] * 3
    assert set(calls) == {0}  # the other steps sample nothing: their batches are there
    assert staleness(run) == [0, 1, 1, 1]
    turns = [line["tools/call_frequency"] for line in run.state.log_history if "loss" in line]
    assert max(turns) > 1  # conversations of three turns and more


def test_a_sync_tool_is_called_in_the_step_of_its_batch_and_a_warning_says_so(fake, tmp_path, caplog):
    threads = set()

    def measure(text):
        threads.add(threading.current_thread())
        return agent_runs.measure(text)

    measure.__doc__, measure.__annotations__ = agent_runs.measure.__doc__, {"text": str, "return": int}
    run = run_with_tool(fake, tmp_path, tools=[measure], rollout_staleness=1)
    whole = WholeBatches(run)
    run.add_callback(whole)
    run.train()
    assert threads == {threading.current_thread()}
    assert not any(map(all, whole.ended))
    assert all(0 < steps <= 1 for steps in staleness(run)[1:])
    assert "calls measure waits for its step" in caplog.text


@pytest.mark.slow
def test_a_turn_after_the_update_is_sampled_by_the_new_weights(held):
    run, found, _ = held
    assert_versions_of_turns(run, found)
    for completion in [completion for rollouts in found for completion in rollouts.completions]:
        for version, logp, kept in zip(*fields(completion, "versions", "logps", "loss_mask"), strict=True):
            assert not kept or math.isclose(logp, -1 - version / 100, rel_tol=1e-7)  # float32


def fields(completion, *names):
    return [getattr(completion, name) for name in names]


def assert_versions_of_turns(run, found):
    """First turns are sampled before the update, later ones after it."""
    mixed = 0
    for step, rollouts in enumerate(found):
        for completion in rollouts.completions:
            sampled = [
                v for v, kept in zip(*fields(completion, "versions", "loss_mask"), strict=True) if kept
            ]
            first = completion.turns[0][1]
            assert {*sampled[:first]} == {max(step - 1, 0)}
            assert {*sampled[first:]} <= {step}  # none is older than the bound
            mixed += len({*sampled}) == 2
    assert mixed >= 3
    lines = [line for line in run.state.log_history if "loss" in line]
    assert [line["staleness/max"] for line in lines] == [0, 1, 1, 1]


@pytest.mark.slow
def test_with_an_adapter_a_turn_after_the_update_names_the_new_one(fake, tmp_path):
    """Each request names the adapter of its step, which the server still has: it answers 404 for another."""
    model = agent_runs.policy(len(agent_runs.tokenizer()))
    fake.info["lora_config"], fake.weights = {"max_lora_rank": 4}, dict(model.state_dict())
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    run, found, _ = run_held(fake, tmp_path / "held", model=model, peft_config=adapter)
    assert_versions_of_turns(run, found)
    bodies = [body for path, body in fake.bodies if path == GENERATE]
    named = [
        int(body["model"].rpartition(":")[2]) for body in bodies for _ in range(body["sampling_params"]["n"])
    ]
    completions = [completion for rollouts in found for completion in rollouts.completions]
    sampled = [completion.versions[start] for completion in completions for start, _ in completion.turns]
    assert sorted(named) == sorted(sampled)  # none was asked for twice
    assert fake.seen["/v1/load_lora_adapter"] == 4 and len(fake.adapters) == 2
    run.backend.close()


@pytest.mark.slow
def test_the_update_is_that_of_the_same_tokens_and_versions_given_by_hand(held, fake, tmp_path):
    run, found, rewards = held
    by_hand = run_with_tool(fake, tmp_path / "by_hand", reward_funcs=[given_reward], **in_double())

    def given(request):
        step = by_hand.state.global_step
        fields = "token_ids", "logps", "loss_mask", "truncated", "versions"
        old = found[step].completions
        completions = [Completion(**{name: getattr(one, name) for name in fields}) for one in old]
        changed = {"completions": completions, "extra": {"given": rewards[step]}}
        return replace(found[step], **changed, **request.kept_fields())

    by_hand.generate_rollouts = given
    by_hand.train()
    assert [line["staleness"] for line in by_hand.state.log_history if "loss" in line] == staleness(run)
    for name, weight in run.model.state_dict().items():
        assert weight.dtype == torch.float64
        torch.testing.assert_close(by_hand.model.state_dict()[name], weight, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["drop", 500, "restart"])
def test_a_server_that_fails_in_a_later_turn_changes_no_history(fake, tmp_path, failure):
    histories = []
    for failing in (False, True):
        run = run_with_async_tool(fake, tmp_path / str(failing), rollout_staleness=1)
        whole, answer, failed = WholeBatches(run), fake.answer, []

        def answering(path, query, body, answer=answer, failed=failed, run=run):
            later = path == GENERATE and body["token_ids"].count(run.processing_class.eos_token_id) > 2
            if later and run.state.global_step == 1 and len(failed) < 2:
                failed.append(body)
                if failure == "restart":
                    fake.version = "default"
                else:
                    return failure if failure == 500 else 503, "as planned"
            return answer(path, query, body)

        run.add_callback(whole)
        if failing:
            fake.answer = answering
        run.train()
        fake.answer = answer
        run.backend.close()
        assert bool(failed) == failing
        histories.append([losses(run), staleness(run), whole.ended])
    (*undisturbed, _), (*after, ended) = histories
    assert after[0] == undisturbed[0]
    if failure == "restart":  # what the thread could not sample is sampled in the step, after a push
        assert not all(map(all, ended))


@pytest.mark.slow
def test_a_tool_that_hangs_beside_the_update_ends_at_its_limit(fake, tmp_path):
    hung = []

    async def measure(text: str) -> int:
        if len(hung) < 2:
            hung.append(text)
            await asyncio.sleep(1000)
        return len(text)

    measure.__doc__ = agent_runs.measure.__doc__
    run = run_with_tool(fake, tmp_path, tools=[measure], rollout_staleness=1, tool_timeout=0.2, max_steps=3)
    run.train()
    failures = [line["tools/failure_frequency"] for line in run.state.log_history if "loss" in line]
    assert len(hung) == 2 and len(failures) == 3 and any(failures)


@pytest.mark.slow
def test_an_environment_that_hangs_ahead_is_repeated_in_its_step(fake, tmp_path):
    class Hanging(Talk):
        time_limit, hung = 2.0, 0

        async def run_rollout(self, row, chat):
            if self.hung < 2:
                Hanging.hung += 1
                first = await chat([{"role": "user", "content": f"hang {self.hung}"}], [])
                await asyncio.sleep(1000)
                assert first is None
            return await super().run_rollout(row, chat)

    settings = {"rollout_on_error": "retry", "rollout_retries": 2, "rollout_staleness": 1, "max_steps": 3}
    run = run_with_dialogue(fake, tmp_path, environment_factory=Hanging(), **settings)
    run.train()
    lines = [line for line in run.state.log_history if "loss" in line]
    assert sum(line["rollouts/retry_frequency"] for line in lines) == 2 / 4
    assert [line["rollouts/dropped_share"] for line in lines] == [0] * 3


@pytest.mark.slow
def test_an_interrupt_beside_conversations_leaves_nothing_behind(fake, tmp_path):
    """Environments with a call in progress are not used again, and their threads end."""

    class Slow(Held):
        begun: ClassVar[list[int]] = []

        async def measure(self, text: str) -> int:
            while self.batch == 2 and not over.is_set():  # the batch ahead when the run is interrupted
                await asyncio.sleep(0.005)
            return Quiz.measure(self, text)

    Slow.measure.__doc__ = Quiz.measure.__doc__

    class Interrupt(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            if stopped:  # the second run has begun, and discarded the batch
                over.set()

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 1 and not stopped:
                (batch,) = run.agents.ahead.values()
                while not any(rollout.futures and not rollout.request for rollout in batch.rollouts):
                    time.sleep(0.002)
                calling = [r.place.instance for r in batch.rollouts if r.futures and not r.request]
                stopped.extend([batch.thread, *calling])
                raise KeyboardInterrupt

    stopped, over = list[Any](), threading.Event()
    run = run_with_environment(fake, tmp_path / "cut", Slow, rollout_staleness=1, callbacks=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.train()  # from the beginning
    assert len(staleness(run)) == 4
    thread, *calling = stopped
    assert thread.done() and calling
    idle = run.agents.loop.pool.types[None].idle
    assert not {*map(id, calling)} & {*map(id, [*idle, *run.environments])}


def test_a_rollout_func_is_never_prefetched_and_a_warning_says_so(fake, tmp_path, caplog):
    def rollout_func(prompts, trainer):
        return {"prompt_ids": [[4]] * len(prompts), "completion_ids": [[5, 1], [6, 7]] * (len(prompts) // 2)}

    run = run_for(fake, tmp_path, rollout_staleness=1, rollout_func=rollout_func, max_steps=2)
    assert "rollout_staleness=1 has no effect" in caplog.text
    requested: list[int] = []
    run.backend.prefetch = lambda *_, step: requested.append(step)
    run.train()
    assert requested == []


@pytest.mark.slow
def test_a_batch_ahead_has_environments_of_its_own(fake, tmp_path):
    """Evaluations, rewards and callbacks use those of their batch, which no later ``reset`` has changed."""
    depth = 2
    Quiz.made.clear()
    run = run_with_environment(
        fake,
        tmp_path,
        max_steps=5,
        rollout_staleness=depth,
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        eval_dataset=agent_runs.chats(2),
    )
    seen, sample = [], run.sample

    def watched(request):
        rollouts, rewards = sample(request)
        seen.append((run.environments, [environment.shown for environment in run.environments]))
        return rollouts, rewards

    class Shown(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            environments, shown = seen[-1]
            assert [environment.shown for environment in environments] == shown

    run.sample = watched
    run.add_callback(Shown())
    answered_before_updates(run).train()
    assert len(seen) == 5 + 3 and all(len({*map(id, environments)}) == 4 for environments, _ in seen)
    assert len(Quiz.made) == 4 * (depth + 1)
    assert staleness(run)[0] == 0 and all(0 < steps <= depth for steps in staleness(run)[1:])


@pytest.mark.slow
def test_rollouts_that_fail_in_reset_ahead_are_repeated_in_their_own_step(fake, tmp_path):
    class Broken(Quiz):
        resets = 0

        def reset(self, **row):
            Broken.resets += 1
            if Broken.resets in (2, 3, 17):  # two of batch 1, which begins first, and one of the last batch
                raise OSError("no server")
            return super().reset(**row)

    settings = {"rollout_on_error": "retry", "rollout_retries": 1, "rollout_staleness": 1}
    run = run_with_environment(fake, tmp_path, Broken, **settings)
    run.train()
    logs = [line for line in run.state.log_history if "loss" in line]
    assert [line["rollouts/retry_frequency"] for line in logs] == [0, 0.5, 0, 0.25]
    assert [line["rollouts/dropped_share"] for line in logs] == [0] * 4


def test_every_generation_is_used_as_often_as_configured(fake, tmp_path):
    given = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 1, "max_steps": 4}
    run = run_for(fake, tmp_path, rollout_staleness=1, **given)
    run.train()
    assert staleness(run)[0] == 0
    assert len(asked(fake)) == len(set(map(str, asked(fake)))) == 8  # two generations of four prompts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "stop", "steps", "depth"),
    [
        (run_for, 7, 9, 1),  # with the next epoch's first batch asked for
        (run_with_async_tool, 2, 4, 1),
        (run_with_environment, 2, 5, 2),
        (run_with_environment_and_rounds, 1, 3, 1),
        (run_with_dialogue, 2, 4, 1),
    ],
)
def test_a_resumed_run_loses_nothing_and_trains_nothing_twice(fake, tmp_path, make, stop, steps, depth):
    settings = {"rollout_staleness": depth, "max_steps": steps}
    whole = make(fake, tmp_path / "whole", **settings)
    whole.train()
    everything = sorted(asked(fake))
    fake.bodies.clear()
    settings |= {"save_strategy": "steps", "save_steps": stop}
    first = make(fake, tmp_path / "parts", **settings)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == stop

    first.add_callback(Stop())
    first.train()
    first.backend.close()
    resumed = make(fake, tmp_path / "parts", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert set(map(str, asked(fake))) == set(map(str, everything))
    assert losses(resumed)[stop:] == losses(whole)[stop:]
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])


@pytest.mark.slow
@pytest.mark.parametrize(("make", "depth"), [(run_for, 0), (run_with_environment, 1)])
def test_an_unavailable_server_leaves_a_checkpoint_to_resume_from(fake, tmp_path, make, depth):
    make = partial(make, rollout_staleness=depth)
    whole = make(fake, tmp_path / "whole")
    whole.train()
    cut = make(fake, tmp_path / "cut", save_strategy="steps", save_steps=100)
    generate_rollouts = cut.generate_rollouts

    def fail_at_third(request):
        if cut.state.global_step == 2:
            if depth:  # first turns are there: fail after all calls of the environments
                generate_rollouts(request)
                raise ServerUnavailableError("failed 4 times")
            fake.failures[GENERATE] = [500] * 4
        return generate_rollouts(request)

    cut.generate_rollouts = fail_at_third
    with pytest.raises(ConnectionError, match="failed 4 times"):
        cut.train()
    assert (tmp_path / "cut" / "checkpoint-2").is_dir()
    resumed = make(fake, tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])


def test_an_unavailable_server_leaves_no_checkpoint_without_save_strategy(fake, tmp_path):
    cut = run_for(fake, tmp_path)
    fake.failures["/update_weights"] = [200, 200] + [500] * 8
    with pytest.raises(ConnectionError):
        cut.train()
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_tokens_without_a_log_prob_from_the_server_count_as_sampled_by_the_policy(fake, tmp_path, mode):
    fake.logprob = lambda position: -9999.0  # what vLLM writes where it has none
    histories = []
    for correction in (True, False):
        settings = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.01}
        settings["vllm_importance_sampling_correction"] = correction
        run = run_for(fake, tmp_path, max_steps=2, **settings)
        run.train()
        histories.append(
            [(line["loss"], line["grad_norm"]) for line in run.state.log_history if "loss" in line]
        )
        values = [value for line in run.state.log_history for value in line.values()]
        assert all(math.isfinite(value) for value in values)
    assert histories[0] == histories[1]


def test_a_missing_log_prob_leaves_the_other_tokens_corrected(fake, tmp_path):
    whole = [-9999.0 if position == 1 else -0.01 for position in range(6)]  # far from what the policy gives
    losses_by_bound = []
    for bound in (0.5, 1000.0):
        fake.logprob = whole.__getitem__
        settings = {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": bound}
        run = run_for(fake, tmp_path, max_steps=1, vllm_importance_sampling_clip_max=2000.0, **settings)
        run.train()
        losses_by_bound.append(run.state.log_history[0]["grad_norm"])
    # Only the token whose ratio counts as 1 lies above the bound of 0.5; none above that of 1000.
    assert losses_by_bound[0] > 0 and losses_by_bound[1] == 0


@pytest.mark.slow
def test_the_digest_of_the_weights_reaches_batches_parquet_and_checkpoint(fake, tmp_path):
    """Each step trains on completions of its own weights, or of the weights before with a staleness of 1."""
    trained = {}

    class Seen(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            trained.setdefault(state.global_step, set()).update(*batches)
            batches.clear()

    batches = []
    run = run_for(
        fake,
        tmp_path,
        rollout_staleness=1,
        log_completions=True,
        save_strategy="steps",
        save_steps=4,
        callbacks=[Seen()],
    )
    loss = run.compute_loss
    run.compute_loss = lambda model, batch, **given: (
        batches.append(batch.weight_digests),
        loss(model, batch, **given),
    )[1]
    answered_before_updates(run).train()
    of_step = {step: digest for step, (digest,) in trained.items()}
    assert (
        of_step[0] == of_step[1]
        and len(set(of_step.values())) == 3
        and set(map(len, of_step.values())) == {16}
    )
    for step in range(4):
        table = pq.read_table(tmp_path / f"completions/completions_{step + 1:05d}.parquet")
        assert set(table["weight_digest"].to_pylist()) == {of_step[step]}
    assert run.backend.weight_digests[3] not in of_step.values()  # of the batch that is generated ahead
    resumed = run_for(fake, tmp_path, rollout_staleness=1, max_steps=5)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.backend.weight_digests[3] == run.backend.weight_digests[3]
