"""A real vLLM engine in the trainer's process: it follows the weights, and the run stays reproducible."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from engine_runs import engine_greedy, greedy, policy, trainer, trainer_logps
from peft import LoraConfig

from groupwise.errors import BackendError
from groupwise.stages import Sampling

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

PROMPTS = [[4, 5, 6], [7], [8, 9, 10, 11, 12], [13, 14]]
# Wall-clock time, what Trainer counts by process, and the comparison that each process begins with.
OF_THE_PROCESS = re.compile(r"time/.*|step_time|.*_runtime|.*_per_second|train_loss|sampling/parity_gap")


def history(run: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if not OF_THE_PROCESS.fullmatch(key)}
        for line in run.state.log_history
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps with large updates; what was generated, with the log-probs of the policy at that moment."""
    run = trainer(tmp_path_factory.mktemp("colocate"), temperature=0.7, max_steps=2, learning_rate=0.05)
    run.seen = []
    generate = run.backend.generate

    def watched(prompts, sampling):
        completions = generate(prompts, sampling)
        for prompt, completion in zip(prompts, completions, strict=True):
            expected = trainer_logps(run.model.eval(), prompt, completion.token_ids, 0.7)
            run.seen.append((run.state.global_step, completion, expected))
        return completions

    run.backend.generate = watched
    state = torch.get_rng_state()
    run.train()
    assert not torch.equal(state, torch.get_rng_state())
    run.backend.generate = generate
    yield run
    run.backend.close()


def test_the_engine_samples_from_the_policy_of_each_step(run):
    assert {step for step, *_ in run.seen} == {0, 1}
    for step, completion, expected in run.seen:
        assert completion.versions == [step] * len(completion.token_ids)
        # float32 on both sides, by other kernels
        torch.testing.assert_close(torch.tensor(completion.logps).double(), expected, atol=1e-4, rtol=0)


def test_the_logs_show_the_sampler(run):
    first, second = run.state.log_history[:2]
    for line in (first, second):
        assert line["time/sync"] > 0 and line["time/generate"] > 0
        assert 0 <= line["sampling/sampling_logp_difference/mean"] < 1e-4
        assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)


def test_after_a_sync_greedy_output_is_the_trainers(run):
    ends = run.backend.end_tokens
    assert run.backend.version == 1
    before = engine_greedy(run.backend, PROMPTS)
    run.sync_sampler(run.model)
    assert run.backend.version == 2
    after = engine_greedy(run.backend, PROMPTS)
    assert after == greedy(run.model, PROMPTS, 6, ends)
    assert after != before  # so the comparison sees old weights


def test_weights_are_sent_once_for_each_step_and_again_when_they_were_loaded(run):
    run.sync_sampler(run.model)

    def untouched():
        raise AssertionError("the stream was read")
        yield

    run.backend.sync_weights(untouched(), step=run.state.global_step)
    run.backend.version = None
    with pytest.raises(AssertionError, match="was read"):
        run.backend.sync_weights(untouched(), step=run.state.global_step)
    with pytest.raises(BackendError, match="no weights"):
        run.backend.generate([[4]])
    run.sync_sampler(run.model)
    assert engine_greedy(run.backend, PROMPTS) == greedy(run.model, PROMPTS, 6, run.backend.end_tokens)


def test_equal_neighbours_are_samples_of_one_request_and_differ(run):
    run.sync_sampler(run.model)
    requests = []
    answer = run.backend._answer
    run.backend._answer = lambda given: requests.extend(given) or answer(given)
    torch.manual_seed(3)
    first = run.backend.generate([[4, 5]] * 8 + [[6]] * 2)
    torch.manual_seed(3)
    again = run.backend.generate([[4, 5]] * 8 + [[6]] * 2)
    other = run.backend.generate([[4, 5]] * 8 + [[6]] * 2)
    del run.backend._answer
    assert [(prompt, number) for prompt, number, *_ in requests[:2]] == [([4, 5], 8), ([6], 2)]
    assert [c.token_ids for c in first] == [c.token_ids for c in again] != [c.token_ids for c in other]
    assert len({tuple(c.token_ids) for c in first[:8]}) > 1


def test_limits_by_row_and_ends_are_kept(run, monkeypatch):
    run.sync_sampler(run.model)
    limits = [1, 1] + [6] * 62
    monkeypatch.setitem(run.backend.sampling, "temperature", 50.0)  # about uniform over 32 tokens
    completions = run.backend.generate([[4, 5]] * 64, Sampling(max_tokens=limits))
    assert all(len(c.token_ids) <= limit for c, limit in zip(completions, limits, strict=True))
    assert {completion.truncated for completion in completions} == {True, False}
    for completion in completions:
        assert completion.truncated is not (completion.token_ids[-1] in run.backend.end_tokens)
        assert not set(completion.token_ids[:-1]) & run.backend.end_tokens


def test_a_prompt_without_room_is_refused(run):
    run.sync_sampler(run.model)
    with pytest.raises(BackendError, match=r"128 tokens.*takes 128"):
        run.backend.generate([[4] * 128])


def test_a_resumed_run_repeats_the_run(tmp_path):
    settings = {"max_steps": 4, "learning_rate": 0.02, "top_k": 20}
    whole = trainer(tmp_path / "whole", **settings, save_strategy="steps", save_steps=2)
    whole.train()
    whole.backend.close()
    resumed = trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    resumed.backend.close()
    assert history(resumed) == history(whole)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_adapters_arrive_merged(tmp_path):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    run = trainer(tmp_path, peft_config=adapter, learning_rate=0.05)
    run.train()
    run.sync_sampler(run.model)
    got = engine_greedy(run.backend, PROMPTS)
    assert got == greedy(run.model, PROMPTS, 6, run.backend.end_tokens)
    with run.model.disable_adapter():
        assert got != greedy(run.model, PROMPTS, 6, run.backend.end_tokens)
    run.backend.close()


def test_a_regex_holds_for_every_completion(tmp_path):
    run = trainer(tmp_path, model=policy(1), vllm_structured_outputs_regex=r"( w1| w2)+")
    run.sync_sampler(run.model)
    texts = run.processing_class.batch_decode(
        [completion.token_ids for completion in run.backend.generate([[4, 5]] * 8)], skip_special_tokens=True
    )
    run.backend.close()
    assert all(re.fullmatch(r"( ?w1| ?w2)*", text) for text in texts), texts
