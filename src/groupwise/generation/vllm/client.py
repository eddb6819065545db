"""Client of the vLLM servers of a run: generation from token ids, and vLLM's routes for weight transfer.

The servers are ``vllm serve`` processes, started with the flags of ``serve.serve_command``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import reprlib
import ssl
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch

from groupwise.errors import BackendError, ConfigError
from groupwise.generation.vllm.base import (
    NO_LOGPROB,
    Request,
    check_expanded,
    check_sample,
    make_completion,
    server_prompt,
)
from groupwise.records import Completion
from groupwise.records.sampling_mask import SamplingMask
from groupwise.threads import EventLoop

try:
    import httpx
    import msgspec
    from msgspec import DecodeError
except ImportError as missing:
    raise ConfigError("vllm_mode='server' needs httpx, msgspec: pip install 'groupwise[server]'") from missing


class _Token(msgspec.Struct, gc=False):
    """Fields of a sampled token, or of a candidate, that are read; a response has others."""

    token_id: int
    logprob: float


class _Position(_Token, gc=False):
    top_logprobs: list[_Token]


_TOKENS, _POSITIONS = msgspec.json.Decoder(list[_Token]), msgspec.json.Decoder(list[_Position])
_IDS, _MASK = msgspec.json.Decoder(list[int]), msgspec.json.Decoder(list[list[int]])
#: Decoder of a list, and end and beginning of its entries.
_Form: TypeAlias = "tuple[msgspec.json.Decoder[Any], bytes, bytes]"
#: Errors in reading a response; OverflowError: a number that no array holds.
_UNUSABLE = LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, DecodeError

logger = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request at INFO

T = TypeVar("T")
#: Takes a value from a decoded response.
Read: TypeAlias = "Callable[[Any], Any] | None"

#: Generation requests in flight per server; each is for all samples of a prompt.
CONCURRENCY = 128
#: Seconds that a server may be away while others can take its requests.
PATIENCE = 5.0
#: Longest time of a request in units of the timeout, however much the server does for others.
LONGEST = 20
#: Bytes of a generation that are decoded at a time: in about 1 ms, in which no other thread runs.
PIECE = 2**16

_GENERATE = "/inference/v1/generate"
_RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
_MAX_POLL = 10.0  # seconds for a health or metrics request
_COUNTERS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total\S* (\S+)$", re.MULTILINE)


class ServerUnavailableError(BackendError, ConnectionError):
    """A server did not respond within ``vllm_server_timeout``, or kept failing."""


class LostAnswerError(Exception):
    """A request got no usable response; repeating it may succeed."""


class LostWeightsError(Exception):
    """A server does not have this run's weights: it was restarted, or another run replaced them."""


class HttpClient:
    """Client of one server. Connections are kept alive; all methods run in one event loop.

    Args:
        url: see :func:`parse_url`.
        timeout: seconds without progress after which a wait raises ServerUnavailableError.
        hint: end of that error's message.

    Attributes:
        health: route that responds once requests are taken.
        counted: servers whose tokens are the progress of this one: itself, or the workers of a router.
        load: generation requests in flight.
    """

    attempts = 4
    first_pause = 0.5  # seconds before the second attempt; doubles with each
    health = "/health"

    def __init__(self, url: str, timeout: float, hint: str) -> None:
        self.url, self.timeout, self.hint = parse_url(url), timeout, hint
        self.counted, self.load = [self], 0
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

    async def call(self, *request: Any, doing: str, read: Read = None) -> Any:
        """Send an idempotent request; see :meth:`once` and :meth:`retry`."""
        return await self.retry(lambda number: self.once(*request, doing=doing, read=read), doing)

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
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        doing: str,
        timeout: float | None = None,
        read: Read = None,
        reader: GenerationReader | None = None,
    ) -> Any:
        """Send a request once.

        Args:
            timeout: maximum seconds to wait; None: as long as the server makes progress, and at most
                ``LONGEST`` times the timeout of the client.
            read: see :meth:`reading`.
            reader: gets the response while it arrives.

        Returns:
            the decoded response, text if it is not JSON, or what ``reader`` left of it; or the value that
            ``read`` takes from it.

        Raises:
            LostAnswerError: no usable response; repeating the request may succeed.
            ServerUnavailableError: no progress within the timeout of the client.
            BackendError: the server refused the request.
        """
        request, start = asyncio.ensure_future(self._send(method, path, body, reader)), time.monotonic()
        try:
            while not (await asyncio.wait([request], timeout=timeout or self.timeout / 8))[0]:
                if timeout is not None:
                    raise LostAnswerError(f"no response within {timeout:.1f} s")
                last_progress = max(start, await self._poll_progress())
                if request.done():
                    continue
                if time.monotonic() - start >= LONGEST * self.timeout:
                    limit = f"{LONGEST} times vllm_server_timeout={self.timeout:g} s"
                    raise LostAnswerError(f"{self.url} answered others, but not this request in {limit}")
                if time.monotonic() - last_progress >= self.timeout:
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
        with self.reading(response):
            return response if read is None else read(response)

    @contextmanager
    def reading(self, response: object) -> Iterator[None]:
        """Turn errors in reading a response into a LostAnswerError that names the server and the response."""
        try:
            yield
        except _UNUSABLE as error:
            raise LostAnswerError(
                f"the vLLM server at {self.url} sent an answer that cannot be used ({type(error).__name__}: "
                f"{error}): {reprlib.repr(response)[:200]}"
            ) from error

    async def fetch_num_tokens(self) -> float:
        """Return the number of tokens the server has read and generated; 0 if it does not report them."""
        doing, read = "reading its metrics", lambda text: sum(map(float, _COUNTERS.findall(text)))
        with suppress(LostAnswerError, BackendError):
            return await self.once("GET", "/metrics", doing=doing, timeout=_MAX_POLL, read=read)
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

    async def _send(
        self, method: str, path: str, body: object, reader: GenerationReader | None = None
    ) -> Any:
        answer = bytearray() if reader is None else reader.text
        try:
            async with self.http.stream(method, path, json=body) as response:
                take = answer.extend if reader is None or response.status_code != 200 else reader.feed
                async for part in response.aiter_bytes():
                    with self.reading(part):
                        take(part)
                if response.status_code >= 500:
                    # The server closes the connection soon, maybe during the next request.
                    await response.extensions["network_stream"].aclose()
        except httpx.RequestError as error:
            raise LostAnswerError(f"{type(error).__name__}: {error}") from error
        status = response.status_code
        if status == 200:
            if answer[:100].lstrip().startswith(b"<"):  # of a proxy, or another service
                raise LostAnswerError(f"{self.url} returned a web page for {path}: {_reason(answer)}")
            with suppress(ValueError, RecursionError):
                return json.loads(answer) if reader is None else answer
            return answer.decode(errors="replace")
        shown = f"{method} {path} returned {status}: {_reason(answer)}"
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


class _Entries:
    """Numbers of a list of token ids, log-probs or of a sampling mask; with candidates, of the last two.

    ids, logps: of the sampled tokens.
    kept, counts: as in :class:`SamplingMask`; without candidates that top_p or min_p removed.
    """

    def __init__(self) -> None:
        self.ids, self.logps, self.kept, self.counts = array("i"), array("f"), array("i"), array("i")

    def add(self, text: bytes | bytearray, decoder: msgspec.json.Decoder[Any]) -> None:
        """Add the entries of a JSON list; raises an error of ``_UNUSABLE`` for another list."""
        entries = decoder.decode(text)
        if decoder is _IDS:
            self.ids.extend(entries)
            return
        if decoder is not _MASK:
            self.ids.extend([entry.token_id for entry in entries])
            self.logps.extend([entry.logprob for entry in entries])
        if decoder is _POSITIONS:
            tops = [entry.top_logprobs for entry in entries]
            entries = [[one.token_id for one in top if one.logprob > NO_LOGPROB] for top in tops]
        if decoder is not _TOKENS:
            self.kept.extend(chain.from_iterable(entries))
            self.counts.extend(map(len, entries))


class GenerationReader:
    """Reader of a generation that decodes token ids, log-probs and sampling masks while they arrive.

    They are nearly all of its bytes: whole entries leave the text, in the compact form in which vLLM writes
    them. A list in another form stays.

    Args:
        with_top: the candidates of a position are its sampling mask.

    Attributes:
        text: the response without these entries: a list has its index in ``lists`` instead, a string.
    """

    _BEGIN = re.compile(rb'"(content(?=":\[\{)|sampling_mask(?=":\[\[)|token_ids(?=":\[\d))":\[')
    _LONGEST = 18  # bytes of a beginning

    def __init__(self, with_top: bool) -> None:
        self.text, self.lists = bytearray(), list[_Entries]()
        self._of_tokens = _POSITIONS if with_top else _TOKENS
        self._start = 0  # of the text to search
        self._form: _Form | None = None  # None: outside of a list

    def feed(self, part: bytes) -> None:
        """Read the next part of the response."""
        for start in range(0, len(part), PIECE):
            self.text += part[start : start + PIECE]
            while self._read():
                pass

    def _read(self) -> bool:
        """Decode what has arrived of a list; returns False if more of the text is needed."""
        text = self.text
        if self._form is None:
            if (found := self._BEGIN.search(text, self._start)) is None:
                self._start = max(self._start, len(text) - self._LONGEST)
                return False
            self._start, name = found.start(), found[1]
            form: _Form = (_IDS, b"", b"") if name == b"token_ids" else (_MASK, b"]", b"[")
            if name == b"content":
                if (first := text.find(b"}", found.end())) < 0:
                    return False
                # With candidates an entry ends in the bracket of their list. No string has quotes.
                has_top = text.find(b'"top_logprobs":[', found.end(), first) >= 0
                form = self._of_tokens, b"]}" if has_top else b"}", b"{"
            self._start, self._form = found.end(), form
            self.lists.append(_Entries())
        decoder, close, opening = self._form
        end = text.find(close + b"]", self._start)
        stop = (end if end >= 0 else text.rfind(close + b"," + opening, self._start)) + len(close)
        if stop < len(close):
            return False
        self.lists[-1].add(b"[" + text[self._start : stop] + b"]", decoder)
        time.sleep(5e-5)  # the thread that trains runs; without a wait this one would go on
        if end < 0:
            del text[self._start : stop + 1]  # with the comma
            return False
        text[self._start : stop] = b'"%d"' % (len(self.lists) - 1)
        self._form = None
        return True

    def entries(self, found: Any, decoder: msgspec.json.Decoder[Any] | None = None) -> _Entries:
        """Return a list of the decoded ``text``; ``decoder``: None for log-probs."""
        if type(found) is list and found and type(found[0]) is str:
            return self.lists[int(found[0])]
        entries = _Entries()
        entries.add(msgspec.json.encode(found), decoder or self._of_tokens)
        return entries


class VLLMServers:
    """All servers of a run. Methods block; requests run in an event loop in the background.

    One of several servers that does not respond is lost: it gets no requests, and others repeat those that it
    had, with the same seeds. :meth:`find_lost` takes it back.

    Args:
        urls: addresses. A request goes to the server with the fewest in flight, weights go to all of them.
        timeout: seconds without progress after which a wait raises a ConnectionError.
        hint: returns the end of that error's message for an address.
        run_id: part of the weight version, which a restarted server does not have.
        vocab_size: number of token ids that the policy has.

    Attributes:
        router: a router in front of the servers, to which all requests go; see :meth:`find_workers`.
        steps: optimizer steps whose weights the servers got, in order. The caller adds each before its sync.
        lost: addresses of lost servers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        timeout: float,
        hint: Callable[[str], str] = lambda url: "",
        run_id: str = "run",
        vocab_size: int = 2**31,
    ) -> None:
        self._connect = lambda url: HttpClient(url, timeout, hint(url))
        self.servers = [self._connect(url) for url in urls]
        self.router: HttpClient | None = None
        self.run_id, self.vocab_size, self.steps = run_id, vocab_size, list[int]()
        self.adapter: str | None = None  # of new requests; None: the weights of the model
        self.lost: set[str] = set()
        self._slots = asyncio.Semaphore(CONCURRENCY * len(urls))
        self._background = EventLoop("vllm-client")

    # Generation.

    def submit(self, request: Request, params: dict[str, Any], first: int = 0) -> Future[list[Completion]]:
        """Send a request in the background; all servers sample it alike.

        Args:
            params: fields of vLLM's ``SamplingParams``.
            first: index of the server that is preferred among equally loaded ones.

        Returns:
            samples by row. The future raises LostWeightsError if the server needs weights first, or sampled
            with others than those of this step and the later ones.
        """
        since = len(self.steps) - 1  # before the adapter is read, which an update changes first
        return self._background.submit(self._generate(first, request, params, self.adapter, since))

    async def _generate(
        self, first: int, request: Request, params: dict[str, Any], adapter: str | None, since: int
    ) -> list[Completion]:
        body: dict[str, Any] = {**server_prompt(request), "sampling_params": params}
        if adapter is not None:
            body["model"] = adapter
        doing = f"generating {len(request.rows)} completions of a {len(request.prompt)}-token prompt"
        samples = None
        async with self._slots:
            time.sleep(5e-5)  # as after a piece: many requests may begin at once
            while samples is None:
                targets = self.live if self.router is None else [self.router]
                patience = PATIENCE if len(targets) > 1 else None
                server = min(targets[first % len(targets) :] + targets, key=lambda s: s.load)
                server.load += 1
                try:
                    attempt = partial(self._attempt, server, request, body, doing)
                    samples = await server.retry(attempt, doing, patience)
                except ServerUnavailableError as error:
                    if patience is None:
                        raise
                    if self.live != [server]:  # the last one gets the full time
                        self.lost.add(server.url)
                        logger.warning("the other vLLM servers continue alone: %s", error)
                except BackendError:
                    if adapter is not None:
                        await self._check_weights(server, adapter)  # a restarted server has no such model
                    raise
                finally:
                    server.load -= 1
        sampled_by = set(chain.from_iterable(sample.versions or () for sample in samples))
        if not sampled_by <= {*self.steps[since:]}:
            # Such as by a worker that a router chose, and that was away during an update.
            raise LostWeightsError(f"{server.url} sampled with the weights of steps {sorted(sampled_by)}")
        return request.by_row(samples)

    async def _attempt(
        self, server: HttpClient, request: Request, body: dict[str, Any], doing: str, number: int
    ) -> list[Completion]:
        params, version = body["sampling_params"], body.get("model")
        if number > 1:
            await self._check_weights(server, version)
        reader = GenerationReader(with_top=params["logprobs"] > 0)
        answer = await server.once("POST", _GENERATE, body, doing=doing, reader=reader)
        with server.reading(answer):
            response = msgspec.json.decode(answer)
            choices = sorted(response["choices"], key=itemgetter("index"))
            if [choice["index"] for choice in choices] != list(range(params["n"])):
                raise ValueError(f"{len(choices)} choices that are not 0 to {params['n'] - 1}")
            if reasons := {choice["finish_reason"] for choice in choices} - {"stop", "length"}:
                raise ValueError(f"a completion ended by {', '.join(sorted(map(str, reasons)))}")
            check_expanded(request, response.get("prompt_token_ids"), f"the vLLM server at {server.url}")
            if version is None and "weight_versions" not in choices[0]:
                # vLLM before 0.32. No update comes between: the preflight refuses rollout_staleness with it.
                version = await self._weight_version(server)
            return [self._completion(reader, choice, params, version, server.url) for choice in choices]

    def _completion(
        self,
        reader: GenerationReader,
        choice: dict[str, Any],
        params: dict[str, Any],
        version: str | None,
        url: str,
    ) -> Completion:
        """Return the record of a choice; raises what ``reading`` turns for one that is none."""
        time.sleep(5e-5)  # as after a piece
        tokens = reader.entries(choice["token_ids"], _IDS).ids
        entries = reader.entries(choice["logprobs"]["content"])
        if entries.ids != tokens:
            raise ValueError("log-probs of other tokens than the sampled ones")
        # A request may outlast an update of the weights, but not a change of the adapter.
        whole: dict[str, Any] = {"version": version, "start": 0, "end": len(tokens)}
        spans = choice["weight_versions"] if version is None else [whole]
        edges = [0, *(span["end"] for span in spans)]
        if (
            [span["start"] for span in spans] != edges[:-1]
            or edges != sorted(edges)
            or edges[-1] != len(tokens)
        ):
            raise ValueError(f"weight versions that do not cover its {len(tokens)} tokens: {spans}")
        kept = choice.get("sampling_mask")
        of_mask = entries if kept is None else reader.entries(kept, _MASK)
        mask = None
        if kept is not None or params["logprobs"] > 0:
            mask = SamplingMask(*(torch.from_numpy(np.asarray(n)) for n in (of_mask.kept, of_mask.counts)))
        check_sample(entries.ids, entries.logps, mask, params["max_tokens"], self.vocab_size)
        runs = [(self._step(span["version"], url), span["end"] - span["start"]) for span in spans]
        return make_completion(tokens.tolist(), entries.logps, choice["finish_reason"], runs, mask)

    def _step(self, version: str, url: str) -> int:
        parts = str(version).split(":")  # run, number of the adapter if it is one, step
        if parts[0] != self.run_id or not parts[-1].isdecimal():
            raise LostWeightsError(f"{url} has the weights {version!r}")
        return int(parts[-1])

    async def _check_weights(self, server: HttpClient, adapter: str | None) -> None:
        """Raise LostWeightsError if the server, or a worker behind the router, does not have the weights."""
        if server is self.router:
            for worker in self.servers:
                with suppress(LostAnswerError):  # the router leaves it out
                    await self._check_weights(worker, adapter)
        elif adapter is None:
            self._step(await self._weight_version(server), server.url)
        else:
            doing, read = "reading its adapters", lambda answer: [model["id"] for model in answer["data"]]
            if adapter not in await server.once("GET", "/v1/models", doing=doing, timeout=10.0, read=read):
                raise LostWeightsError(f"{server.url} does not have the adapter {adapter}")

    async def _weight_version(self, server: HttpClient) -> str:
        doing, read = "reading its weight version", itemgetter("weight_version")
        return await server.once("GET", "/weight_info", doing=doing, timeout=10.0, read=read)

    def post(
        self, path: str, bodies: Sequence[Any] = ({},), *, doing: str, timeout: float | None = None
    ) -> None:
        """Send a request to all servers once, with the bodies by server or one for all."""
        by_url = {s.url: bodies[i % len(bodies)] for i, s in enumerate(self.live)}
        self.on_all(lambda s: s.once("POST", path, by_url[s.url], doing=doing, timeout=timeout))

    # Weights: the methods of ``vllm.LLM``, for all servers together.

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        """Connect every server to the transfer; ``rank_offset`` is that of the first server."""
        bodies, given = [request], request["init_info"]
        if "rank_offset" in given:
            ranks = accumulate(self.fetch_world_sizes(), initial=given["rank_offset"])
            bodies = [{"init_info": {**given, "rank_offset": rank}} for rank in ranks]
        self.post("/init_weight_transfer_engine", bodies, doing="joining the weight transfer")

    def start_weight_update(self) -> None:
        self.post("/start_weight_update", doing="starting a weight update")

    def update_weights(self, request: dict[str, Any]) -> None:
        self.post("/update_weights", [request], doing="receiving weights")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        # Without a version the update failed, and the server's weights must not pass for an earlier version.
        version = "incomplete" if weight_version is None else f"{self.run_id}:{weight_version}"
        self.post("/finish_weight_update", [{"weight_version": version}], doing="finishing a weight update")

    def pause(self) -> None:
        """Suspend running requests until :meth:`resume`."""
        self.post("/pause?mode=keep", doing="pausing")

    def resume(self, *, with_images: bool = False) -> None:
        """Continue suspended requests; their keys and values are recomputed with the new weights.

        Args:
            with_images: requests may have images; the outputs of the vision tower are recomputed, too.
        """
        self.post("/reset_prefix_cache?reset_running_requests=true", doing="resetting the prefix cache")
        if with_images:
            self.post("/reset_encoder_cache", doing="resetting the encoder cache")
        self.post("/resume", doing="resuming")

    def call_workers(
        self, method: str, given: dict[str, Any], url: str | None = None
    ) -> dict[str, list[Any]]:
        """Call a method of the workers of all servers, or of that with the address ``url``.

        Returns:
            by address, the answers of all workers of a server, or of those of its first data-parallel engine.
        """
        rpc, body = "/collective_rpc", {"method": method, "kwargs": given}
        # At least one result.
        doing, read = f"calling {method}", lambda answer: [answer["results"][0], *answer["results"][1:]]
        try:
            return self.on_all(lambda s: s.once("POST", rpc, body, doing=doing, read=read), url)
        except LostAnswerError as error:
            if method not in str(error):
                raise
            raise BackendError(
                f"a vLLM server does not have {method} ({error}); install groupwise in its environment, or "
                "set vllm_weight_check='off'"
            ) from error

    @property
    def live(self) -> list[HttpClient]:
        """Servers that are not lost."""
        return [server for server in self.servers if server.url not in self.lost]

    def find_workers(self) -> None:
        """If the only address is that of a vllm-router, send requests to it, and all else to its workers."""

        async def list_workers(server: HttpClient) -> list[str] | None:
            try:
                doing, read = "listing the workers of a router", lambda answer: [*map(str, answer["urls"])]
                return await server.call("GET", "/list_workers", doing=doing, read=read)
            except ServerUnavailableError:
                raise
            except BackendError:  # a server does not have this route
                return None

        listed = self.on_all(list_workers)
        routers = [server for server in self.servers if listed[server.url] is not None]
        if not routers:
            return
        router, workers = routers[0], listed[routers[0].url]
        if len(self.servers) > 1 or not workers:
            raise BackendError(
                f"{router.url} is the address of a router; give it alone, with workers behind it, or give "
                "those of its workers"
            )
        self.router, self.servers = router, [self._connect(url) for url in sorted(workers)]
        self._slots = asyncio.Semaphore(CONCURRENCY * len(self.servers))
        router.health = "/readiness"
        router.counted = self.servers  # which of them has a request is unknown

    def wait_until_up(self, doing: str) -> None:
        """Return once all servers are healthy; raises a ConnectionError after the timeout."""
        self.on_all(lambda server: server.wait_until_up(doing))

    def find_lost(self, doing: str) -> bool:
        """Update ``lost``; returns True if it changed. If no server is healthy, wait for all of them."""
        before, self.lost = self.lost, set()

        async def is_up(server: HttpClient) -> bool:
            with suppress(ServerUnavailableError):
                await server.wait_until_up(doing, 0.0 if server.url in before else PATIENCE)
                return True
            return False

        up = self.on_all(is_up) if len(self.servers) > 1 else {}
        if any(up.values()):
            self.lost = {url for url, is_up in up.items() if not is_up}
        else:
            self.wait_until_up(doing)
        return self.lost != before

    def fetch_world_sizes(self) -> list[int]:
        """Return the number of workers of each server."""
        doing, read = "reading its world size", lambda answer: int(answer["world_size"])
        return list(self.on_all(lambda s: s.once("GET", "/get_world_size", doing=doing, read=read)).values())

    def on_all(
        self, call: Callable[[HttpClient], Coroutine[Any, Any, T]], url: str | None = None
    ) -> dict[str, T]:
        """Call all servers that are not lost, or one, at once and wait for all.

        Returns:
            results by address. Raises the first error.
        """
        servers = [server for server in self.live if url in (None, server.url)]
        futures = {server.url: self._background.submit(call(server)) for server in servers}
        wait(futures.values())
        return {url: future.result() for url, future in futures.items()}

    def close(self) -> None:
        """Cancel all requests and close the connections."""

        async def close_connections() -> None:
            for server in filter(None, [*self.servers, self.router]):
                await server.http.aclose()

        self._background.close(close_connections)


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
    host, port, default = parts.hostname, None, {"http": 8000, "https": 443}.get(parts.scheme)
    with suppress(ValueError):  # not a number, or above 65535
        port = parts.port or default
    if not host or not port or not default or parts.query or parts.fragment:
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


def _reason(answer: bytes | bytearray) -> str:
    """Return the message of an error response, shortened."""
    text = answer.decode(errors="replace")
    with suppress(ValueError):
        found = json.loads(text)
        while isinstance(found, dict):
            found = found.get("error") or found.get("message") or found.get("detail") or str(found)
        text = str(found)
    return text if len(text) <= 500 else text[:500] + "..."
