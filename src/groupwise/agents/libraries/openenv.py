"""Adapter for OpenEnv servers: sessions of openenv's own client, with the action of the server as a tool."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from groupwise.errors import ConfigError

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")  # a proxy cannot reach this machine


class OpenEnvSession:
    """An episode on an OpenEnv server; :func:`openenv_factory` adds the tool, from the server's schema."""

    _tool: str

    def __init__(self, url: str, timeout: float) -> None:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(url, connect_timeout_s=timeout, message_timeout_s=timeout)
        self._done, self._rewards, self._timeout = True, [0.0], timeout  # of reset and of each action

    async def reset(self, **row: object) -> str:
        seed = {"seed": row["seed"]} if isinstance(row.get("seed"), int) else {}
        self._done, self._rewards = True, [0.0]
        return await self._observe(self._client.reset(**seed))

    async def _step(self, action: dict[str, Any]) -> str:
        self._rewards.append(0.0)
        if self._done:
            raise RuntimeError("the episode has ended; no further action is possible")
        return await self._observe(self._client.step(action))

    def get_reward(self) -> float:
        """Return the sum of the episode's rewards."""
        return sum(self._rewards)

    def _turn_rewards(self, completion: Sequence[dict[str, Any]]) -> list[float | None]:
        """Return the sum of the rewards of each turn's actions; None for a turn without one."""
        own, rewards = type(self)._tool, iter(self._rewards[1:])
        turns = [m.get("tool_calls") or () for m in completion if m["role"] == "assistant"]
        actions = [[call for call in calls if call["function"]["name"] == own] for calls in turns]
        return [sum(next(rewards, 0.0) for _ in calls) if calls else None for calls in actions]

    async def _observe(self, response: Awaitable[Any]) -> str:
        # After a timeout or a lost connection the episode has ended: the client would act in a new session.
        was_done, self._done = self._done, True
        try:
            result = await response
        except asyncio.TimeoutError as problem:
            url, seconds = self._client.base_url, self._timeout
            raise TimeoutError(f"{url} did not answer within {seconds:g} seconds") from problem
        except RuntimeError:  # the server's answer to an invalid action; its session continues
            self._done = was_done
            raise
        self._done = bool(result.done)
        self._rewards[-1] += float(result.reward or 0.0)
        text = observation_text(result.observation)
        return f"{text}\n(the episode has ended)" if self._done else text


def openenv_factory(
    urls: str | Sequence[str],
    *,
    name: str = "act",
    description: str = "",
    timeout: float = 30.0,
    turn_rewards: bool = False,
) -> Callable[[], OpenEnvSession]:
    """Return an ``environment_factory`` for OpenEnv servers; the action's fields become arguments of a tool.

    Every instance has a session of its own: servers need as many (``max_concurrent_envs``) as there are
    rollouts in a generation batch. Instances use several servers in turn.

    Args:
        urls: server URLs, without a path.
        description: description of the tool; default: that of the action schema.
        timeout: time limit of a request in seconds.
        turn_rewards: the reward of an action (``StepResult.reward``) is that of the turn that calls it, and
            that of ``reset`` counts for none; False: the sum of all is that of the rollout.

    Raises:
        ConfigError: openenv is missing, a URL is invalid, or the first server does not return its action
            schema.
    """
    if importlib.util.find_spec("openenv") is None:
        raise ConfigError("openenv_factory needs openenv 0.10 or newer: pip install 'groupwise[openenv]'")
    servers = [urls] if isinstance(urls, str) else list(urls)
    schema = _fetch_action_schema(servers[0], timeout)
    fields = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}

    async def act(self: OpenEnvSession, **action: object) -> str:
        return await self._step(action)

    act.__name__ = name
    act.json_schema = {  # type: ignore[attr-defined]
        "type": "function",
        "function": {
            "name": name,
            "description": description or schema.get("description", "Act in the environment."),
            "parameters": {
                "type": "object",
                "properties": {
                    key: {k: v for k, v in value.items() if k != "title"} for key, value in fields.items()
                },
                "required": [key for key in schema.get("required", []) if key in fields],
            },
        },
    }
    members: dict[str, Any] = {name: act, "_tool": name}
    if turn_rewards:
        members["get_reward"] = OpenEnvSession._turn_rewards
    session = type("OpenEnvSession", (OpenEnvSession,), members)
    next_url = itertools.cycle(servers)
    return lambda: session(next(next_url), timeout)


def observation_text(observation: object) -> str:
    """Convert an observation to text: its only string field, else JSON without None values and metadata."""
    if not isinstance(observation, dict):
        return str(observation)
    fields = {key: value for key, value in observation.items() if key != "metadata" and value is not None}
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return json.dumps(fields, ensure_ascii=False)


def _fetch_action_schema(url: str, timeout: float) -> dict[str, Any]:
    import httpx

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise ConfigError(
            f"openenv_factory got {url!r}; allowed: http://host:port, ws://host:port or the like"
        )
    schema_url = urlunsplit((parts.scheme.replace("ws", "http"), parts.netloc, "/schema", "", ""))
    try:
        response = httpx.get(schema_url, timeout=timeout, trust_env=parts.hostname not in _LOCAL_HOSTS)
        return dict(response.raise_for_status().json()["action"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(
            f"no schema of actions from {schema_url} within {timeout:g} seconds ({problem}); start the "
            "server, or correct the URL"
        ) from problem
