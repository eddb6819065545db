"""One HTTP server: requests over kept connections, retried when it fails, and never waited for without end.

Standard library only. A wait ends when the server answers, when it shows no sign of life for ``timeout``
seconds, or when somebody calls ``stop``.
"""

from __future__ import annotations

import json
import logging
import queue
import select
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from groupwise.errors import BackendError

logger = logging.getLogger(__name__)

_SLICE = 0.5  # seconds between looks at whether to stop waiting
_BUSY = frozenset({408, 429, 502, 503, 504})


class ServerUnavailableError(BackendError, ConnectionError):
    """A server did not answer within ``vllm_server_timeout``, or kept failing."""


class LostAnswerError(Exception):
    """A request got no usable answer, but may when it is sent again."""


class HttpClient:
    """A server and the connections to it; every method may be called from any thread.

    Args:
        url: scheme, host, port and maybe a path prefix.
        timeout: seconds without a sign of life after which a wait ends in a ServerUnavailableError.
        headers: sent with every request; they stay out of messages.
        how_to_start: ends the message of that error.
        sign_of_life: asks the server for a number that changes while it works; None without one.
    """

    attempts = 4
    first_pause = 0.5  # seconds before the second attempt; doubles with each

    def __init__(
        self,
        url: str,
        timeout: float,
        headers: dict[str, str] | None = None,
        how_to_start: str = "",
        sign_of_life: Callable[[HttpClient], Any] | None = None,
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BackendError(f"{url!r} is no address of a server; allowed: http://host:port")
        # Listening on every address is written 0.0.0.0, which is none to connect to everywhere.
        self.host = "127.0.0.1" if parts.hostname == "0.0.0.0" else parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 8000)
        self.secure, self.prefix = parts.scheme == "https", parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{self.host}:{self.port}{self.prefix}"
        self.timeout, self.how_to_start, self.sign_of_life = timeout, how_to_start, sign_of_life
        self.headers = {"Content-Type": "application/json", **(headers or {})}
        self._idle: queue.LifoQueue[HTTPConnection] = queue.LifoQueue()
        self._stopped = threading.Event()
        self._looking = threading.Lock()
        self._last_life = self._last_look = time.monotonic()
        self._last_sign: Any = None

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        doing: str,
        before_retry: Callable[[], None] | None = None,
        accept: Callable[[Any], None] | None = None,
    ) -> Any:
        """Send a request that may be sent twice without harm, again when its answer is lost.

        Args:
            doing: what is waited for, in messages.
            before_retry: called when the server is up again; may raise to give the request up.
            accept: called with the answer; raises LostAnswerError for one that must be asked for again.

        Returns:
            the decoded answer; text if it is not JSON.

        Raises:
            ServerUnavailableError: no answer within the timeout, or only failures.
            BackendError: the server refuses the request.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                answer = self.once(method, path, body, doing=doing)
                if accept is not None:
                    accept(answer)
                return answer
            except LostAnswerError as lost:
                if attempt == self.attempts:
                    raise ServerUnavailableError(
                        f"the vLLM server at {self.url} failed {attempt} times while {doing}; the last time: "
                        f"{lost}"
                    ) from lost
                logger.warning("%s: %s while %s; trying again", self.url, lost, doing)
                self._sleep(self.first_pause * 2 ** (attempt - 1))
                self.wait_until_up(doing)
                if before_retry is not None:
                    before_retry()

    def once(
        self, method: str, path: str, body: Any = None, *, doing: str, timeout: float | None = None
    ) -> Any:
        """Send a request once.

        Args:
            timeout: seconds to wait at most. None: as long as the server makes progress; the answer is some.

        Raises:
            LostAnswerError: no usable answer, but there may be one next time.
            ServerUnavailableError, BackendError: as in ``call``.
        """
        payload = None if body is None else json.dumps(body).encode()
        try:
            connection = self._connection()
            try:
                connection.request(method, self.prefix + path, payload, self.headers)
                self._wait_readable(connection, doing, timeout)
                response = connection.getresponse()
                content = response.read()
            except BaseException:
                connection.close()
                raise
        except (OSError, HTTPException) as error:
            if isinstance(error, ServerUnavailableError):
                raise
            raise LostAnswerError(f"{type(error).__name__}: {error}") from error
        if response.status >= 500:  # the server closes it soon, maybe while the next request is under way
            connection.close()
        else:
            self._idle.put(connection)
        if timeout is None:
            self._last_life = time.monotonic()
        return self._decoded(method, path, response.status, content)

    def wait_until_up(self, doing: str) -> None:
        """Return when the server is healthy.

        Raises:
            ServerUnavailableError: it is not within the timeout.
        """
        end, pause, told = time.monotonic() + self.timeout, 0.1, False
        while True:
            left = end - time.monotonic()
            try:
                self.once("GET", "/health", doing="asking for its health", timeout=max(min(left, 10.0), 0.1))
                return
            except (LostAnswerError, ServerUnavailableError) as error:
                if left <= 0:
                    raise ServerUnavailableError(
                        f"no vLLM server was ready at {self.url} within vllm_server_timeout="
                        f"{self.timeout:g} s while {doing} ({error}){self.how_to_start}"
                    ) from None
                if not told:
                    logger.warning(
                        "waiting up to %g s for the vLLM server at %s (%s)", self.timeout, self.url, error
                    )
                told, pause = True, min(pause * 1.5, 2.0)
            self._sleep(min(pause, max(left, 0.0)))

    def stop(self) -> None:
        """End every wait, now and in the future, with a ServerUnavailableError."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and close the connections that nobody uses."""
        self.stop()
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def _connection(self) -> HTTPConnection:
        """A kept connection that the server has not closed, or a new one."""
        while True:
            try:
                connection = self._idle.get_nowait()
            except queue.Empty:
                break
            if connection.sock is not None and not _readable(connection, 0.0):
                return connection
            connection.close()  # nothing was asked on it, so what can be read is its end
        kind = HTTPSConnection if self.secure else HTTPConnection
        connection = kind(self.host, self.port, timeout=min(self.timeout, 10.0))
        connection.connect()
        connection.sock.settimeout(self.timeout)
        return connection

    def _wait_readable(self, connection: HTTPConnection, doing: str, timeout: float | None) -> None:
        start = time.monotonic()
        while not _readable(connection, _SLICE if timeout is None else min(_SLICE, timeout)):
            if self._stopped.is_set():
                raise ServerUnavailableError(f"the client of {self.url} was closed while {doing}")
            waited = time.monotonic() - start
            if timeout is not None and waited >= timeout:
                raise LostAnswerError(f"no answer within {timeout:.1f} s")
            if timeout is None and waited >= self.timeout and self._is_still():
                raise ServerUnavailableError(
                    f"the vLLM server at {self.url} made no progress for vllm_server_timeout="
                    f"{self.timeout:g} s while {doing}; look at its log and restart it, or raise "
                    "vllm_server_timeout if it is only slow"
                )
            self._look()

    def _is_still(self) -> bool:
        return time.monotonic() - self._last_life >= self.timeout

    def _look(self) -> None:
        """See whether the sign of life has changed; one thread looks for all, a few times per timeout."""
        if self.sign_of_life is None or not self._looking.acquire(blocking=False):
            return
        try:
            if time.monotonic() - max(self._last_look, self._last_life) < self.timeout / 8:
                return
            sign = self.sign_of_life(self)
            self._last_look = time.monotonic()
            if sign is not None and sign != self._last_sign:
                self._last_sign, self._last_life = sign, self._last_look
        except (LostAnswerError, BackendError):
            self._last_look = time.monotonic()
        finally:
            self._looking.release()

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise ServerUnavailableError(f"the client of {self.url} was closed")

    def _decoded(self, method: str, path: str, status: int, content: bytes) -> Any:
        text = content.decode(errors="replace")
        if status == 200:
            try:
                return json.loads(text) if text else None
            except ValueError:
                return text
        shown = f"{method} {path} answered {status}: {_reason(text)}"
        if status in _BUSY or status == 500:
            raise LostAnswerError(shown)
        raise BackendError(
            f"the vLLM server at {self.url} refused a request. {shown}{_ADVICE.get(status, '')}"
        )


_ADVICE = {
    401: ". Set VLLM_API_KEY to the key that the server was started with",
    403: ". Start the server with --enable-scale-out (groupwise vllm-serve does)",
    404: ". Start a vLLM that has this route, with VLLM_SERVER_DEV_MODE=1 (groupwise vllm-serve does)",
}


def _readable(connection: HTTPConnection, seconds: float) -> bool:
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(connection.sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(seconds * 1000))


def _reason(text: str) -> str:
    """The message inside an error answer, shortened."""
    try:
        found = json.loads(text)
        while isinstance(found, dict):
            found = found.get("error") or found.get("message") or found.get("detail") or str(found)
        text = str(found)
    except ValueError:
        pass
    return text if len(text) <= 500 else text[:500] + "..."
