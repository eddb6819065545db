"""Messages to tokens: the prompt as a whole, and what follows it piece by piece."""

from __future__ import annotations

from typing import Any

from groupwise.agents.templates import assistant, choose_turn_template
from groupwise.prompts import tokenize_prompt

_QUESTION = {"role": "user", "content": "."}


class DriftError(Exception):
    """The template writes the turns before a message in another way because of that message."""


class Renderer:
    """Writes prompts with the model's chat template, and the messages of tools as tokens to append.

    Args:
        tokenizer: has ``apply_chat_template`` and a chat template.
        end_tokens: every token that ends a turn of the policy.
        template_kwargs: further variables of the template.
        shows_tools: whether there are tools that the prompt has to describe.

    Raises:
        ConfigError: the template cannot be used; the message says why.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_tokens: frozenset[int] = frozenset(),
        template_kwargs: dict[str, Any] | None = None,
        *,
        shows_tools: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.template_kwargs = dict(template_kwargs or {})
        chat_template = self.template_kwargs.get("chat_template") or tokenizer.chat_template
        if isinstance(chat_template, dict):
            chat_template = chat_template.get("tool_use") or chat_template.get("default")
        self.turns = choose_turn_template(self._text, chat_template, shows_tools=shows_tools)
        self.chat_template: str = chat_template

    def prompt(
        self, messages: list[dict[str, Any]], schemas: list[Any], max_length: int | None = None
    ) -> list[int]:
        """Tokens of a prompt with its tools, ready to be answered."""
        # An empty list of tools makes some templates announce tools.
        tools = {self.turns.tools_argument: schemas} if schemas else {}
        return tokenize_prompt(self.tokenizer, messages, {**self.template_kwargs, **tools}, max_length)

    def whole(self, messages: list[dict[str, Any]], schemas: list[Any]) -> list[int]:
        """Tokens of a conversation as the model's own template writes all of it, ready to be answered."""
        return self.prompt(messages, schemas)

    def observation(self, messages: list[dict[str, Any]], end_token: int) -> list[int]:
        """What follows a turn of the policy: messages of tools or the user, and the start of its next turn.

        The messages are written once behind a short made-up turn; what stands behind the end of that turn is
        the answer.

        Args:
            end_token: the token with which the policy ended its turn.

        Raises:
            DriftError: the made-up turn comes out differently because of the messages behind it.
        """
        turn = {"role": "assistant", "content": "."}
        if messages[0]["role"] == "tool":
            turn = assistant([messages[0]["name"]])  # some templates take one call in a turn
        before = [_QUESTION, turn]
        start = len(self._tokens([_QUESTION]))
        told, full = self._tokens(before), self._tokens(before + messages, add_generation_prompt=True)
        end = _last(told, start, {end_token}) or _last(told, start, self.end_tokens) or len(told)
        if full[:end] != told[:end]:
            raise DriftError(f"the template writes a turn differently before {messages!r:.200}")
        rest = full[end:]
        # Some models end a turn with the token that begins the tool's.
        return rest[1:] if rest[:1] == [end_token] else rest

    def _text(self, messages: list[dict[str, Any]], **settings: Any) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, **{**self.template_kwargs, **settings}
        )

    def _tokens(self, messages: list[dict[str, Any]], **settings: Any) -> list[int]:
        if self.turns.template is not None:
            settings["chat_template"] = self.turns.template
        return list(self.tokenizer(self._text(messages, **settings), add_special_tokens=False)["input_ids"])


def _last(tokens: list[int], start: int, wanted: set[int] | frozenset[int]) -> int | None:
    """The position behind the last of the wanted tokens from ``start`` on."""
    return next((i + 1 for i in range(len(tokens) - 1, start - 1, -1) if tokens[i] in wanted), None)
