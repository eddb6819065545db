"""Prompts to completions: what the backend is asked for, and the record of a rollout."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.fakes.mixin_hosts import host
from support.runs import tokenizer
from transformers import PretrainedConfig

from groupwise.errors import ConfigError
from groupwise.mixins import RolloutMixin
from groupwise.random_state import RandomState
from groupwise.records import Completion, RolloutBatch, RolloutRequest, SamplerSettings


class Backend:
    """Answers each prompt with its last token and its position; finishes the last row early."""

    end_tokens = (1,)
    supports_images = False

    def __init__(self):
        self.calls, self.prefetched = [], []

    def generate(self, prompt_ids, sampling):
        self.calls.append((prompt_ids, sampling))
        completions = [Completion([ids[-1], 10 + row]) for row, ids in enumerate(prompt_ids)]
        if sampling.on_finished is not None:
            sampling.on_finished([len(prompt_ids) - 1], completions[-1:])
        return completions

    def prefetch(self, prompt_ids, sampling, *, step):
        self.prefetched.append((prompt_ids, sampling, step))


class Tokenizer:
    """Counts the prompts that are tokenized."""

    def __init__(self):
        self.inner, self.calls = tokenizer(), 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.inner(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def mixin(**attributes):
    settings = {"chat_template_kwargs": None, "max_prompt_length": None}
    defaults = {
        "processing_class": Tokenizer(),
        "backend": Backend(),
        "rollout_func": None,
        "agents": None,
        "state": None,
        "rng": RandomState(),
    }
    defaults["model"] = SimpleNamespace(config=PretrainedConfig(vocab_size=32))
    return host(RolloutMixin, settings=settings, **{**defaults, **attributes})


ROWS = [{"prompt": "w1 w2"}] * 2 + [{"prompt": "w3"}]  # the tokens of w0, w1, … are 4, 5, …


def test_completions_keep_the_order_and_the_settings_of_the_request():
    run = mixin()
    request = RolloutRequest(ROWS, 2, num_valid=5, mode="eval", generation_kwargs={"temperature": 0.5})
    found = run.generate_rollouts(request)
    assert found.rows is request.rows and found.prompts == ["w1 w2", "w1 w2", "w3"]
    assert found.prompt_ids == [[5, 6], [5, 6], [7]]
    assert [c.token_ids for c in found.completions] == [[6, 10], [6, 11], [7, 12]]
    assert [text.split() for text in found.texts] == [["w2", "w6"], ["w2", "w7"], ["w3", "w8"]]
    assert (found.num_generations, found.num_valid, found.mode) == (2, 5, "eval")
    assert (found.extra, found.images, list(found.row_ids)) == ({}, None, [0, 1, 2])
    ((prompt_ids, sampling),) = run.backend.calls
    assert prompt_ids == found.prompt_ids
    assert sampling.generation_kwargs == {"temperature": 0.5} and sampling.images is None
    assert sampling.on_finished is None


def test_equal_neighbours_are_tokenized_once():
    run = mixin()
    assert run.tokenize(ROWS) == ([[5, 6], [5, 6], [7]], None)
    assert run.processing_class.calls == 2


def test_long_prompts_lose_their_beginning():
    run = mixin()
    run.args.max_prompt_length = 1
    assert run.tokenize(ROWS)[0] == [[6], [6], [7]]


def test_images_need_a_processor():
    with pytest.raises(ConfigError, match="image"):
        mixin().tokenize([{"prompt": "w1", "image": object()}])


def test_finished_prompts_are_passed_on_with_their_positions():
    parts = []
    request = RolloutRequest(ROWS, 2, on_partial_rollout=parts.append)
    found = mixin().generate_rollouts(request)
    (part,) = parts
    assert part.row_ids == [2] and part.rows == [ROWS[2]] and part.prompts == ["w3"]
    assert part.prompt_ids == [[7]] and part.completions == found.completions[2:]
    assert part.texts == found.texts[2:]


def test_rollouts_of_a_later_step_are_requested_ahead():
    prompts = SimpleNamespace(upcoming=lambda num_batches, *_: [ROWS] * num_batches, last=(1, 9))
    run = mixin(prompts=prompts, state=SimpleNamespace(global_step=6, max_steps=8))
    run.args.rollout_staleness = 2  # the second one would begin after the last step
    run.prefetch_rollouts(SamplerSettings(temperature=0.5))
    ((prompt_ids, sampling, step),) = run.backend.prefetched
    assert (prompt_ids, step) == ([[5, 6], [5, 6], [7]], 7) and sampling.images is None
    assert sampling.generation_kwargs["temperature"] == 0.5
    assert run.backend.calls == []
    run.state.global_step = 7  # the request of that step finds them by its seeds
    assert sampling.seeds == run.row_seeds(3)


def test_seeds_depend_on_step_and_prompt_and_not_on_the_number_of_ranks(monkeypatch):
    def seeds(rank, num_rows, step=6, last=(1, 9)):
        run = mixin(prompts=SimpleNamespace(last=last), state=SimpleNamespace(global_step=step))
        monkeypatch.setattr(type(run.args), "process_index", rank, raising=False)
        return run.row_seeds(num_rows)

    whole = seeds(0, 12)
    assert whole == list(range(whole[0], whole[0] + 12)) and whole[-1] < 2**63
    assert [seed for rank in range(4) for seed in seeds(rank, 3)] == whole
    assert len({whole[0], seeds(0, 12, step=7)[0], seeds(0, 12, last=(2, 9))[0]}) == 3


@pytest.mark.parametrize("first", [1, 0])
def test_agents_begin_batches_ahead_with_the_random_stream_of_the_user(first):
    def begin(rows, backend, generation_kwargs, step, seeds):
        torch.manual_seed(0)
        batches.append((rows, backend, generation_kwargs["temperature"], step, seeds))

    calls, batches = [], []
    prompts = SimpleNamespace(upcoming=lambda num_batches, *_: [ROWS] * num_batches, last=(1, 9))
    run = mixin(
        prompts=prompts,
        state=SimpleNamespace(global_step=6, max_steps=9),
        metrics={"train": SimpleNamespace(phase=lambda name: nullcontext(calls.append(name)))},
        agents=SimpleNamespace(begin=begin, end_batch=lambda: calls.append("end")),
    )
    run.args.rollout_staleness = 2
    state = torch.get_rng_state()
    run.prefetch_rollouts(SamplerSettings(temperature=0.5), first=first)
    assert batches == [(ROWS, run.backend, 0.5, step, run.row_seeds(3, step)) for step in (7, 8)]
    # With dynamic sampling they are requested while the batch of this step is not over.
    assert calls == ["end"] * first + ["generate"] * 2
    assert torch.equal(torch.get_rng_state(), state)


def test_agents_take_a_batch_ahead_in_training():
    def generate_rollouts(rows, backend, generation_kwargs, generate, step, seeds):
        columns = {"rows": rows, "prompts": ["p"], "prompt_ids": [[1]], "texts": ["t"]}
        return RolloutBatch(completions=[Completion([step])], **columns)

    run = mixin(agents=SimpleNamespace(generate_rollouts=generate_rollouts))
    run.state = SimpleNamespace(global_step=6)
    assert run.generate_rollouts(RolloutRequest(ROWS[:1], 1)).completions[0].token_ids == [6]


def test_a_rollout_function_replaces_the_backend():
    def rollout(prompts, trainer):
        assert trainer is run
        return {
            "prompt_ids": [[5]] * len(prompts),
            "completion_ids": [[6, 1]] * len(prompts),
            "score": [1, 2, 3],
        }

    run = mixin(rollout_func=rollout)
    found = run.generate_rollouts(RolloutRequest(ROWS, 3, num_valid=2))
    assert run.backend.calls == [] and found.prompt_ids == [[5]] * 3
    assert [c.token_ids for c in found.completions] == [[6, 1]] * 3
    assert [text.split() for text in found.texts] == [["w2"]] * 3  # without the end token
    assert found.extra == {"score": [1, 2, 3]}
    assert (found.num_generations, found.num_valid) == (3, 2)


def test_agents_sample_with_the_settings_of_the_request():
    def generate_rollouts(rows, backend, generation_kwargs, generate, step, seeds):
        assert rows is request.rows and backend is run.backend and step is None  # of training
        torch.manual_seed(0)  # of an environment: turns are still sampled from the stream of the run
        assert generate([[1]]) == ["a turn", first]
        assert generation_kwargs == {"top_p": 0.5}
        columns = {"rows": rows, "prompts": ["p"], "prompt_ids": [[1]], "texts": ["t"]}
        return RolloutBatch(completions=[Completion([2])], **columns)

    torch.manual_seed(3)
    first, second = torch.rand(2).tolist()
    torch.manual_seed(3)
    run = mixin(agents=SimpleNamespace(generate_rollouts=generate_rollouts))
    run.backend.generate = lambda prompts: ["a turn", torch.rand(()).item()]
    request = RolloutRequest(ROWS[:1], 4, num_valid=1, mode="eval", generation_kwargs={"top_p": 0.5})
    found = run.generate_rollouts(request)
    assert torch.rand(()).item() == second
    assert (found.num_generations, found.num_valid, found.mode) == (4, 1, "eval")
