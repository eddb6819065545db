"""On-policy distillation: the reverse-KL signal of a teacher as a reward of every token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from groupwise.errors import ConfigError
from groupwise.records.rollout import StepRewards

#: Log-probs of this rank's completions under a model, None for the policy: one list per completion.
CompletionLogprobs = Callable[[nn.Module | None], list[list[float]]]


def get_distillation_reward(
    teacher: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> DistillationReward:
    """Create the per-token reward of on-policy distillation; use it with ``advantage_baseline="per_token"``.

    r_it = log π_teacher(o_it) − log π_θ(o_it) at each sampled token, both at the sampling temperature and for
    the same truncated distribution. In expectation over the policy's tokens it is the negative reverse KL of
    a position. Without a sum over later tokens (discount 0) it is the signal of Thinking Machines,
    "On-Policy Distillation" (2025), and the sampled form of the reverse KL of GKD (arXiv 2306.13649);
    MiniLLM (arXiv 2306.08543) sums it over later tokens.

    Args:
        teacher: causal LM with the policy's vocabulary, or the id of one, loaded in the dtype of its weights.
        tokenizer: of the teacher, compared with the policy's; None: loaded if the teacher is an id, else not
            compared.

    Returns:
        a process-supervised reward function; one forward pass of the policy and of the teacher per call.
    """
    if isinstance(teacher, str):
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(teacher)
        teacher = AutoModelForCausalLM.from_pretrained(teacher)
    return DistillationReward(teacher, tokenizer)


class DistillationReward:
    """Reward function of :func:`get_distillation_reward`.

    teacher: frozen model; the trainer moves it to its device.
    tokenizer: of the teacher; None: not compared with the policy's.
    """

    __name__ = "distillation_reward"
    takes_logprobs = True
    runs_in_caller_thread = True  # ranks of a sharded model must finish together

    def __init__(self, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.teacher: nn.Module = teacher.eval().requires_grad_(False)
        self.tokenizer = tokenizer

    def __call__(self, completion_logprobs: CompletionLogprobs, **_: Any) -> StepRewards:
        """Return (token index, reward) for every token with loss; NaN log-probs mark the others."""
        pairs = zip(completion_logprobs(self.teacher), completion_logprobs(None), strict=True)
        return [
            [
                (index, of_teacher - of_policy)
                for index, (of_teacher, of_policy) in enumerate(zip(*logps, strict=True))
                if not math.isnan(of_policy)
            ]
            for logps in pairs
        ]

    def check_vocabulary(self, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel) -> None:
        """Check that the teacher reads the policy's token ids.

        Raises:
            ConfigError: the teacher has another vocabulary.
        """
        if self.tokenizer is not None and self.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"the teacher {type(self.teacher).__name__} has another vocabulary than the policy: it would "
                "score other tokens than were sampled; use a teacher with the policy's tokenizer"
            )
        sizes = [self.teacher, policy]
        of_teacher, of_policy = (model.get_input_embeddings().num_embeddings for model in sizes)  # type: ignore[union-attr,operator]
        needed = min(of_policy, len(tokenizer))  # rows beyond the tokenizer pad the embedding
        if of_teacher < needed:
            raise ConfigError(
                f"the teacher has {of_teacher} token embeddings, the policy's vocabulary {needed} tokens; "
                "use a teacher with the policy's tokenizer"
            )
