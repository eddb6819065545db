"""Agents as they are: model calls of any SDK, captured with their tokens and log-probs by OpenEnv's proxy.

agent (OpenAI, Anthropic or Google SDK) --> openenv.core.harness.capture --> vLLM server of the run
                                                 |
                    prompt ids, sampled ids and log-probs of every call --> rows of the rollout
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from groupwise.errors import BackendError, ConfigError, checked_entries, warn_once
from groupwise.generation.rollout_func import RESERVED, taken_column
from groupwise.threads import CallExecutor, Invocation, is_async, thread_safe

logger = logging.getLogger(__name__)

#: Row of a rollout without a result: one token without loss.
_NO_ROW = {"prompt_ids": [0], "completion_ids": [0], "logprobs": [0.0], "env_mask": [0]}


@dataclass(frozen=True)
class Endpoint:
    """Address of the policy for the agent of one rollout.

    url: address of the proxy, without a path; SDKs of OpenAI take ``base_url``.
    api_key: names the rollout: a client of its own for each.
    model: name of the policy; requests for others are answered by the policy, too.
    """

    url: str
    api_key: str
    model: str

    @property
    def base_url(self) -> str:
        """Address for the SDKs of OpenAI."""
        return f"{self.url}/v1"


class ConcurrentRollouts(ABC):
    """A ``rollout_func`` whose rollouts call the run's vLLM server themselves, all at the same time.

    With ``rollout_on_error="retry"``, failed ones are repeated and then dropped from their groups.
    """

    @abstractmethod
    def run_rollouts(self, prompts: list[Any], trainer: Any) -> list[Any]:
        """Run a rollout per prompt; return (its rows, columns, number of model calls), or its error."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Run a rollout per prompt. Returns rows, ``rollout_ids``, columns and failures."""
        args = trainer.args
        pending = [*range(len(prompts))]
        found: dict[int, tuple[list[dict[str, Any]], dict[str, Any], int]] = {}
        num_failed = 0
        for _ in range(1 + (args.rollout_retries if args.rollout_on_error == "retry" else 0)):
            results = self.run_rollouts([prompts[i] for i in pending], trainer)
            outcomes = dict(zip(pending, results, strict=True))
            errors = {i: value for i, value in outcomes.items() if isinstance(value, Exception)}
            if errors and args.rollout_on_error == "raise":
                first = min(errors)
                raise BackendError(f"rollout {first}: {_message(errors[first])}") from errors[first]
            found |= {i: value for i, value in outcomes.items() if not isinstance(value, Exception)}
            num_failed += len(errors)
            pending = list(errors)
            for error in errors.values():
                warn_once(logger, "a rollout failed and is repeated or dropped: %s", _message(error)[:500])
            if not pending:
                break
        rollouts = [found.get(i, ([_NO_ROW], {}, 0)) for i in range(len(prompts))]
        trainer.record_metric("agent/calls", sum(calls for _, _, calls in rollouts) / len(rollouts))
        trainer.record_metric("agent/failures", num_failed, "sum")
        name, taken = type(self).__name__, partial(taken_column, others=RESERVED)
        columns = [checked_entries(own, name, BackendError, objection=taken) for _, own, _ in rollouts]
        names = dict.fromkeys(name for own in columns for name in own)
        return {
            **{key: [row[key] for rows, _, _ in rollouts for row in rows] for key in _NO_ROW},
            "rollout_ids": [i for i, (rows, _, _) in enumerate(rollouts) for _ in rows],
            "failed": [i not in found for i in range(len(prompts))],
            **{name: [own.get(name) for own in columns] for name in names},
        }

    def served_model(self, trainer: Any) -> tuple[str, str]:
        """Return the address of the run's vLLM server, and the name of its model.

        Raises:
            ConfigError: there is none, or several; it gets adapters alone; or the run truncates its
                distribution.
        """
        name, args = type(self).__name__, trainer.args
        servers = getattr(trainer.backend, "servers", None)
        if servers is None:
            raise ConfigError(
                f"{name} needs an engine with an endpoint: use_vllm=True with vllm_mode='server'"
            )
        if servers.adapter is not None:
            raise ConfigError(
                f"{name} calls the model of the server, not an adapter that is sent alone; start the "
                "server without --enable-lora, so that it gets merged weights"
            )
        if any((args.top_p != 1.0, args.top_k, args.min_p, args.repetition_penalty != 1.0)):
            raise ConfigError(
                f"{name} samples from the whole vocabulary; leave top_p, top_k, min_p and "
                "repetition_penalty at their defaults"
            )
        if len(servers.servers) > 1:
            raise ConfigError(
                f"{name} calls one server, but vllm_server_base_url names {len(servers.servers)}; name one"
            )
        (found,) = servers.on_all(
            lambda server: server.once(
                "GET",
                "/v1/models",
                doing="reading its model",
                timeout=30.0,
                read=lambda answer: (server.url, answer["data"][0]["id"]),
            )
        ).values()
        return found


class CapturedAgent(ConcurrentRollouts):
    """A ``rollout_func`` that runs an agent as it is and trains on the model calls that it made.

    Needs ``use_vllm=True`` with ``vllm_mode="server"`` and openenv 0.10. Rollouts run concurrently. Every
    call is sampled with the run's temperature from the whole vocabulary, whatever the agent asks for: its
    log-probs would otherwise be those of another distribution.

    Args:
        agent: ``agent(prompt, endpoint)``, async or a function that may run in threads; plays one rollout.
            Returns None, or a dictionary of columns for the reward functions.
        timeout: seconds of a rollout; None: no limit.
        max_calls: model calls of a rollout, after which the proxy answers in place of the policy and ends
            the agent's loop; 0: no limit.
        host: address of this machine for the agents. The proxy listens on all addresses; a call needs the key
            of a running rollout.

    Raises:
        ConfigError: the run has no vLLM server, truncates its distribution, or openenv is missing.
        BackendError: an agent failed, with ``rollout_on_error="raise"``; with ``"retry"`` the rollout is
            repeated ``rollout_retries`` times and then dropped from its group.
    """

    def __init__(
        self,
        agent: Callable[[Any, Endpoint], Any],
        *,
        timeout: float | None = None,
        max_calls: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        if importlib.util.find_spec("openenv") is None:
            raise ConfigError(
                "CapturedAgent needs openenv 0.10 or newer; run pip install 'groupwise[capture]', in another "
                "environment than vLLM's server"
            )
        self.agent, self.timeout, self.max_calls, self.host = agent, timeout, max_calls, host
        self.__name__ = getattr(agent, "__name__", type(agent).__name__)
        self._server: Any = None

    def run_rollouts(self, prompts: list[Any], trainer: Any) -> list[Any]:
        """Run the agent on each prompt; return its rows, columns and number of calls, or the error."""
        self._start(trainer)
        registry, args = self._server.registry, trainer.args
        sessions = [
            registry.create(
                purpose="train",
                sampling={"temperature": args.temperature},
                max_model_calls=self.max_calls,
            )
            for _ in prompts
        ]
        url, model = f"http://{self.host}:{self._server.port}", self._server.app.state.model
        endpoints = [Endpoint(url, session.session_id, model) for session in sessions]
        calls = [
            Invocation(self._call(prompt, each)) for prompt, each in zip(prompts, endpoints, strict=True)
        ]
        executor = CallExecutor(self.timeout, limited_by="CapturedAgent(timeout=…)", loop=trainer.event_loop)
        outcomes: list[Any] = []
        for future, session in zip(executor.run_all(calls), sessions, strict=True):
            try:
                columns, rows = future.result(), rows_of_session(session)
                outcomes.append((rows, {} if columns is None else columns, len(rows)))
            except Exception as error:  # of the agent, its time limit, or what it called
                outcomes.append(error)
            registry.delete(session.session_id)  # later calls of a rollout that was given up are refused
        return outcomes

    def _call(self, prompt: Any, endpoint: Endpoint) -> Callable[[], Any]:
        """Return the call of the agent, which runs beside those of the other rollouts."""
        if is_async(self.agent):
            return partial(self.agent, prompt, endpoint)
        return thread_safe(lambda: self.agent(prompt, endpoint))

    def _start(self, trainer: Any) -> None:
        """Start the proxy in front of the run's server, once."""
        url, model = self.served_model(trainer)
        if self._server is not None:
            return
        from openenv.core.harness.capture import CaptureServer, validate_llm

        key = os.environ.get("VLLM_API_KEY")
        report = validate_llm(url, model, api_key=key, check_tools=False)
        if report.capture_level != "tokens":
            raise ConfigError(f"{url} gives no tokens and log-probs: {report}")
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        # It listens on all addresses: a call needs the key of a running rollout, its other routes this one.
        admin = secrets.token_hex(16)
        self._server = CaptureServer(llm_url=url, model=model, port=port, api_key=key, admin_key=admin)
        self._server.start()
        weakref.finalize(trainer, self._server.stop)


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def rows_of_session(session: Any) -> list[dict[str, Any]]:
    """Return one row per model call of the agent, in their order.

    Raises:
        BackendError: there is none, or the capture found one that cannot be trained.
    """
    from openenv.core.harness.capture import to_training_trace
    from openenv.core.harness.capture.export import export_session

    trace = to_training_trace(session.graph, export_session(session))
    if not trace.turns:
        raise BackendError("the agent made no model call with its endpoint's api_key")
    return [
        {
            "prompt_ids": turn.prompt_token_ids,
            "completion_ids": turn.completion_token_ids,
            "logprobs": turn.per_token_logps,
            "env_mask": turn.loss_mask[len(turn.prompt_token_ids) :],
        }
        for turn in trace.turns
    ]
