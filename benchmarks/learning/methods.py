"""The methods of DeepSeekMath's unified paradigm (section 5.2) on one pipeline.

A method is a source of completions and a gradient coefficient. The coefficient is an advantage estimator of
the public registry; offline completions come from a ``rollout_func``.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from groupwise import SamplingOptions, register_advantage
from groupwise.compat.transformers import cache_argument
from groupwise.core.advantages import ADVANTAGES, AdvantageSettings, total_rewards, weighted_sum
from groupwise.policy.introspection import evaluation_mode
from groupwise.records.rollout import GroupRewards

#: Completions (texts) of an offline method by question, the last message of the prompt.
Samples = Mapping[str, Sequence[str]]

#: Completions that are sampled at once.
BATCH = 64


def rft(rewards: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """A_i = 1 for a correct completion, else 0: SFT, RFT, online RFT (DeepSeekMath eq. 10). Returns (N,)."""
    total_N = total_rewards(rewards, settings.aggregation)
    return (total_N > 0).to(total_N)  # a missing reward (NaN) is not correct


def dpo(rewards: GroupRewards, settings: AdvantageSettings) -> torch.Tensor:
    """A = ±σ(β Σ log π_θ/π_ref of the rejected − of the preferred completion) in pairs (DeepSeekMath eq. 14).

    Pairs are groups of two; the one with the higher reward is preferred, and a tie has no gradient. The
    log-ratios are the KL penalty of ``kl_in_reward=True`` with ``kl_estimator="k1"`` and weight β. With
    ``loss_type="luspo"`` (sum over tokens) the gradient is 1/β times that of DPO (arXiv 2305.18290, eq. 7).

    Returns:
        (N,)

    Raises:
        ValueError: groups are no pairs, or the KL is not in the reward.
    """
    if rewards.num_generations != 2 or rewards.penalty_N is None:
        raise ValueError("advantage_baseline='dpo' needs num_generations=2, beta > 0 and kl_in_reward=True")
    reward_P2 = weighted_sum(rewards.rewards_NF, rewards.weights_F, 2).view(-1, 2)
    log_ratio_P2 = rewards.penalty_N.view(-1, 2)  # β Σ_t (ℓ − ℓ_ref)
    sign_P2 = (reward_P2 - reward_P2.flip(-1)).nan_to_num(nan=0.0).sign()
    return (sign_P2 * torch.sigmoid(sign_P2 * (log_ratio_P2.flip(-1) - log_ratio_P2))).view(-1)


def register() -> None:
    """Make ``advantage_baseline="rft"`` and ``"dpo"`` available; a second call has no effect."""
    for estimator in (rft, dpo):
        if estimator.__name__ not in ADVANTAGES:
            register_advantage(estimator.__name__, estimator)


def replay(samples: Samples) -> Any:
    """Return a ``rollout_func`` that replays stored completions: SFT on solutions, RFT on filtered samples.

    Each question cycles through its completions, also over epochs. Other questions, as in an evaluation,
    are sampled by the trainer's backend.
    """
    cycles = {question: itertools.cycle(texts) for question, texts in samples.items()}

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        chats = chat_ids(prompts, tokenizer)
        questions = [prompt[-1]["content"] for prompt in prompts]
        sampled = [row for row, question in enumerate(questions) if question not in cycles]
        found = (
            trainer.backend.generate([chats[row] for row in sampled], SamplingOptions()) if sampled else []
        )
        completion_ids = {row: one.token_ids for row, one in zip(sampled, found, strict=True)}
        for row, question in enumerate(questions):
            if question in cycles:
                ids = tokenizer(next(cycles[question]), add_special_tokens=False)["input_ids"]
                completion_ids[row] = [*ids, tokenizer.eos_token_id]
        return {"prompt_ids": chats, "completion_ids": [completion_ids[row] for row in range(len(prompts))]}

    return rollout


def stale_samples(staleness: int) -> Any:
    """Return a ``rollout_func`` that samples from the policy of ``staleness`` optimizer steps before.

    It returns that policy's log-probs, so that the trainer logs the difference, and corrects for it with
    ``rollout_func_importance_sampling_correction=True``. The first steps have the initial policy. Needs one
    generation per optimizer step; keeps ``staleness + 1`` copies of the weights.
    """
    snapshots: deque[list[torch.Tensor]] = deque(maxlen=staleness + 1)

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        chats = chat_ids(prompts, trainer.processing_class)
        snapshots.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
        with weights(trainer.model, snapshots[0]), evaluation_mode(trainer.model):
            completions = [one.token_ids for one in trainer.backend.generate(chats, SamplingOptions())]
            logps = sampled_logps(trainer.model, chats, completions)
        return {"prompt_ids": chats, "completion_ids": completions, "logprobs": logps}

    return rollout


@contextmanager
def weights(model: torch.nn.Module, values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give the parameters of ``model`` other values; afterwards they have their own again."""

    def assign(values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)

    own = [parameter.detach().clone() for parameter in model.parameters()]
    assign(values)
    try:
        yield
    finally:
        assign(own)


@torch.no_grad()
def token_logprobs(
    model: Any, prompts: Sequence[list[int]], completions: Sequence[list[int]]
) -> Iterator[torch.Tensor]:
    """Yield the log-probs of the vocabulary at every token of every completion, (T, V), at temperature 1.

    Consecutive rows with one prompt share its keys and values. Completions are padded on the right, where
    causal attention hides the padding from the tokens before it.
    """
    for prompt, rows in itertools.groupby(range(len(prompts)), key=lambda row: prompts[row]):
        group = [completions[row] for row in rows]
        ids_GT = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in group], batch_first=True)
        ids_GT = ids_GT.to(model.device)
        read = model(torch.tensor([prompt], device=model.device), use_cache=True)
        name = cache_argument(model)  # of the forward and its outputs
        cache = read[name]
        cache.batch_repeat_interleave(len(group))
        first_G1V = read.logits[:, -1:].expand(len(group), -1, -1)
        logits_GTV = torch.cat([first_G1V, model(ids_GT, **{name: cache}).logits[:, :-1]], dim=1)
        for logits_TV, one in zip(logits_GTV, group, strict=True):
            yield logits_TV[: len(one)].float().log_softmax(-1)


def sampled_logps(
    model: Any, prompts: Sequence[list[int]], completions: Sequence[list[int]]
) -> list[list[float]]:
    """Return the log-probs of completion tokens at temperature 1."""
    found = zip(completions, token_logprobs(model, prompts, completions), strict=True)
    return [logps_TV[torch.arange(len(ids)), ids].tolist() for ids, logps_TV in found]


def chat_ids(prompts: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    """Return the token ids of chats with the beginning of the assistant's turn."""
    return [tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts]


def sort_samples(
    trainer: Any, rows: Sequence[Mapping[str, Any]], count: int, reward: Any
) -> tuple[dict, dict]:
    """Sample ``count`` completions of every row from the trainer's current policy.

    Returns:
        distinct correct and wrong completions by question; questions without any are absent.
    """
    tokenizer = trainer.processing_class
    correct: dict[str, list[str]] = {}
    wrong: dict[str, list[str]] = {}
    rows = [row for row in rows for _ in range(count)]
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        found = trainer.backend.generate(
            chat_ids([row["prompt"] for row in batch], tokenizer), SamplingOptions()
        )
        for row, one in zip(batch, found, strict=True):
            text = tokenizer.decode(one.token_ids, skip_special_tokens=True)
            (right,) = reward(completions=[[{"role": "assistant", "content": text}]], answer=[row["answer"]])
            texts = (correct if right else wrong).setdefault(row["prompt"][-1]["content"], [])
            if text not in texts:
                texts.append(text)
    return correct, wrong


def preference_rows(correct: Samples, wrong: Samples, prompts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows of TRL's ``DPOTrainer``: one correct and one wrong completion of the same question each."""
    return [
        {
            "prompt": prompts[question],
            "chosen": [{"role": "assistant", "content": better}],
            "rejected": [{"role": "assistant", "content": worse}],
        }
        for question in correct
        for better, worse in zip(correct[question], wrong.get(question, ()), strict=False)
    ]
