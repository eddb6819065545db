"""Multi-turn rollouts with a real vLLM engine: one token history, one version of the weights per step."""

from __future__ import annotations

import asyncio
import copy
import math
from typing import Any, ClassVar

import pytest
import torch
from packaging.version import Version
from support.agent_runs import LETTERS, calls_reward, measure, tokenizer, trainer
from support.engine_runs import vllm_version
from support.workers.vllm_process import ServerProcess
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

ENGINE = {"kv_cache_memory_bytes": 2**26, "max_num_seqs": 32}


def policy(text: Any) -> LlamaForCausalLM:
    """A random policy in a shape that vLLM's CPU kernels support; it mostly samples letters and the end."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(text),
            max_position_embeddings=1024,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=text.eos_token_id,
            **shape,
        )
    )
    said = [*text.convert_tokens_to_ids(list(LETTERS)), text.eos_token_id]
    with torch.no_grad():  # the first entry of every hidden state is about the same: a bias
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.lm_head.weight[:, 0] = -0.8
        model.lm_head.weight[said, 0] = 0.8
    return model


def logps_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probs of all tokens of a rollout, from one forward of the trainer's model."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.slow
def test_turns_continue_one_history_and_tokens_of_tools_are_masked(tmp_path):
    text = tokenizer()
    run = trainer(
        tmp_path,
        processing_class=text,
        model=policy(text),
        tools=[measure],
        use_vllm=True,
        vllm_engine_kwargs=ENGINE,
        generation_kwargs=None,
        learning_rate=1e-2,
    )
    calls: list[Any] = []
    rollouts: list[Any] = []
    generate, generate_rollouts = run.backend.generate, run.generate_rollouts

    def watched_generate(prompts: Any, sampling: Any) -> Any:
        answers = generate(prompts, sampling)
        calls[-1] += zip([list(prompt) for prompt in prompts], answers, strict=True)
        return answers

    def watched_generate_rollouts(request: Any) -> Any:
        calls.append([])
        rollout = generate_rollouts(request)
        model = run.model.eval()
        expected = [
            logps_of(model, prompt, completion.token_ids)
            for prompt, completion in zip(rollout.prompt_ids, rollout.completions, strict=True)
        ]
        rollouts.append((rollout, expected))
        return rollout

    run.backend.generate, run.generate_rollouts = watched_generate, watched_generate_rollouts
    run.train()
    run.backend.close()
    logs = [line for line in run.state.log_history if "tools/call_frequency" in line]
    assert len(logs) == len(rollouts) == 2
    for line in logs:
        assert line["tools/call_frequency"] > 0
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    for step, (turns, (rollout, expected)) in enumerate(zip(calls, rollouts, strict=True)):
        assert len(turns) > len(rollout.completions)  # at least one rollout had a second turn
        for prompt, completion, logps in zip(rollout.prompt_ids, rollout.completions, expected, strict=True):
            mask = torch.tensor(completion.loss_mask, dtype=torch.bool)
            reported = torch.tensor(completion.logps, dtype=torch.float64)
            assert torch.equal(reported.isnan(), ~mask)  # log-probs exist for sampled tokens only
            torch.testing.assert_close(reported[mask], logps[mask], atol=1e-4, rtol=0)
            assert completion.versions == [step] * len(completion.token_ids)
            assert_turns(prompt, completion, turns)
        observed = [
            text.decode([token for token, kept in zip(c.token_ids, c.loss_mask, strict=True) if not kept])
            for c in rollout.completions
        ]
        assert any("<|im_start|>tool" in answer for answer in observed)


class Scale:
    """An environment with the tool; ``reset`` draws from the user's random stream.

    In every second conversation the tool answers once the server has the weights of the step that takes it.
    """

    run: ClassVar[Any] = None
    resets: ClassVar[int] = 0

    def reset(self, **row: Any) -> str:
        batch, index = divmod(Scale.resets, 4)
        Scale.resets += 1
        batch = {0: 1, 1: 0}.get(batch, batch)  # the first step resets the batch of the second one first
        self.version = batch if index % 2 else 0
        self.shown = f" {torch.rand(()).item():.4f}"
        return self.shown

    async def measure(self, text: str) -> int:
        """Measure a text.

        Args:
            text: what to measure.
        """
        while (self.run.backend.version or 0) < self.version:
            await asyncio.sleep(0.01)
        return measure(text)


def calls_in_own_environment(
    completions: list[Any], environments: list[Any], prompts: list[Any], **_: Any
) -> list[float]:
    shown = zip(prompts, environments, strict=True)
    assert all(prompt[-1]["content"].endswith(environment.shown) for prompt, environment in shown)
    return calls_reward(completions)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(vllm_version() < Version("0.32"), reason="it does not report the weights of each token")
def test_conversations_continue_over_the_update_on_a_server(tmp_path):
    text = tokenizer()
    policy(text).save_pretrained(tmp_path / "model")
    text.save_pretrained(tmp_path / "model")
    server = ServerProcess(tmp_path).start()
    Scale.resets = 0
    run = Scale.run = trainer(
        tmp_path / "run",
        processing_class=text,
        model=policy(text),
        environment_factory=Scale,
        reward_funcs=calls_in_own_environment,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server.url,
        vllm_server_timeout=240.0,
        rollout_staleness=1,
        generation_kwargs=None,
        max_completion_length=400,
        learning_rate=1e-3,
        max_steps=3,
    )
    generate_rollouts, turns, policies = run.generate_rollouts, [], {}

    def watched(request: Any) -> Any:
        step = run.state.global_step
        policies[step] = copy.deepcopy(run.model).eval()
        rollout = generate_rollouts(request)
        for prompt, completion in zip(rollout.prompt_ids, rollout.completions, strict=True):
            tokens, versions = completion.token_ids, completion.versions
            by_step = {version: logps_of(policies[version], prompt, tokens) for version in set(versions)}
            turns.append((step, [set(versions[a:b]) for a, b in completion.turns]))
            assert all(step - 1 <= version <= step for version in versions)
            for index, (version, logp, kept) in enumerate(
                zip(versions, completion.logps, completion.loss_mask, strict=True)
            ):
                assert not kept or abs(logp - by_step[version][index].item()) < 1e-4
        return rollout

    run.generate_rollouts = watched
    try:
        server.wait()
        run.train()
        run.backend.close()
    finally:
        server.kill()
    later = [(step, versions, first) for step, (first, *others) in turns[4:] for versions in others]
    assert any(step - 1 in versions for step, versions, _ in later)  # beside the update
    assert any(versions == {step} and first == {step - 1} for step, versions, first in later)  # over it


def assert_turns(prompt: list[int], completion: Any, turns: list[Any]) -> None:
    """Check that each sampled part of a completion is the engine's response to all tokens before it."""
    start = 0
    tokens, mask = completion.token_ids, completion.loss_mask
    while start < len(tokens):
        end = start
        while end < len(tokens) and mask[end] == mask[start]:
            end += 1
        if mask[start]:
            answers = [answer for context, answer in turns if context == prompt + tokens[:start]]
            own = [answer for answer in answers if answer.token_ids == tokens[start:end]]
            assert own, (start, end)
            assert any(answer.logps == completion.logps[start:end] for answer in own)
        start = end
    assert all(math.isfinite(logp) for logp, kept in zip(completion.logps, mask, strict=True) if kept)
