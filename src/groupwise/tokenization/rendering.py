"""Messages to tokens: the prompt as a whole, and what follows it piece by piece."""

from __future__ import annotations

from typing import Any

from groupwise.core.images import ImageInputs
from groupwise.tokenization.images import content_blocks, prompt_images, read_text, unreadable
from groupwise.tokenization.prompts import tokenize_prompt
from groupwise.tokenization.templates import assistant, choose_turn_template

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
        processor: turns the images of tools into tokens; None for text.

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
        processor: Any = None,
    ) -> None:
        self.tokenizer, self.processor = tokenizer, processor
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
        return tokenize_prompt(self.tokenizer, messages, self.settings(schemas), max_length)

    def settings(self, schemas: list[Any]) -> dict[str, Any]:
        """The template's variables for a prompt with these tools."""
        # An empty list of tools makes some templates announce tools.
        tools = {self.turns.tools_argument: schemas} if schemas else {}
        return {**self.template_kwargs, **tools}

    def whole(self, messages: list[dict[str, Any]], schemas: list[Any]) -> list[int]:
        """Tokens of a conversation as the model's own template writes all of it, ready to be answered."""
        return self.prompt(messages, schemas)

    def observation(self, messages: list[dict[str, Any]], end_token: int) -> list[int]:
        """The tokens of :meth:`read_observation`."""
        return self.read_observation(messages, end_token)[0]

    def read_observation(
        self, messages: list[dict[str, Any]], end_token: int
    ) -> tuple[list[int], ImageInputs | None]:
        """What follows a turn of the policy: messages of tools or the user, and the start of its next turn.

        The messages are written once behind a short made-up turn; what stands behind the end of that turn is
        the answer.

        Args:
            end_token: the token with which the policy ended its turn.

        Returns:
            tokens, and what the model takes beside them where the messages have images.

        Raises:
            DriftError: the made-up turn comes out differently because of the messages behind it.
        """
        turn = {"role": "assistant", "content": "."}
        if messages[0]["role"] == "tool":
            turn = assistant([messages[0]["name"]])  # some templates take one call in a turn
        before = [_QUESTION, turn]
        start = len(self._tokens([_QUESTION]))
        told = self._tokens(before)
        full, images = self._read(before + messages)
        end = _last(told, start, {end_token}) or _last(told, start, self.end_tokens) or len(told)
        if full[:end] != told[:end]:
            raise DriftError(f"the template writes a turn differently before {messages!r:.200}")
        # Some models end a turn with the token that begins the tool's.
        end += full[end : end + 1] == [end_token]
        if images is not None:
            types = {name: numbers[end:] for name, numbers in images.token_types.items()}
            images = ImageInputs(images.arrays, types)
        return full[end:], images

    def _read(self, messages: list[dict[str, Any]]) -> tuple[list[int], ImageInputs | None]:
        """Tokens of a conversation that the policy goes on with, and its images if there are any."""
        images = prompt_images(messages)
        if not images:
            return self._tokens(messages, add_generation_prompt=True), None
        if self.processor is None:
            raise unreadable(f"a tool returned {len(images)} image(s)", self.tokenizer)
        settings = {**self.turns.settings, "add_generation_prompt": True}
        return read_text(self.processor, self._text(messages, **settings), images, add_special_tokens=False)

    def _text(self, messages: list[dict[str, Any]], **settings: Any) -> str:
        if self.processor is not None:  # templates of vision-language models know blocks only
            messages = [{**message, "content": content_blocks(message)} for message in messages]
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, **{**self.template_kwargs, **settings}
        )

    def _tokens(self, messages: list[dict[str, Any]], **settings: Any) -> list[int]:
        settings.update(self.turns.settings)
        return list(self.tokenizer(self._text(messages, **settings), add_special_tokens=False)["input_ids"])


def _last(tokens: list[int], start: int, wanted: set[int] | frozenset[int]) -> int | None:
    """The position behind the last of the wanted tokens from ``start`` on."""
    return next((i + 1 for i in range(len(tokens) - 1, start - 1, -1) if tokens[i] in wanted), None)
