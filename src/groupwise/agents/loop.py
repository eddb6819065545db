"""The contract of agent loops, which run rollouts, with the scheduler that samples their turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from groupwise.core.metrics import Metrics
from groupwise.errors import AgentError
from groupwise.records.images import ImageInputs
from groupwise.threads import CallExecutor
from groupwise.tokenization.prompts import Message, Prompt

if TYPE_CHECKING:
    from groupwise.agents.tools import Tool, ToolResult
    from groupwise.agents.trajectory import Trajectory
    from groupwise.tokenization.tool_calls import ToolCall, ToolSchema


def empty_prompt() -> list[Message]:
    """Return the prompt of rows that have none; the environment's observation becomes its text."""
    return [{"role": "user", "content": ""}]


@dataclass(frozen=True)
class TurnRequest:
    """Request for a turn of the policy.

    Attributes:
        messages: the conversation from the prompt on, or a text for the only turn of a rollout.
        schemas: tools that the policy may call.
    """

    messages: Prompt
    schemas: Sequence[ToolSchema] = ()


@dataclass(frozen=True)
class ChatResponse:
    """A turn of the policy.

    Attributes:
        message: assistant message as chat templates expect it, with ``tool_calls`` if there are any.
        truncated: the turn was cut at the maximum length.
        tool_calls: parsed calls in order; malformed ones have an ``error`` and are not in ``message``.
    """

    message: Message
    truncated: bool
    tool_calls: Sequence[ToolCall] = ()


#: Functions to call (:class:`Invocation`), and calls in progress, that a rollout waits for.
Calls = Sequence[Future[Any]]

#: A rollout as a generator. It yields a request and receives the :class:`ChatResponse`, or None if no token
#: remains for a turn; the ``yield`` raises if a later message cannot be rendered. Or it yields calls and
#: receives their finished futures.
Steps = Generator[TurnRequest | Calls, Any, None]


@dataclass(eq=False)
class Rollout:
    """State of one rollout; a repeated rollout has a new one.

    Attributes:
        index: position of the row in the batch.
        place: that of :meth:`AgentLoop.begin_batch`.
        context_length: limit of prompt and completion in tokens; None: unlimited.
        prompt: messages before the first turn.
        messages: the conversation so far, prompt and the policy's turns included.
        trajectory: tokens; None before the first turn.
        images: image inputs of the model for these tokens; None without a processor.
        columns: values for the reward functions.
        tool_results: executed tool calls and their results.
        steps: the rollout in progress.
        request: request of the next turn.
        calls: functions to call, and calls in progress, before the rollout continues.
        futures: calls in progress, or the requested turn, that the rollout waits for.
        seed: seed of the batch, from which those of the turns are derived; None: the backend chooses them.
        error: reason why the rollout failed.
    """

    index: int
    row: dict[str, Any]
    place: Any = None
    context_length: int | None = None
    prompt: Prompt = field(default_factory=list)
    messages: Prompt = field(default_factory=list)
    trajectory: Trajectory | None = None
    images: ImageInputs | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    tool_results: list[tuple[ToolCall, ToolResult]] = field(default_factory=list)
    steps: Steps = field(init=False)
    request: TurnRequest | None = None
    calls: Calls = ()
    futures: list[Future[Any]] = field(default_factory=list)
    seed: int | None = None
    error: AgentError | None = None


class AgentLoop(ABC):
    """Code that runs rollouts: it builds the conversation, requests turns, and ends the rollout.

    Attributes:
        executor: calls the functions of the user.
        all_tools: tools of the user, and those of the first instance of every environment type.
        is_multi_turn: the run has tools or environments.
        has_later_turns: a rollout may have more than one turn.
        uses_tools: requests may have tool schemas.
        reads_images: messages may have images.
        provides_tasks: rows need no prompt, because environments have the tasks.
        is_routed: the column ``environment`` selects the environment of a row.
        renders_prompts: the chat template renders the prompts of rows, which are checked for it.
    """

    executor: CallExecutor
    all_tools: Sequence[Tool] = ()
    is_multi_turn: bool = True
    has_later_turns: bool = True
    uses_tools: bool = False
    reads_images: bool = False
    provides_tasks: bool = True
    is_routed: bool = False
    renders_prompts: bool = False

    @property
    def reward_funcs(self) -> list[Callable[..., Any]]:
        """Reward functions of the environments."""
        return []

    def begin_batch(self, rows: Sequence[dict[str, Any]]) -> Sequence[Any]:
        """Return the place of each rollout of a batch, such as its environment. Several batches may be begun.

        Raises:
            ConfigError: a row cannot be used.
        """
        return [None] * len(rows)

    def end_batch(self, places: Sequence[Any]) -> None:
        """Let later batches use the places of a batch, whose rewards are computed. May be called twice."""

    @abstractmethod
    def run_rollout(self, rollout: Rollout) -> Steps:
        """Run one rollout and set its ``columns``.

        Steps run in the thread of the trainer; those of a batch that was begun ahead of its step in another
        one, from the request of the first turn on, up to the next call of a sync function.

        Raises:
            AgentError: the rollout failed; with ``rollout_on_error="retry"`` it is repeated.
        """

    def metrics(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Return statistics of the rollouts of a batch, without failed ones."""
        return {}
