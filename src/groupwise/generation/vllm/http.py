"""Asynchronous HTTP client of one vLLM server: retries, and waits that end without progress."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from groupwise.errors import BackendError, ConfigError

try:
    import httpx
except ImportError as missing:
    raise ConfigError("vllm_mode='server' needs httpx: pip install 'groupwise[vllm]'") from missing

T = TypeVar("T")

logger = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request at INFO

_RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
_MAX_POLL = 10.0  # seconds for a health or metrics request
_COUNTERS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total\S* (\S+)$", re.MULTILINE)


class ServerUnavailableError(BackendError, ConnectionError):
    """A server did not respond within ``vllm_server_timeout``, or kept failing."""


class LostAnswerError(Exception):
    """A request got no usable response; repeating it may succeed."""


class HttpClient:
    """Client of one server. Connections are kept alive; all methods run in one event loop.

    Args:
        url: see :func:`parse_url`.
        timeout: seconds without progress after which a wait raises ServerUnavailableError.
        hint: end of that error's message.

    Attributes:
        health: route that responds once requests are taken.
        counted: servers whose tokens are the progress of this one: itself, or the workers of a router.
    """

    attempts = 4
    first_pause = 0.5  # seconds before the second attempt; doubles with each
    health = "/health"

    def __init__(self, url: str, timeout: float, hint: str) -> None:
        self.url, self.timeout, self.hint = parse_url(url), timeout, hint
        self.counted = [self]
        key = os.environ.get("VLLM_API_KEY")  # never part of a message
        self.http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            verify=ssl.create_default_context() if self.url.startswith("https") else False,
            trust_env=False,  # no proxy
            timeout=httpx.Timeout(None, connect=min(timeout, _MAX_POLL)),
            limits=httpx.Limits(max_connections=None),  # /pause must not queue behind generation
        )
        self._polling = asyncio.Lock()
        self._last_progress = self._last_poll = time.monotonic()
        self._num_tokens = 0.0

    async def call(self, method: str, path: str, body: object = None, *, doing: str) -> Any:
        """Send an idempotent request; see :meth:`once` and :meth:`retry`."""
        return await self.retry(lambda number: self.once(method, path, body, doing=doing), doing)

    async def retry(
        self, attempt: Callable[[int], Awaitable[T]], doing: str, patience: float | None = None
    ) -> T:
        """Await ``attempt(number)``, again once the server is healthy if it raises LostAnswerError.

        Args:
            doing: what it is for, in messages.
            patience: see :meth:`wait_until_up`.

        Raises:
            ServerUnavailableError: no response within the timeout, or all attempts failed.
        """
        number = 1
        while True:
            try:
                return await attempt(number)
            except LostAnswerError as lost:
                if number == self.attempts:
                    raise ServerUnavailableError(
                        f"the vLLM server at {self.url} failed {number} times while {doing}; the last "
                        f"error: {lost}"
                    ) from lost
                logger.warning("%s: %s while %s; trying again", self.url, lost, doing)
                await asyncio.sleep(self.first_pause * 2 ** (number - 1))
                await self.wait_until_up(doing, patience)
                number += 1

    async def once(
        self, method: str, path: str, body: object = None, *, doing: str, timeout: float | None = None
    ) -> Any:
        """Send a request once.

        Args:
            timeout: maximum seconds to wait; None: as long as the server makes progress.

        Returns:
            the decoded response; text if it is not JSON.

        Raises:
            LostAnswerError: no usable response; repeating the request may succeed.
            ServerUnavailableError: no progress within the timeout of the client.
            BackendError: the server refused the request.
        """
        request, start = asyncio.ensure_future(self._send(method, path, body)), time.monotonic()
        try:
            while not (await asyncio.wait([request], timeout=timeout or self.timeout / 8))[0]:
                if timeout is not None:
                    raise LostAnswerError(f"no response within {timeout:.1f} s")
                last_progress = max(start, await self._poll_progress())
                if not request.done() and time.monotonic() - last_progress >= self.timeout:
                    raise ServerUnavailableError(
                        f"the vLLM server at {self.url} made no progress for vllm_server_timeout="
                        f"{self.timeout:g} s while {doing}; look at its log and restart it, or raise "
                        "vllm_server_timeout if it is only slow"
                    )
        finally:
            request.cancel()  # no effect on a finished request
        response = request.result()
        if timeout is None:
            self._last_progress = time.monotonic()
        return response

    async def fetch_num_tokens(self) -> float:
        """Return the number of tokens the server has read and generated; 0 if it does not report them."""
        with suppress(LostAnswerError, BackendError):
            text = await self.once("GET", "/metrics", doing="reading its metrics", timeout=_MAX_POLL)
            return sum(map(float, _COUNTERS.findall(text)))
        return 0.0

    async def wait_until_up(self, doing: str, patience: float | None = None) -> None:
        """Return once the server is healthy.

        Args:
            patience: seconds to wait instead of the timeout.

        Raises:
            ServerUnavailableError: not within that time.
        """
        limit = f"vllm_server_timeout={self.timeout:g}" if patience is None else f"{patience:g}"
        end = time.monotonic() + (self.timeout if patience is None else patience)
        shortest = pause = 0.1
        while True:
            left = end - time.monotonic()
            try:
                limited = max(min(left, _MAX_POLL), 0.1)
                await self.once("GET", self.health, doing="checking", timeout=limited)
                return
            except LostAnswerError as error:
                if left <= 0:
                    raise ServerUnavailableError(
                        f"no vLLM server was ready at {self.url} within {limit} s while {doing} "
                        f"({error}){self.hint}"
                    ) from None
                if pause == shortest:
                    logger.warning("waiting up to %g s for the vLLM server at %s (%s)", left, self.url, error)
            pause = min(pause * 1.5, 2.0)
            await asyncio.sleep(min(pause, left))

    async def _send(self, method: str, path: str, body: object) -> Any:
        try:
            async with self.http.stream(method, path, json=body) as response:
                await response.aread()
                if response.status_code >= 500:
                    # The server closes the connection soon, maybe during the next request.
                    await response.extensions["network_stream"].aclose()
        except httpx.TransportError as error:
            raise LostAnswerError(f"{type(error).__name__}: {error}") from error
        status = response.status_code
        if status == 200:
            with suppress(ValueError):
                return response.json()
            return response.text
        shown = f"{method} {path} returned {status}: {_reason(response.text)}"
        if status in _RETRYABLE:
            raise LostAnswerError(shown)
        raise BackendError(
            f"the vLLM server at {self.url} refused a request. {shown}{_ADVICE.get(status, '')}"
        )

    async def _poll_progress(self) -> float:
        """Return the time of the server's last response or last change of its number of tokens."""
        async with self._polling:  # one request polls for all
            if time.monotonic() - max(self._last_poll, self._last_progress) >= self.timeout / 8:
                counts = await asyncio.gather(*(server.fetch_num_tokens() for server in self.counted))
                self._last_poll = time.monotonic()
                if sum(counts) not in (0, self._num_tokens):
                    self._num_tokens, self._last_progress = sum(counts), self._last_poll
        return self._last_progress


def parse_url(url: str) -> str:
    """Return ``url`` with scheme and port (default: http, 8000), without a trailing slash.

    Raises:
        BackendError: not an http or https address, or one with a password or a query.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if "@" in parts.netloc:  # without the address: messages and saved settings must not have the password
        raise BackendError(
            "the address has a user name or password, which are not sent; set VLLM_API_KEY to the key that "
            "the server was started with"
        )
    try:
        port = parts.port or (443 if parts.scheme == "https" else 8000)
    except ValueError:  # not a number, or above 65535
        port = 0
    host, is_http = parts.hostname, parts.scheme in ("http", "https")
    if not is_http or not host or not port or parts.query or parts.fragment:
        raise BackendError(f"{url!r} is not the address of a server; allowed: http://host:port")
    # 0.0.0.0 means all addresses when listening; connecting to it is not portable.
    host = "127.0.0.1" if host == "0.0.0.0" else host
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


_ADVICE = {
    401: ". Set VLLM_API_KEY to the key that the server was started with",
    403: ". Start the server with --enable-scale-out (groupwise vllm-serve does)",
    404: ". Start a vLLM that has this route, with VLLM_SERVER_DEV_MODE=1 (groupwise vllm-serve does)",
}


def _reason(text: str) -> str:
    """Return the message of an error response, shortened."""
    with suppress(ValueError):
        found = json.loads(text)
        while isinstance(found, dict):
            found = found.get("error") or found.get("message") or found.get("detail") or str(found)
        text = str(found)
    return text if len(text) <= 500 else text[:500] + "..."
