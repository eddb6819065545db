"""A real vLLM engine in the trainer's process: it follows the weights, and the run stays reproducible."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.engine_runs import (
    ENGINE,
    assert_follows_four_bits,
    engine_greedy,
    four_bit_policy,
    greedy,
    policy,
    sync,
    trainer,
    trainer_logps,
)
from support.oracles.oracle_advantages import process_advantages
from support.process_rewards import byte_tokenizer, step_classifier
from support.runs import prompts
from support.workers.launch import WITH_VLLM, run_ranks
from transformers import Qwen3Config, Qwen3ForCausalLM

from groupwise.errors import BackendError
from groupwise.generation.vllm.base import sampling_fields
from groupwise.policy.weight_iterator import PolicyWeights
from groupwise.records import SamplingOptions
from groupwise.rewards import ProcessRewardModel

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

PROMPTS = [[4, 5, 6], [7], [8, 9, 10, 11, 12], [13, 14]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps with large updates; what was generated, with the log-probs of the policy at that moment.

    ``version`` and ``before`` are those of the engine after training: a test may bring newer weights.
    """
    engine = {**ENGINE, "max_num_batched_tokens": 200}
    settings = {"temperature": 0.7, "max_steps": 2, "learning_rate": 0.05, "vllm_engine_kwargs": engine}
    settings |= {"eval_dataset": prompts(4), "eval_generation_kwargs": {"temperature": 0.0}}
    run = trainer(tmp_path_factory.mktemp("colocate"), model=policy(tie_word_embeddings=True), **settings)
    run.seen = []
    generate = run.backend.generate

    def watched(prompts, sampling):
        completions = generate(prompts, sampling)
        for prompt, completion in zip(prompts, completions, strict=True):
            expected = trainer_logps(run.model.eval(), prompt, completion.token_ids, 0.7)
            run.seen.append((run.state.global_step, completion, expected))
        return completions

    run.backend.generate = watched
    run.train()
    run.backend.generate = generate
    run.version, run.before = run.backend.version, engine_greedy(run.backend, PROMPTS)
    yield run
    run.backend.close()


@pytest.mark.representative("engine and trainer agree after two steps")
@pytest.mark.slow
def test_the_engine_samples_from_the_policy_of_each_step(run):
    assert {step for step, *_ in run.seen} == {0, 1}
    for step, completion, expected in run.seen:
        assert completion.versions == [step] * len(completion.token_ids)
        # float32 on both sides, by other kernels
        torch.testing.assert_close(torch.tensor(completion.logps).double(), expected, atol=1e-4, rtol=0)


def test_process_rewards_of_the_engines_completions_reach_their_tokens(run):
    """Advantages of sampled steps are those of a scalar loop over the scores of the reward model."""
    functions, tokenizers = run.reward_funcs, run.reward_processing_classes
    run.reward_funcs = [ProcessRewardModel(step_classifier(), " ")]  # every word of the policy ends a step
    run.reward_processing_classes = [byte_tokenizer()]
    run.refresh_settings()
    try:
        request = run.make_request([row for row in prompts(2) for _ in range(4)])
        rollouts, rewards = run.sample(request)
        (experience,) = run.make_experience(rollouts, rewards, 8, on_policy=True)
        (steps,) = rewards.step_rewards.values()
    finally:
        run.reward_funcs, run.reward_processing_classes = functions, tokenizers
        run.refresh_settings()
    assert max(map(len, steps)) > 1 and all(c.logps is not None for c in rollouts.completions)
    for completion, text, found in zip(rollouts.completions, rollouts.texts, steps, strict=True):
        assert len(found) == max(len(text.split()), 1)
        assert found[-1][0] == len(completion.token_ids) - 1
    width = experience.completion_ids_BT.shape[1]
    expected = torch.tensor(process_advantages(steps, 4, width))
    torch.testing.assert_close(experience.advantages_BX, expected, atol=1e-5, rtol=0)


def test_the_logs_show_the_sampler(run):
    first, second = run.state.log_history[:2]
    for line in (first, second):
        assert line["time/sync"] > 0 and line["time/generate"] > 0
        assert 0 <= line["sampling/sampling_logp_difference/mean"] < 1e-4
        assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)


def test_after_a_sync_greedy_output_is_the_trainers(run):
    ends = run.backend.end_tokens
    assert run.version == 1
    sync(run, run.model)
    assert run.backend.version == 2
    after = engine_greedy(run.backend, PROMPTS)
    assert after == greedy(run.model, PROMPTS, 6, ends)
    assert after != run.before  # so the comparison sees old weights


def test_an_evaluation_samples_with_its_own_settings(run, monkeypatch):
    generate, calls = run.backend.generate, []

    def watched(prompts, sampling):
        calls.append((prompts, generate(prompts, sampling)))
        return calls[-1][1]

    monkeypatch.setattr(run.backend, "generate", watched)
    metrics = run.evaluate()
    assert run.backend.version == 2  # an evaluation is one of the newest weights
    assert metrics["eval_reward_std"] >= 0 and not any(value != value for value in metrics.values())
    for prompts_, completions in calls:
        got = [completion.token_ids for completion in completions]
        assert got == greedy(run.model, prompts_, 6, run.backend.end_tokens)
    texts = {
        tuple(completion.token_ids) for completion in run.backend.generate([[4, 5]] * 8, SamplingOptions())
    }
    assert len(texts) > 1  # the run's own temperature again


def test_prompts_longer_than_a_prefill_batch(run):
    """Seeded requests on a CPU must be read whole."""
    prompts = [[4 + i, *range(4, 16)] * 8 for i in range(6)]  # 104 tokens each; 200 are read in one pass
    sync(run, run.model)
    for prompt, completion in zip(prompts, run.backend.generate(prompts), strict=True):
        expected = trainer_logps(run.model.eval(), prompt, completion.token_ids, 0.7)
        torch.testing.assert_close(torch.tensor(completion.logps).double(), expected, atol=1e-4, rtol=0)


def test_weights_are_sent_once_per_step_and_after_loading(run):
    sync(run, run.model)

    class Unread(PolicyWeights):
        def full(self):
            raise AssertionError("the weights were read")

    run.backend.sync_weights(Unread(run.model), step=run.state.global_step)
    run.backend.invalidate_weights()
    with pytest.raises(AssertionError, match="were read"):
        run.backend.sync_weights(Unread(run.model), step=run.state.global_step)
    with pytest.raises(BackendError, match="no weights"):
        run.backend.generate([[4]])
    sync(run, run.model)
    assert engine_greedy(run.backend, PROMPTS) == greedy(run.model, PROMPTS, 6, run.backend.end_tokens)


def test_another_engine_of_the_process_can_be_closed(run, tmp_path):
    """vLLM's shutdown destroys the process groups of all engines: the next step failed."""
    other = trainer(tmp_path)
    sync(other, other.model)
    expected = greedy(other.model, PROMPTS, 6, other.backend.end_tokens)
    assert engine_greedy(other.backend, PROMPTS) == expected
    other.backend.close()
    sync(run, run.model)
    assert engine_greedy(run.backend, PROMPTS) == greedy(run.model, PROMPTS, 6, run.backend.end_tokens)
    assert torch.distributed.is_initialized()


def test_an_interrupted_generation_leaves_no_requests(run, monkeypatch):
    sync(run, run.model)
    inner, steps = run.backend.engine.llm_engine, []
    step = inner.step

    def interrupted():
        steps.append(step())
        if len(steps) == 3:
            raise KeyboardInterrupt
        return steps[-1]

    monkeypatch.setattr(inner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.backend.generate([*PROMPTS, [4, 5]])
    assert not inner.has_unfinished_requests()
    assert engine_greedy(run.backend, PROMPTS) == greedy(run.model, PROMPTS, 6, run.backend.end_tokens)


def test_equal_neighbours_are_samples_of_one_request_and_differ(run, monkeypatch):
    sync(run, run.model)
    requests = []
    calls = run.backend.calls
    monkeypatch.setattr(
        run.backend, "calls", lambda given, sampling: requests.extend(given) or calls(given, sampling)
    )
    prompts = [[4, 5]] * 8 + [[6]] * 2
    state = run.backend.snapshot()
    first = [completion.token_ids for completion in run.backend.generate(prompts)]
    other = [completion.token_ids for completion in run.backend.generate(prompts)]
    run.backend.restore(state)
    again = [completion.token_ids for completion in run.backend.generate(prompts)]
    assert [(request.prompt, len(request.rows)) for request in requests[:2]] == [([4, 5], 8), ([6], 2)]
    assert first == again != other
    assert len({tuple(tokens) for tokens in first[:8]}) > 1


def test_limits_by_row_and_ends_are_kept(run, monkeypatch):
    sync(run, run.model)
    limits = [1, 1] + [6] * 62
    monkeypatch.setitem(run.backend.sampling, "logit_bias", {1: 3.0})  # some end early
    sampling = SamplingOptions(max_tokens=limits, generation_kwargs={"temperature": 2.0})
    completions = run.backend.generate([[4, 5]] * 64, sampling)
    assert all(len(c.token_ids) <= limit for c, limit in zip(completions, limits, strict=True))
    assert {completion.truncated for completion in completions} == {True, False}
    for completion in completions:
        assert completion.truncated is not (completion.token_ids[-1] in run.backend.end_tokens)
        assert not set(completion.token_ids[:-1]) & run.backend.end_tokens


def test_a_prompt_without_room_is_refused(run):
    sync(run, run.model)
    with pytest.raises(BackendError, match=r"128 tokens.*context of 128"):
        run.backend.generate([[4] * 128])


def test_the_engine_leaves_random_numbers_alone(run):
    sync(run, run.model)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run.backend.generate([[4, 5]])
    assert torch.equal(torch.rand(3), expected)


def test_completions_have_the_digest_of_the_weights_of_their_step(run):
    digests = {step: {completion.weight_digest} for step, completion, _ in run.seen}
    assert len(digests) == 2 and set(map(len, digests.values())) == {1}
    assert digests[1] == {run.backend.weight_digests[1]} != digests[0]
    assert len(run.backend.weight_digests[1]) == 16


def test_a_flipped_bit_in_one_weight_of_the_engine_ends_the_run(run, monkeypatch):
    """The loader of the real model changes the last bit of one weight, in a matrix that vLLM repacks."""
    worker = run.backend.engine.llm_engine.model_executor.driver_worker.worker
    model, name = worker.model_runner.get_model(), "model.layers.1.mlp.up_proj.weight"
    load = model.load_weights

    def flipped(weights):
        changed = {one: tensor.detach().clone() for one, tensor in weights}
        if name in changed:
            changed[name].view(torch.int32)[3, 5] ^= 1
        return load(changed.items())

    with monkeypatch.context() as patch:
        patch.setattr(model, "load_weights", flipped)
        run.backend.invalidate_weights()
        with pytest.raises(
            BackendError, match=rf"engine does not compute.*: {re.escape(name)} has other values"
        ):
            sync(run, run.model)
    with pytest.raises(BackendError, match="call sync_weights before generate"):
        run.backend.generate(PROMPTS)
    sync(run, run.model)
    assert run.backend.generate(PROMPTS)[0].weight_digest


def test_a_head_that_keeps_the_repacked_weights_of_another_step_ends_the_run(run, monkeypatch):
    """vLLM's reload alone leaves a tied head the copy of the weights before."""
    from groupwise.compat.vllm import layerwise_reload
    from groupwise.generation.vllm.receiver import CheckpointReceiver

    def finish(self):
        layerwise_reload()[1](self.model, self.model_config)

    embedding = run.model.get_input_embeddings().weight
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(CheckpointReceiver, "finish_weight_update", finish)
        embedding += 0.1
        run.backend.invalidate_weights()
        with pytest.raises(BackendError, match=r"model\.embed_tokens\.weight has other values"):
            sync(run, run.model)
        embedding -= 0.1
    sync(run, run.model)


def test_parameters_that_vllm_derives_after_loading_need_no_weights(run):
    """Such as those of multi-head latent attention (DeepSeek), which no checkpoint has."""
    from groupwise.generation.vllm.receiver import CheckpointReceiver

    worker = run.backend.engine.llm_engine.model_executor.driver_worker.worker
    receiver = CheckpointReceiver.__new__(CheckpointReceiver)
    receiver.model = worker.model_runner.get_model()
    receiver.init_transfer_engine(None)
    names, layer = receiver.names, receiver.model.model.layers[1].self_attn.attn
    assert {name for name, _ in receiver.model.named_parameters()} == names and names
    layer.W_UV = torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)
    try:
        receiver.init_transfer_engine(None)
    finally:
        del layer.W_UV
    assert receiver.names == names


def test_an_incomplete_model_is_refused(run):
    class Incomplete(PolicyWeights):
        def full(self):
            weights = super().full()
            return ((name, tensor) for name, tensor in weights if "layers.1.mlp" not in name)

    run.backend.invalidate_weights()
    with pytest.raises(ValueError, match=r"no weights for 2 parameters.*layers\.1\.mlp"):
        run.backend.sync_weights(Incomplete(run.model), step=9)
    sync(run, run.model)
    assert engine_greedy(run.backend, PROMPTS) == greedy(run.model, PROMPTS, 6, run.backend.end_tokens)


def test_a_regex_holds_for_every_completion(run, monkeypatch):
    sync(run, run.model)
    monkeypatch.setattr(run.args, "vllm_structured_outputs_regex", r"( w1| w2)+")
    monkeypatch.setattr(run.backend, "sampling", sampling_fields(run.args, run.backend.end_tokens, ()))
    texts = run.processing_class.batch_decode(
        [completion.token_ids for completion in run.backend.generate([[4, 5]] * 8)], skip_special_tokens=True
    )
    assert all(re.fullmatch(r"( ?w1| ?w2)*", text) for text in texts), texts


def on_processes(count: int, script: str, *arguments: Any) -> str:
    here = Path(__file__).parents[1] / "support" / "workers"
    done = run_ranks(here / script, *arguments, world_size=count, timeout=240, imports=WITH_VLLM)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_an_engine_computes_with_the_experts_of_every_step(tmp_path):
    """vLLM repacks experts for its kernel on a CPU, by itself in the first load alone."""
    assert "followed" in on_processes(1, "experts_worker.py", tmp_path)


@pytest.mark.distributed
def test_two_processes_with_one_engine_over_both():
    memory = set(Path("/dev/shm").glob("*cpushm*"))
    assert on_processes(2, "tensor_parallel_worker.py").count("sampled with 2") == 2
    # What remains has the same name in the next run, which then does not start.
    assert set(Path("/dev/shm").glob("*cpushm*")) <= memory


@pytest.mark.distributed
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_partitioned_weights_are_streamed_whole_and_the_engine_follows_them(tmp_path):
    assert on_processes(2, "zero_worker.py", tmp_path).count("followed") == 2


def test_truncated_samples_carry_their_kept_tokens_with_top_k_alone(tmp_path):
    settings = {"top_k": 6, "top_p": 0.8, "temperature": 0.7, "max_steps": 1}
    run = trainer(tmp_path, **settings, eval_generation_kwargs={"top_k": 25})
    run.train()
    log = run.state.log_history[0]
    # Truncated on both sides: float32 by other kernels
    assert log["sampling/sampling_logp_difference/max"] < 1e-4 and log["sampling/logprob_mismatch"] < 1e-4
    assert "sampling/truncated_mass/mean" not in log

    sync(run, run.model)
    for options, size in (({}, 6), ({"top_p": 1.0, "top_k": 25}, 25), ({"min_p": 0.9}, 6)):
        sampling = SamplingOptions(generation_kwargs=options)
        for prompt, completion in zip(PROMPTS, run.backend.generate(PROMPTS, sampling), strict=True):
            ids = torch.tensor([prompt + completion.token_ids])
            with torch.no_grad():
                logits = run.model.eval()(ids).logits[0, len(prompt) - 1 : -1] / 0.7
            parts = completion.sampling_mask.ids.split(completion.sampling_mask.counts.tolist())
            for values, part, token, logp in zip(
                logits, parts, completion.token_ids, completion.logps, strict=True
            ):
                assert token in part.tolist() and len(part) <= size
                most_probable = values.topk(len(part)).indices
                assert set(part.tolist()) == set(most_probable.tolist())
                own = values[token] - values[part.long()].logsumexp(0)
                assert own.item() == pytest.approx(logp, abs=1e-4)

    # With top_p alone the set may be of any size and is not reported; the bias is bounded by top_p.
    sampling = SamplingOptions(generation_kwargs={"top_k": 0, "top_p": 0.7})
    gaps = []
    for prompt, completion in zip(PROMPTS, run.backend.generate(PROMPTS, sampling), strict=True):
        assert completion.sampling_mask is None
        full = trainer_logps(run.model, prompt, completion.token_ids, 0.7)
        gaps.append(torch.tensor(completion.logps).double() - full)
    gaps = torch.cat(gaps)
    assert gaps.min() > -1e-4 and 0.1 < gaps.max() < -math.log(0.7) + 1e-4
    run.backend.close()


def test_an_adapter_arrives_alone(tmp_path):
    """Merged ones arrive in the test of adapters of the head."""
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    engine = {**ENGINE, "enable_lora": True}
    run = trainer(tmp_path, peft_config=adapter, learning_rate=0.05, vllm_engine_kwargs=engine)
    run.train()
    assert run.state.log_history[1]["sampling/sampling_logp_difference/mean"] < 1e-4
    sync(run, run.model)
    got = engine_greedy(run.backend, PROMPTS)
    assert got == greedy(run.model, PROMPTS, 6, run.backend.end_tokens)
    with run.model.disable_adapter():
        assert got != greedy(run.model, PROMPTS, 6, run.backend.end_tokens)
    run.backend.close()


@pytest.mark.parametrize(
    ("tied", "settings"),
    [(True, {"trainable_token_indices": [5, 6, 9]}), (False, {"target_modules": ["q_proj", "lm_head"]})],
    ids=str,
)
def test_an_engine_follows_an_adapter_of_the_head_that_ligers_loss_trains(tmp_path, tied, settings):
    pytest.importorskip("liger_kernel")
    adapter = LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **settings})
    model = policy(tie_word_embeddings=tied)
    run = trainer(tmp_path, model=model, peft_config=adapter, learning_rate=0.2, use_liger_kernel=True)
    run.train()
    assert run.state.log_history[1]["sampling/sampling_logp_difference/max"] < 1e-4
    sync(run, run.model)
    got = engine_greedy(run.backend, PROMPTS)
    assert got == greedy(run.model, PROMPTS, 6, run.backend.end_tokens)
    with run.model.disable_adapter():
        assert got != greedy(run.model, PROMPTS, 6, run.backend.end_tokens)
    run.backend.close()


def test_an_engine_follows_the_adapter_of_a_4_bit_policy(tmp_path):
    pytest.importorskip("bitsandbytes")
    assert_follows_four_bits(trainer(tmp_path, **four_bit_policy(tmp_path / "base")), PROMPTS)


def test_an_engine_made_of_transformers_own_classes_follows_and_leaves_them(tmp_path):
    config = policy().config.to_dict() | {"head_dim": 32, "model_type": "qwen3", "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    cls = type(model.model)
    before = cls.__bases__, dict(vars(cls))
    run = trainer(tmp_path, model=model, vllm_model_impl="transformers", learning_rate=0.05)
    assert (cls.__bases__, dict(vars(cls))) == before
    run.train()
    for line in run.state.log_history[:2]:
        assert line["sampling/logprob_mismatch"] < 1e-4  # logged for groups of equal rewards too
    old = engine_greedy(run.backend, PROMPTS)
    sync(run, run.model)
    new = engine_greedy(run.backend, PROMPTS)
    engine = run.backend.engine.llm_engine.engine_core.engine_core.model_executor.driver_worker
    assert type(engine.worker.model_runner.model).__name__ == "TransformersForCausalLM"
    run.backend.close()
    assert new == greedy(run.model, PROMPTS, 6, run.backend.end_tokens) != old
