"""On-policy distillation: the reward of a token, its advantage, and the update that it makes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from support.runs import count_reward, generate, policy, tokenizer, trainer

from groupwise import ConfigError
from groupwise.core.advantages import ADVANTAGES, AdvantageSettings
from groupwise.core.kl import KL_ESTIMATORS
from groupwise.core.surrogates import SurrogateInputs, SurrogateSettings, clipped
from groupwise.records import Completion
from groupwise.records.rollout import GroupRewards
from groupwise.rewards import get_distillation_reward


def logprob_loop(model, prompt_ids, completion_ids, temperature=1.0) -> list[float]:
    """Log-probs of one completion, one forward pass per token."""
    found = []
    for index, token in enumerate(completion_ids):
        context = torch.tensor([[*prompt_ids, *completion_ids[:index]]])
        with torch.no_grad():
            logits = model(input_ids=context).logits[0, -1].double() / temperature
        found.append(torch.log_softmax(logits, 0)[token].item())
    return found


def test_the_reward_is_the_log_ratio_of_teacher_and_policy_at_the_sampling_temperature(tmp_path):
    teacher = policy(seed=1, hidden_size=24, num_hidden_layers=1)
    run = trainer(tmp_path, get_distillation_reward(teacher), temperature=0.7)
    rollouts = generate(run, [run.train_dataset[3]] * 4)
    (steps,) = run.compute_rewards(rollouts).step_rewards.values()
    for row, found in enumerate(steps):
        given = rollouts.prompt_ids[row], rollouts.completions[row].token_ids
        ours, theirs = (logprob_loop(model, *given, 0.7) for model in (run.model, teacher))
        assert [index for index, _ in found] == list(range(len(ours)))
        expected = [t - o for t, o in zip(theirs, ours, strict=True)]
        assert [reward for _, reward in found] == pytest.approx(expected, abs=1e-5)
        assert max(map(abs, expected)) > 1e-2


def test_a_teacher_equal_to_the_policy_gives_zero(tmp_path):
    run = trainer(tmp_path, get_distillation_reward(policy()), advantage_baseline="per_token")
    rewards = run.compute_rewards(generate(run, [run.train_dataset[3]] * 4))
    (steps,) = rewards.step_rewards.values()
    assert max(abs(reward) for row in steps for _, reward in row) < 1e-6
    assert run.compute_advantages(rewards).abs().max() < 1e-6


def test_tokens_without_loss_and_dropped_completions_have_no_reward(tmp_path):
    run = trainer(tmp_path, get_distillation_reward(policy(seed=1)), rollout_on_error="retry")
    rollouts = generate(run, [run.train_dataset[3]] * 4)
    rollouts.completions[0] = Completion([5, 6, 7], loss_mask=[1, 0, 1])
    rollouts.completions[1] = Completion([5, 6], dropped=True)
    (steps,) = run.compute_rewards(rollouts).step_rewards.values()
    assert [index for index, _ in steps[0]] == [0, 2] and steps[1] == []
    assert len(steps[2]) == len(rollouts.completions[2].token_ids)


def random_steps(rng: random.Random) -> list[list[tuple[int, float]]]:
    return [[(t, rng.gauss(0, 1)) for t in range(rng.randint(0, 5))] for _ in range(8)]


@pytest.mark.parametrize("scale", ["group", "none"])
def test_per_token_advantages_against_a_loop(scale):
    """Two process rewards and an outcome reward: A_it = A_i + Σ_f w_f r_it^f."""
    rng = random.Random(3)
    outcome = [rng.gauss(0, 1) for _ in range(8)]
    weights, steps = [0.5, 2.0, -3.0], [random_steps(rng), random_steps(rng)]
    table = torch.tensor([[o, math.nan, math.nan] for o in outcome], dtype=torch.float64)
    both = {1: steps[0], 2: steps[1]}
    rewards = GroupRewards(table, torch.tensor(weights, dtype=torch.float64), 4, both, num_tokens=6)
    got = ADVANTAGES["per_token"](rewards, AdvantageSettings(scale))
    for row in range(8):
        group = [0.5 * r for r in outcome[row // 4 * 4 : row // 4 * 4 + 4]]
        mean = sum(group) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / 3)
        first = (0.5 * outcome[row] - mean) / (std + 1e-4 if scale == "group" else 1.0)
        for t in range(6):
            here = [w * r for w, of in zip(weights[1:], steps, strict=True) for i, r in of[row] if i == t]
            assert got[row, t].item() == pytest.approx(first + sum(here), abs=1e-12)


def test_outcome_rewards_alone_are_those_of_the_group_mean():
    rewards = GroupRewards(torch.tensor([[1.0], [2.0], [3.0], [6.0]]), torch.tensor([1.0]), 4)
    got, expected = (ADVANTAGES[name](rewards, AdvantageSettings()) for name in ("per_token", "group_mean"))
    assert got.shape == (4,) and torch.equal(got, expected)


def test_loss_and_gradient_against_a_loop_and_against_the_k2_estimator():
    """−Σ w_t ρ_t (log π_T − log π_θ) at ρ = 1; the gradient is that of k2 to the teacher as reference."""
    rng = random.Random(5)
    ours, theirs = ([[-rng.expovariate(1) for _ in range(4)] for _ in range(2)] for _ in range(2))
    weight = [[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]]
    logps = torch.tensor(ours, dtype=torch.float64, requires_grad=True)
    reference, weights_BT = (torch.tensor(rows, dtype=torch.float64) for rows in (theirs, weight))
    steps = [[(t, theirs[i][t] - ours[i][t]) for t in range(4)] for i in range(2)]
    rewards = GroupRewards(
        torch.full((2, 1), math.nan, dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
        2,
        {0: steps},
        4,
    )
    advantages = ADVANTAGES["per_token"](rewards, AdvantageSettings())
    log_ratio = logps - logps.detach()
    inputs = SurrogateInputs(
        logps_BT=logps,
        old_logps_BT=logps.detach(),
        log_ratio_BT=log_ratio,
        ratio_BX=log_ratio.exp(),
        advantages_BX=advantages,
        loss_mask_BT=(weights_BT > 0).double(),
        group_ids_B=torch.zeros(2, dtype=torch.long),
    )
    loss = (clipped(inputs, SurrogateSettings()) * weights_BT).sum()
    (gradient,) = torch.autograd.grad(loss, logps)
    value = 0.0
    for i in range(2):
        for t in range(4):
            signal = theirs[i][t] - ours[i][t]
            value -= weight[i][t] * signal
            assert gradient[i, t].item() == pytest.approx(-weight[i][t] * signal, abs=1e-12)
    assert loss.item() == pytest.approx(value, abs=1e-12)
    kl = (KL_ESTIMATORS["k2"](logps, reference) * weights_BT).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(kl, logps)[0], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_training_moves_the_policy_towards_the_teacher(tmp_path):
    teacher = policy(seed=1, initializer_range=0.3)
    run = trainer(
        tmp_path,
        get_distillation_reward(teacher),
        advantage_baseline="per_token",
        per_device_train_batch_size=32,
        max_completion_length=1,  # so that the prompts are all contexts
        max_steps=20,
    )
    contexts = [
        torch.tensor([run.processing_class(text)["input_ids"]]) for text in run.train_dataset["prompt"]
    ]

    @torch.no_grad()
    def reverse_kl() -> float:
        total = 0.0
        for ids in contexts:
            models = run.model.eval(), teacher
            ours, theirs = (model(input_ids=ids).logits[0, -1].log_softmax(-1) for model in models)
            total += (ours.exp() * (ours - theirs)).sum().item()
        return total

    before = reverse_kl()
    run.train()
    assert reverse_kl() < 0.75 * before


def test_outcome_rewards_can_be_added(tmp_path):
    run = trainer(
        tmp_path,
        [count_reward, get_distillation_reward(policy(seed=1))],
        advantage_baseline="per_token",
        reward_weights=[1.0, 0.5],
    )
    rewards = run.compute_rewards(generate(run, [run.train_dataset[3]] * 4))
    (steps,) = rewards.step_rewards.values()
    outcome = rewards.rewards_NF[:, 0]
    first = (outcome - outcome.mean()) / (outcome.std() + 1e-4)
    got = run.compute_advantages(rewards)
    assert got[:, 0].tolist() == pytest.approx(
        [a + 0.5 * row[0][1] for a, row in zip(first.tolist(), steps, strict=True)], abs=1e-5
    )


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the teacher has 24 token embeddings.*vocabulary 32 tokens"):
        trainer(tmp_path, get_distillation_reward(policy(vocab_size=24)))
    other = tokenizer()
    other.add_tokens(["another"])
    with pytest.raises(ConfigError, match="another vocabulary than the policy"):
        trainer(tmp_path, get_distillation_reward(policy(vocab_size=40), other))
    # Embeddings padded to other sizes than the tokenizer's are allowed, for the teacher and for the policy.
    trainer(tmp_path, get_distillation_reward(policy(vocab_size=40), tokenizer()))
    trainer(tmp_path, get_distillation_reward(policy(vocab_size=36)), model=policy(vocab_size=40))


def test_a_teacher_is_loaded_by_its_id(tmp_path):
    policy(seed=1).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    reward = get_distillation_reward(str(tmp_path))
    assert reward.tokenizer.get_vocab() == tokenizer().get_vocab() and not reward.teacher.training
    assert not any(parameter.requires_grad for parameter in reward.teacher.parameters())
