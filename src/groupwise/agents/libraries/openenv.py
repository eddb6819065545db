"""Adapter for OpenEnv servers: ``/schema`` over HTTP; ``/reset`` and ``/step``, or a WebSocket at ``/ws``."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from groupwise.compat.versions import check_version
from groupwise.errors import ConfigError
from groupwise.threads import thread_safe

_OLDEST_WEBSOCKETS = "15"
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")  # a proxy cannot reach this machine


class OpenEnvSession:
    """An episode on an OpenEnv server; :func:`openenv_factory` adds the tool, from the server's schema."""

    def __init__(self, url: str, timeout: float) -> None:
        self._client: _HttpClient | _WebSocketClient
        self._client = (_WebSocketClient if url.startswith("ws") else _HttpClient)(url, timeout)
        self._done, self._reward = True, 0.0

    @thread_safe
    def reset(self, **row: object) -> str:
        arguments = {"seed": row["seed"]} if isinstance(row.get("seed"), int) else {}
        self._done, self._reward = False, 0.0
        return self._observe(self._client.reset(arguments))

    def _step(self, action: dict[str, Any]) -> str:
        if self._done:
            raise RuntimeError("the episode has ended; no further action is possible")
        return self._observe(self._client.step(action))

    def get_reward(self) -> float:
        """Return the sum of the episode's rewards."""
        return self._reward

    def _observe(self, result: dict[str, Any]) -> str:
        self._done = bool(result.get("done"))
        self._reward += float(result.get("reward") or 0.0)
        text = observation_text(result.get("observation"))
        return f"{text}\n(the episode has ended)" if self._done else text


def openenv_factory(
    urls: str | Sequence[str], *, name: str = "act", description: str = "", timeout: float = 30.0
) -> Callable[[], OpenEnvSession]:
    """Return an ``environment_factory`` for OpenEnv servers; the action's fields become arguments of a tool.

    With ``ws://`` or ``wss://``, every instance has a session of its own. With ``http://``, the server must
    distinguish instances by the ``episode_id`` in every request, or serve one at a time: then pass as many
    URLs as there are rollouts in a generation batch; instances use them in turn.

    Args:
        urls: server URLs, without a path.
        description: description of the tool; default: that of the action schema.
        timeout: time limit of a request in seconds.

    Raises:
        ConfigError: a URL is invalid, or the first server does not return its action schema.
    """
    servers = [urls] if isinstance(urls, str) else list(urls)
    schema = _fetch_action_schema(servers[0], timeout)
    fields = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}

    @thread_safe
    def act(self: OpenEnvSession, **action: object) -> str:
        return self._step(action)

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
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise ConfigError(
            f"openenv_factory got {url!r}; allowed: http://host:port, ws://host:port or the like"
        )
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    http_url = urlunsplit(parts._replace(scheme=scheme))
    try:
        response = _request(f"{http_url.rstrip('/')}/schema", None, timeout)
        return dict(response["action"])
    except (OSError, ValueError, KeyError, RuntimeError) as problem:
        raise ConfigError(
            f"no schema of actions from {http_url}/schema within {timeout:g} seconds ({problem}); start the "
            "server, or correct the URL"
        ) from problem


def _request(url: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
    """Send a GET request, or a POST request with a JSON body, and return the JSON response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    proxy = urllib.request.ProxyHandler({} if urlsplit(url).hostname in _LOCAL_HOSTS else None)
    try:
        with urllib.request.build_opener(proxy).open(request, timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as problem:
        detail = problem.read(2000).decode("utf-8", "replace")
        raise RuntimeError(f"{url} answered {problem.code}: {detail}") from problem
    except TimeoutError as problem:
        raise TimeoutError(f"{url} did not answer within {timeout:g} seconds") from problem


class _HttpClient:
    """Client whose requests carry the id of the episode."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self.episode_id = ""

    def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.episode_id = uuid.uuid4().hex
        return _request(f"{self.url}/reset", {**arguments, "episode_id": self.episode_id}, self.timeout)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        return _request(f"{self.url}/step", {"action": action, "episode_id": self.episode_id}, self.timeout)


class _WebSocketClient:
    """Client whose connection is a session; ``reset`` opens it, and opens it again after an error."""

    def __init__(self, url: str, timeout: float) -> None:
        try:
            from websockets.sync.client import connect
        except ImportError as missing:
            raise ConfigError(
                f"{url} needs the package websockets (pip install 'groupwise[openenv]')"
            ) from missing
        check_version("websockets", _OLDEST_WEBSOCKETS, url, "whose client lacks an argument; upgrade it")
        self.connect, self.url, self.timeout = connect, f"{url.rstrip('/')}/ws", timeout
        self.connection: Any = None

    def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return self._send("reset", arguments)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if self.connection is None:
            raise ConnectionError(f"the session with {self.url} is lost")
        return self._send("step", action)

    def _send(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if self.connection is None:
            proxy = None if urlsplit(self.url).hostname in _LOCAL_HOSTS else True
            self.connection = self.connect(
                self.url, open_timeout=self.timeout, max_size=100 * 1024 * 1024, proxy=proxy
            )
        try:
            self.connection.send(json.dumps({"type": kind, "data": data}))
            response = json.loads(self.connection.recv(timeout=self.timeout))
        except Exception:
            # A late response would be taken for that of the next request.
            connection, self.connection = self.connection, None
            connection.close()
            raise
        if response.get("type") == "error":
            raise RuntimeError(str(response.get("data", {}).get("message", response)))
        return response.get("data", {})
