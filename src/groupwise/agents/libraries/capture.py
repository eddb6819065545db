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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from groupwise.errors import BackendError, ConfigError, warn_once
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


class CapturedAgent:
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

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Run the agent once per prompt. Returns rows, ``rollout_ids``, columns and failures."""
        args = trainer.args
        self._start(trainer)
        pending = [*range(len(prompts))]
        found: dict[int, tuple[list[dict[str, Any]], dict[str, Any]]] = {}
        num_failed = 0
        for _ in range(1 + (args.rollout_retries if args.rollout_on_error == "retry" else 0)):
            outcomes = dict(zip(pending, self._run([prompts[i] for i in pending], trainer), strict=True))
            errors = {i: value for i, value in outcomes.items() if isinstance(value, Exception)}
            if errors and args.rollout_on_error == "raise":
                first = min(errors)
                raise BackendError(f"rollout {first}: {_message(errors[first])}") from errors[first]
            found |= {i: value for i, value in outcomes.items() if not isinstance(value, Exception)}
            num_failed += len(errors)
            pending = list(errors)
            for error in errors.values():
                warn_once(logger, "an agent failed and is run again or dropped: %s", type(error).__name__)
            if not pending:
                break
        rollouts = [found.get(i, ([_NO_ROW], {})) for i in range(len(prompts))]
        trainer.record_metric("agent/calls", sum(len(rows) for rows, _ in rollouts) / len(rollouts))
        trainer.record_metric("agent/failures", num_failed, "sum")
        names = dict.fromkeys(name for _, columns in rollouts for name in columns)
        return {
            **{key: [row[key] for rows, _ in rollouts for row in rows] for key in _NO_ROW},
            "rollout_ids": [i for i, (rows, _) in enumerate(rollouts) for _ in rows],
            "failed": [i not in found for i in range(len(prompts))],
            **{name: [columns.get(name) for _, columns in rollouts] for name in names},
        }

    def _run(self, prompts: list[Any], trainer: Any) -> list[Any]:
        """Run the agent on each prompt; return its rows and columns, or the error."""
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
                columns = future.result()
                outcomes.append((rows_of_session(session), dict(columns or {})))
            except Exception as error:  # of the agent, its time limit, or what it called
                outcomes.append(error)
            registry.delete(session.session_id)  # later calls of a rollout that was given up are refused
        return outcomes

    def _call(self, prompt: Any, endpoint: Endpoint) -> Callable[[], Any]:
        """Return the call of the agent, which runs beside those of the other rollouts."""

        async def call_async() -> Any:
            return await self.agent(prompt, endpoint)

        def call() -> Any:
            return self.agent(prompt, endpoint)

        return call_async if is_async(self.agent) else thread_safe(call)

    def _start(self, trainer: Any) -> None:
        """Start the proxy in front of the run's server, once."""
        args = trainer.args
        servers = getattr(trainer.backend, "servers", None)
        if servers is None:
            raise ConfigError(
                "CapturedAgent needs an engine with an OpenAI endpoint: use_vllm=True with vllm_mode='server'"
            )
        if servers.adapter is not None:
            raise ConfigError(
                "CapturedAgent calls the model of the server, not an adapter that is sent alone; start the "
                "server without --enable-lora, so that it gets merged weights"
            )
        if self._server is not None:
            return
        if any((args.top_p != 1.0, args.top_k, args.min_p, args.repetition_penalty != 1.0)):
            raise ConfigError(
                "CapturedAgent samples from the whole vocabulary; leave top_p, top_k, min_p and "
                "repetition_penalty at their defaults"
            )
        from openenv.core.harness.capture import CaptureServer, validate_llm
        from openenv.core.harness.capture.validate_llm import list_models

        from groupwise.generation.vllm.server import server_urls  # httpx, as openenv

        urls = server_urls(args)
        if len(urls) > 1:
            raise ConfigError(
                f"CapturedAgent calls one server, but vllm_server_base_url names {len(urls)}; name one"
            )
        key = os.environ.get("VLLM_API_KEY")
        model = list_models(f"{urls[0]}/v1", timeout=30.0, api_key=key)[0]
        report = validate_llm(urls[0], model, api_key=key, check_tools=False)
        if report.capture_level != "tokens":
            raise ConfigError(f"{urls[0]} gives no tokens and log-probs: {report}")
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        # It listens on all addresses: a call needs the key of a running rollout, its other routes this one.
        admin = secrets.token_hex(16)
        self._server = CaptureServer(llm_url=urls[0], model=model, port=port, api_key=key, admin_key=admin)
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
