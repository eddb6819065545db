"""Environments behind a server that speaks OpenEnv: ``/schema``, and ``/reset`` and ``/step`` or ``/ws``."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from groupwise.errors import ConfigError

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_LOCAL = ("localhost", "127.0.0.1", "::1")


class OpenEnvSession:
    """One session; the tool ``act`` is added by :func:`openenv_factory`, which knows the server's actions."""

    def __init__(self, url: str, seconds: float) -> None:
        self._link: _Http | _WebSocket = (_WebSocket if url.startswith("ws") else _Http)(url, seconds)
        self._done, self._reward = True, 0.0

    def reset(self, **row: Any) -> str:
        given = {"seed": row["seed"]} if isinstance(row.get("seed"), int) else {}
        self._done, self._reward = False, 0.0
        return self._take(self._link.reset(given))

    def _act(self, action: dict[str, Any]) -> str:
        if self._done:
            raise RuntimeError("the episode has ended; no further action is possible")
        return self._take(self._link.step(action))

    def get_reward(self) -> float:
        """The sum of the episode's rewards."""
        return self._reward

    def _take(self, result: dict[str, Any]) -> str:
        self._done = bool(result.get("done"))
        self._reward += float(result.get("reward") or 0.0)
        text = as_observation(result.get("observation"))
        return f"{text}\n(the episode has ended)" if self._done else text


def openenv_factory(
    urls: str | Sequence[str], *, name: str = "act", description: str = "", timeout: float = 30.0
) -> Callable[[], OpenEnvSession]:
    """An ``environment_factory`` for an OpenEnv server; the fields of its action become arguments of a tool.

    With ``ws://`` or ``wss://`` every instance has a session of its own. With ``http://`` the server has to
    tell instances apart by the ``episode_id`` that every request carries, or serve one at a time: then give
    as many URLs as there are rollouts in a generation batch, and instances take them in turn.

    Args:
        urls: of servers, without the path.
        name, description: of the tool.
        timeout: seconds that a request may take.

    Raises:
        ConfigError: no server answers with the schema of its actions.
    """
    servers = [urls] if isinstance(urls, str) else list(urls)
    schema = _fetch_schema(servers[0], timeout)
    fields = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}

    def act(self: OpenEnvSession, **action: Any) -> str:
        return self._act(action)

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
    session = type("OpenEnvSession", (OpenEnvSession,), {name: act})
    turn = itertools.cycle(servers)
    return lambda: session(next(turn), timeout)


def as_observation(observation: Any) -> str:
    """An observation as text: its only field, else JSON without what is empty."""
    if not isinstance(observation, dict):
        return str(observation)
    told = {key: value for key, value in observation.items() if key != "metadata" and value is not None}
    if len(told) == 1 and isinstance(only := next(iter(told.values())), str):
        return only
    return json.dumps(told, ensure_ascii=False)


def _fetch_schema(url: str, seconds: float) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise ConfigError(
            f"openenv_factory got {url!r}; allowed: http://host:port, ws://host:port or the like"
        )
    plain = urlunsplit(parts._replace(scheme={"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)))
    try:
        answer = _request(f"{plain.rstrip('/')}/schema", None, seconds)
        return dict(answer["action"])
    except (OSError, ValueError, KeyError, RuntimeError) as problem:
        raise ConfigError(
            f"no schema of actions from {plain}/schema within {seconds:g} seconds ({problem}); start the "
            "server, or correct the URL"
        ) from problem


def _request(url: str, body: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    # A proxy of the surroundings cannot see this machine.
    opener = _NO_PROXY if urlsplit(url).hostname in _LOCAL else urllib.request.build_opener()
    try:
        with opener.open(request, timeout=seconds) as response:
            return json.load(response)
    except urllib.error.HTTPError as problem:
        detail = problem.read(2000).decode("utf-8", "replace")
        raise RuntimeError(f"{url} answered {problem.code}: {detail}") from problem
    except TimeoutError as problem:
        raise TimeoutError(f"{url} did not answer within {seconds:g} seconds") from problem


class _Http:
    """Requests that name the episode they belong to."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url, self.seconds = url.rstrip("/"), seconds
        self.episode = ""

    def reset(self, given: dict[str, Any]) -> dict[str, Any]:
        self.episode = uuid.uuid4().hex
        return _request(f"{self.url}/reset", {**given, "episode_id": self.episode}, self.seconds)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        return _request(f"{self.url}/step", {"action": action, "episode_id": self.episode}, self.seconds)


class _WebSocket:
    """A connection is a session; it is opened with the first reset, and anew after it broke."""

    def __init__(self, url: str, seconds: float) -> None:
        try:
            from websockets.sync.client import connect
        except ImportError as missing:
            raise ConfigError(
                f"{url} needs the package websockets (pip install 'groupwise[openenv]')"
            ) from missing
        self.connect, self.url, self.seconds = connect, f"{url.rstrip('/')}/ws", seconds
        self.connection: Any = None

    def reset(self, given: dict[str, Any]) -> dict[str, Any]:
        return self._ask("reset", given)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if self.connection is None:
            raise ConnectionError(f"the session with {self.url} is lost")
        return self._ask("step", action)

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if self.connection is None:
            proxy = None if urlsplit(self.url).hostname in _LOCAL else True
            self.connection = self.connect(
                self.url, open_timeout=self.seconds, max_size=100 * 1024 * 1024, proxy=proxy
            )
        try:
            self.connection.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self.connection.recv(timeout=self.seconds))
        except Exception:
            connection, self.connection = self.connection, None  # what comes next would answer this question
            connection.close()
            raise
        if answer.get("type") == "error":
            raise RuntimeError(str(answer.get("data", {}).get("message", answer)))
        return answer.get("data", {})
