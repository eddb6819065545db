"""Process reward models: a score for every step of a completion (DeepSeekMath, section 4.1.3)."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from groupwise.errors import ConfigError, boundary, warn_once
from groupwise.records import Completion
from groupwise.records.rollout import Span
from groupwise.rewards.runtime.models import ModelReward, model_title, reward_name
from groupwise.tokenization.prompts import Prompt, is_conversational, tokenize_prompt
from groupwise.tokenization.text import message_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessRewardModel:
    r"""A token-classification model in ``reward_funcs`` that scores every step of a completion.

    The model reads the prompt, and then each step followed by the step token; its output at the last token of
    the step token is the reward of the step. With one label the reward is the logit, with two labels the
    probability of label 1. A model or id in ``reward_funcs`` that is not wrapped in this class has the
    default separator.

    >>> from groupwise.rewards import ProcessRewardModel
    >>> judge = ProcessRewardModel("my-org/my-prm", step_separator="\n\n", step_token="<extra_0>")

    Args:
        model: token-classification model, or the id of one.
        step_separator: text that ends a step of a completion, or the id of a token of the policy that does.
            The text after the last separator is a step as well; a step of whitespace alone is none.
        step_token: text after each step in the input of the model; None: the separator.

    Raises:
        ConfigError: another model, or an empty separator or step token.
    """

    model: PreTrainedModel | str
    step_separator: str | int = "\n"
    step_token: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, (PreTrainedModel, str)):
            raise ConfigError(
                f"ProcessRewardModel was given {type(self.model).__name__}; allowed: a token-classification "
                "model or the id of one"
            )
        separator, token = self.step_separator, self.step_token
        if isinstance(separator, bool) or not isinstance(separator, (str, int)) or separator == "":
            raise ConfigError(f"step_separator={separator!r} is not allowed; give a text or a token id")
        if token is not None and not (isinstance(token, str) and token):
            raise ConfigError(f"step_token={token!r} is not allowed; give a text, or None for the separator")

    @property
    def __name__(self) -> str:  # in metrics and messages
        return reward_name(self.model)


def is_process_reward(function: object, trust_remote_code: bool = False) -> bool:
    """Return True for a process reward model, by its architecture; the configuration of an id is loaded."""
    if isinstance(function, PreTrainedModel):
        return any(_is_token_classifier(kind.__name__) for kind in type(function).__mro__)
    if isinstance(function, str):
        name = f"reward model {function!r} (a text is the id or directory of a model; pass a function itself)"
        with boundary(ConfigError, name):
            config = AutoConfig.from_pretrained(function, trust_remote_code=trust_remote_code)
        classes = [*(config.architectures or ()), *getattr(config, "auto_map", {})]
        return any(_is_token_classifier(name) for name in classes)
    return isinstance(function, ProcessRewardModel)


def _is_token_classifier(class_name: str) -> bool:
    return class_name.endswith("ForTokenClassification")


class Step(NamedTuple):
    """A step of a completion: its text without the separator, and the index of its last token."""

    text: str
    end: int


def split_steps(
    token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, separator: str | int
) -> list[Step]:
    """Split a completion into steps.

    A step ends with the token that completes its separator, and the last step with the last token of the
    completion, so that the end token belongs to it. A completion of whitespace alone is one step.

    Args:
        tokenizer: the policy's; it decodes the tokens.
        separator: text or token id that ends a step.

    Returns:
        The steps in order; none for a completion without tokens.
    """
    if not token_ids:
        return []

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    if isinstance(separator, str):
        found = _steps_by_text(token_ids, decode, separator)
    else:
        ends = [i for i, token in enumerate(token_ids) if token == separator] + [len(token_ids)]
        starts = [0, *(end + 1 for end in ends)]
        found = [Step(decode(token_ids[s:e]), e) for s, e in zip(starts, ends, strict=False)]
    steps = [step for step in found if step.text.strip()] or [Step(decode(token_ids), 0)]
    return [*steps[:-1], steps[-1]._replace(end=len(token_ids) - 1)]


def _steps_by_text(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], separator: str
) -> list[Step]:
    def num_characters(index: int) -> int:
        # U+FFFD at the end: the bytes of a character that later tokens complete.
        return len(decode(token_ids[: index + 1]).rstrip("\ufffd"))

    steps, characters, end = [], 0, 0
    for text in decode(token_ids).split(separator):
        characters += len(text) + len(separator)
        # The first token with which the decoded text includes the separator.
        end = bisect_left(range(len(token_ids)), characters, lo=end, key=num_characters)
        steps.append(Step(text, end))
    return steps


class StepScorer(ModelReward):
    """Reward function that returns (index of the step's last token, score) for every step.

    Args:
        reward: its separator and step token.
        policy_tokenizer: decodes completions.
        model, tokenizer, options: arguments of :class:`ModelReward`.

    Raises:
        ConfigError: the model has more than two labels, or the separator is no token of the policy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        reward: ProcessRewardModel,
        tokenizer: PreTrainedTokenizerBase | None,
        policy_tokenizer: PreTrainedTokenizerBase,
        *options: Any,
    ) -> None:
        name, labels = model_title(model), model.config.num_labels
        if labels not in (1, 2):
            raise ConfigError(
                f"process reward model {name} has {labels} labels; allowed: 1 (the logit is the reward) or "
                "2 (the probability of label 1 is)"
            )
        separator = reward.step_separator
        if isinstance(separator, int) and not 0 <= separator < len(policy_tokenizer):
            raise ConfigError(
                f"step_separator={separator} is no token of the policy; its tokenizer has "
                f"{len(policy_tokenizer)} tokens"
            )
        super().__init__(model, tokenizer, *options)
        self.policy_tokenizer = policy_tokenizer
        self.separator = separator
        marker = separator if isinstance(separator, str) else str(policy_tokenizer.decode([separator]))
        self.step_token = reward.step_token or marker
        self.step_token_ids = self._encode(self.step_token)
        if not self.step_token_ids:
            raise ConfigError(
                f"step_token={self.step_token!r} is no text to the tokenizer of process reward model {name}; "
                "give the step token that it was trained with in ProcessRewardModel(model, step_token=…)"
            )

    def warn_if_unsplit(self, name: str, rewards_N: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Warn once if no completion of a generation, N of all ranks, has more than one step."""
        if max(map(len, rewards_N), default=0) == 1:
            warn_once(
                logger,
                "process reward model %r: step_separator=%r splits no completion of a generation, so each "
                "has one score, as from an outcome reward; wrap the model in ProcessRewardModel(model, "
                "step_separator=...) with the text or token that ends a step in the policy's completions "
                "(rewards/%s/steps is the mean number of steps)",
                *(name, self.separator, name),
            )

    def __call__(
        self, prompts: Sequence[Prompt], completion_ids: Sequence[Sequence[int]], **_: object
    ) -> list[list[tuple[int, float]]]:
        """Return the step rewards of each completion."""
        steps_B = [split_steps(ids, self.policy_tokenizer, self.separator) for ids in completion_ids]
        inputs_B = [self._inputs(prompt, steps) for prompt, steps in zip(prompts, steps_B, strict=True)]
        scores_B = self.in_batches(inputs_B, self._scores)
        return [
            [(step.end, score) for step, score in zip(steps, scores, strict=True)]
            for steps, scores in zip(steps_B, scores_B, strict=True)
        ]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _inputs(self, prompt: Prompt, steps: Sequence[Step]) -> tuple[list[int], list[int]]:
        """Return the token ids of prompt, steps and step tokens, and where the steps are scored."""
        if is_conversational(prompt):
            prompt = [{**message, "content": message_text(message)} for message in prompt]
        ids, scored = tokenize_prompt(self.tokenizer, prompt, self.template_kwargs), []
        for step in steps:
            # Encoded one by one: no token of the model spans the end of a step.
            ids += [*self._encode(step.text), *self.step_token_ids]
            scored.append(len(ids) - 1)
        return ids, scored

    def _scores(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        inputs = self.tokenizer.pad(
            {"input_ids": [ids for ids, _ in rows]}, padding_side="right", return_tensors="pt"
        ).to(self.model.device)
        # [0]: models with code of their own may return a tuple. Labels K: 1 or 2.
        logits_BSK = self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
        logits_BSK = logits_BSK.float()
        scores_BS = logits_BSK[..., 0] if logits_BSK.shape[-1] == 1 else logits_BSK.softmax(-1)[..., 1]
        return [scores_S[scored].tolist() for scores_S, (_, scored) in zip(scores_BS, rows, strict=True)]


def checked_steps(
    values: Sequence[Any], completion: Completion, is_reward: Callable[[object], bool]
) -> tuple[list[tuple[int, float]], str]:
    """Return the step rewards of a completion, and what is wrong with the first that is none; "": nothing.

    Args:
        values: pairs (index of the step's last token among those of the last call, reward); or one number or
            None per turn.
        is_reward: returns True for a finite number.
    """
    turns = completion.turn_spans
    first, stop = completion.last_row or (0, len(completion.token_ids))  # the function saw these tokens
    if turns and values and not any(isinstance(entry, (list, tuple)) for entry in values):  # by turn
        if len(values) != len(turns):
            return [], f"{len(values)} rewards for {len(turns)} turns"
        wrong = [
            f"{reward!r:.80} for turn {number} of {len(turns)}"
            for number, reward in enumerate(values, start=1)
            if not (reward is None or is_reward(reward))
        ]
        steps = [(end - 1, r) for (_, end), r in zip(turns, values, strict=True) if r is not None and end]
    else:
        wrong = [
            f"step {step!r:.80}"
            for step in values
            if not (_is_step(step, first, stop, turns) and is_reward(step[1]))
        ]
        steps = [] if wrong else [(first + int(end), reward) for end, reward in values]
    return ([], wrong[0]) if wrong else ([(end, float(reward)) for end, reward in steps], "")


def _is_step(step: object, first: int, stop: int, turns: Sequence[Span]) -> bool:
    if not isinstance(step, (list, tuple)) or len(step) != 2:
        return False
    end = step[0]
    in_range = isinstance(end, int) and 0 <= end < stop - first
    return in_range and (not turns or any(start <= first + end < after for start, after in turns))
