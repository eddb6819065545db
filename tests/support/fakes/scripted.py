"""A byte tokenizer, a backend whose completions are scripted, and rollouts with both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupwise.agents import make_tool
from groupwise.agents.environments import EnvironmentPool
from groupwise.agents.multi_turn import MultiTurnRollouts
from groupwise.agents.tool_loop import ToolLoop
from groupwise.generation.base import GenerationBackend
from groupwise.records import Completion, RolloutBatch, SamplingOptions
from groupwise.threads import CallExecutor
from support.configs import config_of

#: A prefix-preserving template that renders tool schemas, and tool calls as JSON in tags.
CHAT = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' }}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{{- '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")


def byte_tokenizer(
    chat_template: str = CHAT, special: Sequence[str] = SPECIAL, end: str = "<|im_end|>"
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and per special token: decoding and encoding are inverse."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(letters, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*dict.fromkeys([*special, end])])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, pad_token=special[-1], chat_template=chat_template
    )


class ScriptedBackend(GenerationBackend):
    """A backend that samples the n-th text of a rollout's script as its n-th turn.

    The end token is appended to texts without one; turns are truncated to ``max_tokens``.

    Attributes:
        calls: prompts of every call of ``generate``.
        sampling: sampling options of every call of ``generate``.
    """

    def __init__(
        self,
        tokenizer: Any,
        scripts: Sequence[Sequence[str]],
        *,
        logps: bool = False,
        ends: Sequence[str] = (),
    ) -> None:
        self.tokenizer, self.scripts, self.logps = tokenizer, scripts, logps
        self.turns = [0] * len(scripts)
        self.contexts: list[list[int] | None] = [None] * len(scripts)
        self.prompts: list[list[int] | None] = [None] * len(scripts)
        self.calls: list[list[list[int]]] = []
        self.sampling: list[SamplingOptions] = []
        self.before_call: Callable[[ScriptedBackend], None] = lambda backend: None
        self.ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ends))]

    @property
    def end_tokens(self) -> frozenset[int]:
        return frozenset(self.ends)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions) -> list[Completion]:
        self.calls.append([list(prompt) for prompt in prompts])
        self.sampling.append(sampling)
        self.before_call(self)
        assert sampling.max_tokens is not None
        return [
            self._answer(list(prompt), limit)
            for prompt, limit in zip(prompts, sampling.max_tokens, strict=True)
        ]

    def _answer(self, prompt: list[int], limit: int) -> Completion:
        index = self._rollout(prompt)
        text = self.scripts[index][self.turns[index]]
        self.turns[index] += 1
        ended = any(text.endswith(self.tokenizer.convert_ids_to_tokens(end)) for end in self.ends)
        tokens = self.tokenizer(text if ended else text + self.tokenizer.eos_token)["input_ids"]
        cut = tokens[:limit]
        self.contexts[index] = prompt + cut
        logps = [-0.5] * len(cut) if self.logps else None
        return Completion(cut, logps, truncated=len(cut) < len(tokens))

    def _rollout(self, prompt: list[int]) -> int:
        """Return the index of the rollout that a prompt continues.

        It begins with the tokens of that rollout, or with its first prompt (a fork); else the rollout is new.
        """
        for known in (self.contexts, self.prompts):
            for index, tokens in enumerate(known):
                has_turns = self.turns[index] < len(self.scripts[index])
                if tokens is not None and has_turns and prompt[: len(tokens)] == tokens:
                    return index
        index = self.contexts.index(None)
        self.prompts[index] = prompt
        return index


def call(name: str, **arguments: Any) -> str:
    """A tool call in the format of ``CHAT``."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def question(text: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}]}


def agents(
    tokenizer: Any,
    tools: Sequence[Any] = (),
    environments: EnvironmentPool | None = None,
    *,
    context_length: int | None = None,
    max_retries: int | None = None,
    **settings: Any,
) -> MultiTurnRollouts:
    """Multi-turn rollouts with at most 1000 tokens and these settings."""
    config = config_of(**{"max_completion_length": 1000, **settings, **retries(max_retries)})
    loop = ToolLoop(
        [make_tool(tool) for tool in tools],
        environments,
        CallExecutor(config.tool_timeout, limited_by="tool_timeout") if environments is None else None,
        max_iterations=config.max_tool_calling_iterations,
        scores_rollouts=max_retries is not None,
    )
    end_tokens = frozenset([tokenizer.eos_token_id])
    return MultiTurnRollouts(loop, tokenizer, config, end_tokens, context_length=context_length)


def retries(number: int | None) -> dict[str, Any]:
    """Settings with which failed rollouts are repeated; None: raise the first error."""
    return {} if number is None else {"rollout_on_error": "retry", "rollout_retries": number}


def run(
    scripts: Sequence[Sequence[str]], tools: Sequence[Any], tokenizer: Any = None, **settings: Any
) -> tuple[RolloutBatch, ScriptedBackend]:
    """Run one rollout per script."""
    tokenizer = tokenizer or byte_tokenizer()
    backend = ScriptedBackend(tokenizer, scripts, logps=settings.pop("logps", False))
    rows = [question(f"question {i}") for i in range(len(scripts))]
    return agents(tokenizer, tools, **settings).generate_rollouts(rows, backend), backend
