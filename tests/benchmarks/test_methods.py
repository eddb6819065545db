"""The unified paradigm of DeepSeekMath: gradient coefficients, computed and by their formulas."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import methods
import pytest
import torch
from support.oracles import cases
from support.runs import chats, policy, tokenizer, trainer

from groupwise.core.advantages import ADVANTAGES, AdvantageSettings
from groupwise.core.objectives import ObjectiveSettings
from groupwise.core.surrogates import SurrogateSettings
from groupwise.core.weights import WindowCounts
from groupwise.records import RewardBatch
from groupwise.records.rollout import GroupRewards

ROOT = Path(__file__).resolve().parents[2]
RNG = random.Random(0)
ROWS, WIDTH, BETA = 4, 5, 0.3
LENGTHS = [5, 3, 1, 4]
CORRECT = [1.0, 0.0, 0.0, 1.0]
LOGPS, REF = ([[-RNG.expovariate(1) for _ in range(WIDTH)] for _ in range(ROWS)] for _ in range(2))
STEPS = [[(length - 1, RNG.random()), (0, RNG.random())] for length in LENGTHS]
GAE = [[RNG.gauss(0, 1) for _ in range(WIDTH)] for _ in range(ROWS)]


@pytest.fixture(autouse=True)
def registered(warnings_and_registrations_end_with_their_test):
    methods.register()


def tensor(rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def coefficients(
    advantages: torch.Tensor, beta: float = 0.0, normalizer: str = "sequence_mean"
) -> list[list[float]]:
    """Gradient coefficient GC of every token: ∇J = 1/N Σ_i 1/|o_i| Σ_t GC_it ∇log π_θ(o_it)."""
    mask = tensor([[float(t < length) for t in range(WIDTH)] for length in LENGTHS])
    counts = WindowCounts(ROWS, sum(LENGTHS), 1, 1, WIDTH)
    terms = cases.Terms(
        logps_BT=tensor(LOGPS).requires_grad_(),
        advantages_BX=advantages if advantages.dim() == 2 else advantages.unsqueeze(1),
        loss_mask_BT=mask,
        token_weights_BT=cases.weights(normalizer, mask, counts),
        ref_logps_BT=tensor(REF) if beta else None,
    )
    chosen = ObjectiveSettings(loss_type="grpo", beta=beta, surrogate=SurrogateSettings())
    loss, _ = cases.evaluate(terms, chosen)
    (gradient,) = torch.autograd.grad(loss, terms.logps_BT)
    scale = tensor([[ROWS * (length if normalizer == "sequence_mean" else 1)] for length in LENGTHS])
    return (-gradient * scale).tolist()


def advantages(name: str, **changes: object) -> torch.Tensor:
    table = {"rewards_NF": tensor([[r] for r in CORRECT]), "num_generations": 4, **changes}
    return ADVANTAGES[name](GroupRewards(weights_F=tensor([1.0]), **table), AdvantageSettings())


def group_relative(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) + 1e-4


def sft():
    return coefficients(advantages("rft", rewards_NF=tensor([[1.0]] * 4))), lambda i, t: 1.0


def online_rft():
    return coefficients(advantages("rft")), lambda i, t: CORRECT[i]


def dpo():
    """Pairs (0, 1), preferred 0, and (2, 3), preferred 3."""
    log_ratio = [sum(LOGPS[i][t] - REF[i][t] for t in range(LENGTHS[i])) for i in range(ROWS)]
    given = {"penalty_N": BETA * tensor(log_ratio), "num_generations": 2}
    found = coefficients(advantages("dpo", **given), normalizer="sequence_sum")
    better, worse = {0: 0, 1: 0, 2: 3, 3: 3}, {0: 1, 1: 1, 2: 2, 3: 2}

    def formula(i: int, t: int) -> float:
        margin = BETA * log_ratio[worse[i]] - BETA * log_ratio[better[i]]
        return (1 if better[i] == i else -1) / (1 + math.exp(-margin))

    return found, formula


def ppo():
    return coefficients(tensor(GAE)), lambda i, t: GAE[i][t]


def grpo():
    mean, std = group_relative(CORRECT)

    def formula(i: int, t: int) -> float:
        return (CORRECT[i] - mean) / std + BETA * (math.exp(REF[i][t] - LOGPS[i][t]) - 1)

    return coefficients(advantages("group_mean"), BETA), formula


def grpo_process():
    mean, std = group_relative([reward for steps in STEPS for _, reward in steps])
    given = {"rewards_NF": tensor([[math.nan]] * 4), "step_rewards": {0: STEPS}, "num_tokens": WIDTH}

    def formula(i: int, t: int) -> float:
        later = sum((reward - mean) / std for end, reward in STEPS[i] if end >= t)
        return later + BETA * (math.exp(REF[i][t] - LOGPS[i][t]) - 1)

    return coefficients(advantages("group_mean", **given), BETA), formula


CASES = {
    "SFT": sft,
    "RFT": online_rft,
    "online RFT": online_rft,
    "DPO": dpo,
    "PPO": ppo,
    "GRPO, outcome": grpo,
    "GRPO, process": grpo_process,
}


@pytest.mark.parametrize("method", CASES)
def test_the_gradient_coefficient_is_that_of_the_table(method):
    found, formula = CASES[method]()
    for i in range(ROWS):
        expected = [formula(i, t) if t < LENGTHS[i] else 0.0 for t in range(WIDTH)]
        assert found[i] == pytest.approx(expected, rel=0, abs=1e-9)
    assert max(abs(value) for row in found for value in row) > 0.1


def test_the_page_of_the_paper_has_these_methods():
    section = (
        (ROOT / "docs" / "paper.md").read_text().partition("## The unified paradigm")[2].partition("\n## ")[0]
    )
    assert re.findall(r"^\| ([^|$]+?) \|", section, flags=re.M)[1:] == list(CASES)


def test_the_update_of_dpo_pairs_is_the_gradient_of_the_dpo_loss():
    logps = tensor(LOGPS).requires_grad_()
    mask = tensor([[float(t < length) for t in range(WIDTH)] for length in LENGTHS])
    margin = BETA * ((logps - tensor(REF)) * mask).sum(-1)
    loss = -torch.nn.functional.logsigmoid(margin[[0, 3]] - margin[[1, 2]]).sum()
    (gradient,) = torch.autograd.grad(loss, logps)
    found, _ = dpo()
    torch.testing.assert_close(-gradient / BETA, tensor(found), rtol=0, atol=1e-12)


def test_dpo_needs_pairs_and_a_reference():
    with pytest.raises(ValueError, match="needs num_generations=2, beta > 0"):
        advantages("dpo")
    tie = {"rewards_NF": tensor([[1.0], [1.0], [math.nan], [0.0]]), "penalty_N": tensor([0.1, 0.2, 0.3, 0.4])}
    assert advantages("dpo", num_generations=2, **tie).tolist() == [0.0] * 4


def test_a_missing_reward_is_not_correct():
    assert advantages("rft", rewards_NF=tensor([[math.nan], [0.0], [1.0], [0.5]])).tolist() == [0, 0, 1, 1]


def test_replayed_completions_make_the_update_of_supervised_fine_tuning(tmp_path):
    """One step of SGD on stored texts: the gradient of the mean token cross-entropy of each text."""
    data = chats(2)
    texts = {row["prompt"][-1]["content"]: [f"w{i} w3 w4", f"w{i}"] for i, row in enumerate(data)}
    run = trainer(
        tmp_path,
        lambda completions, **_: [1.0] * len(completions),
        train_dataset=data,
        rollout_func=methods.replay(texts),
        advantage_baseline="rft",
        loss_type="grpo",
        num_generations=2,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=0.0,
    )
    run.train()
    model, words, loss = policy(), tokenizer(), 0.0
    for row in data:
        prompt = words.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        for text in texts[row["prompt"][-1]["content"]]:
            answer = [*words(text)["input_ids"], words.eos_token_id]
            labels = torch.tensor([[-100] * len(prompt) + answer])
            loss = loss + model(input_ids=torch.tensor([prompt + answer]), labels=labels).loss / 4
    loss.backward()
    for trained, expected in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained, expected - expected.grad, rtol=1e-4, atol=1e-6)


def test_stale_samples_come_from_the_policy_of_earlier_steps(tmp_path):
    """Staleness 2: initial policy in the first three steps, then that of two updates before."""
    run = trainer(
        tmp_path,
        train_dataset=chats(),
        rollout_func=methods.stale_samples(2),
        max_steps=4,
        per_device_train_batch_size=8,
        logprob_mismatch_check="off",
    )
    current, sampling = [], []
    inner, generate = run.rollout_func, run.backend.generate

    def parameters() -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in run.model.parameters()]

    def watched(prompts, options):
        sampling.append(parameters())
        return generate(prompts, options)

    def rollout(prompts, trainer):
        current.append(parameters())
        found = inner(prompts, trainer)
        torch.testing.assert_close(parameters(), current[-1], rtol=0, atol=0)  # the policy is back
        with methods.weights(run.model, sampling[-1]):
            for ids, completion, logps in zip(*found.values(), strict=True):
                with torch.no_grad():
                    logits_TV = run.model(torch.tensor([ids + completion])).logits[0, len(ids) - 1 : -1]
                expected = logits_TV.log_softmax(-1)[range(len(completion)), completion].tolist()
                assert logps == pytest.approx(expected, abs=1e-5)
        return found

    run.rollout_func, run.backend.generate = rollout, watched
    run.train()
    assert len({float(sum(p.sum() for p in values)) for values in current}) == 4  # every step updates
    for step, updates in enumerate([0, 0, 0, 1]):
        torch.testing.assert_close(sampling[step], current[updates], rtol=0, atol=0)
    gaps = [log["sampling/sampling_logp_difference/mean"] for log in run.state.log_history[:4]]
    assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-3


def test_dpo_pairs_through_the_trainer(tmp_path):
    run = trainer(
        tmp_path,
        advantage_baseline="dpo",
        loss_type="luspo",
        beta=0.1,
        kl_in_reward=True,
        kl_estimator="k1",
        num_generations=2,
    )
    seen: list[torch.Tensor] = []
    inner = run.compute_advantages

    def compute_advantages(rewards: RewardBatch) -> torch.Tensor:
        seen.append(inner(rewards))
        return seen[-1]

    run.compute_advantages = compute_advantages
    run.train()
    # The reference is the initial policy: before the first update every margin is 0, and σ(0) = 1/2.
    assert set(seen[0].abs().tolist()) <= {0.0, 0.5} and seen[0].abs().max() == 0.5


def test_preference_rows_pair_a_correct_and_a_wrong_completion():
    rows = methods.preference_rows(
        {"q": ["1", "2"], "r": ["3"]}, {"q": ["4"]}, {"q": [{"role": "user", "content": "q"}]}
    )
    assert [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows] == [("1", "4")]
