"""The vLLM servers of a run: generation from token ids, and vLLM's own routes for new weights.

The servers are plain ``vllm serve`` processes, started with the flags of ``serve.serve_command``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from groupwise.errors import BackendError
from groupwise.generation.vllm.background import BackgroundThreads
from groupwise.generation.vllm.http import HttpClient, LostAnswerError
from groupwise.generation.vllm.sampling import Request
from groupwise.records import Completion

#: Requests in flight per server; each asks for all samples of a prompt.
CONCURRENCY = 128

_UNUSABLE = "incomplete"
_NO_LOGPROB = -9999.0  # what vLLM writes where it has none
_COUNTERS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total\S* (\S+)$", re.MULTILINE)


class LostWeightsError(Exception):
    """A server does not have the weights of this run: it was started anew, or somebody else changed them."""


class VLLMServers:
    """Every server of a run as one.

    Args:
        urls: addresses; prompts are spread over them, weights go to all.
        timeout: seconds without progress after which waiting for a server ends in a ConnectionError.
        how_to_start: the command that starts a server, for that error.
        run: marks weights as those of this run: a server started anew has none of them.
    """

    def __init__(self, urls: Sequence[str], timeout: float, how_to_start: str = "", run: str = "run") -> None:
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        hint = f"; start it with: {how_to_start}" if how_to_start else ""
        self.servers = [HttpClient(url, timeout, headers, hint, _tokens_so_far) for url in urls]
        self.run = run
        self.world_sizes: list[int] = []
        self.pool = BackgroundThreads(CONCURRENCY * len(self.servers))

    # Generation.

    def submit(
        self, requests: Sequence[Request], sampling: dict[str, Any], first: int = 0
    ) -> list[Future[list[Completion]]]:
        """Send the requests in the background.

        Args:
            sampling: fields of vLLM's ``SamplingParams`` that all share.
            first: the server of the first request; the following ones take turns.

        Returns:
            one future per request. It raises LostWeightsError where the server must get weights first.
        """
        return [
            self.pool.submit(self._generate, self.servers[(first + i) % len(self.servers)], request, sampling)
            for i, request in enumerate(requests)
        ]

    def _generate(self, server: HttpClient, request: Request, sampling: dict[str, Any]) -> list[Completion]:
        count = request.num_samples(sampling.get("temperature", 1.0))
        fields = {
            "n": count,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "logprobs": 0,
        }
        body = {"token_ids": list(request.prompt), "sampling_params": {**sampling, **fields}}
        answer = server.call(
            "POST",
            "/inference/v1/generate",
            body,
            doing=f"generating {len(request.rows)} completions of a prompt of {len(request.prompt)} tokens",
            before_retry=lambda: self._check_weights(server),
            accept=_check_complete,
        )
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [self._completion(choices[row % count]) for row in range(len(request.rows))]

    def _completion(self, choice: dict[str, Any]) -> Completion:
        logps = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return Completion(
            token_ids=choice["token_ids"],
            logps=[float("nan") if logp <= _NO_LOGPROB else logp for logp in logps],
            truncated=choice["finish_reason"] == "length",
            versions=list(self._versions(choice)),
        )

    def _versions(self, choice: dict[str, Any]) -> Iterator[int]:
        for span in choice["weight_versions"] or []:
            yield from [self._step(span["version"])] * (span["end"] - span["start"])

    def _step(self, label: str) -> int:
        run, _, step = label.rpartition(":")
        if run != self.run:
            raise LostWeightsError(label)
        return int(step)

    def _check_weights(self, server: HttpClient) -> None:
        self._step(server.once("GET", "/weight_info", doing="asking for its weights")["weight_version"])

    # New weights: what a ``transport.WeightSender`` calls. Nothing here is sent twice.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every server joins the transfer, with ranks of its own where ranks are told."""
        bodies = []
        rank = init_info.get("rank_offset")
        for size in self.world_sizes or [1] * len(self.servers):
            bodies.append({"init_info": init_info if rank is None else {**init_info, "rank_offset": rank}})
            rank = None if rank is None else rank + size
        self._post("/init_weight_transfer_engine", bodies, doing="joining the weight transfer")

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", doing="starting a weight update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", [{"update_info": update_info}], doing="receiving weights")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        # Without a version the update was given up; what is there then must not pass for an older one.
        label = _UNUSABLE if weight_version is None else f"{self.run}:{weight_version}"
        body = {"weight_version": label}
        self._post("/finish_weight_update", [body], doing="finishing a weight update")

    def pause(self) -> None:
        """Hold what is being generated; it goes on with ``resume``."""
        self._post("/pause?mode=keep", doing="pausing")

    def resume(self) -> None:
        """Go on after ``pause``. What was computed with the weights before is computed again."""
        # Requests on hold give their keys and values back; otherwise they would go on with old ones.
        self._post("/reset_prefix_cache?reset_running_requests=true", doing="resetting the prefix cache")
        self._post("/resume", doing="resuming")

    def abandon_update(self) -> None:
        """Make the servers forget an update that was not finished; they stay paused."""
        for server in self.servers:
            try:
                server.once("POST", "/finish_weight_update", {}, doing="abandoning a weight update")
            except (LostAnswerError, BackendError):
                continue  # none was under way

    def wait_until_up(self, doing: str) -> None:
        """Return when all servers are healthy; a ConnectionError after the timeout."""
        self._on_all(lambda server: server.wait_until_up(doing))

    def fetch_world_sizes(self) -> list[int]:
        """Return the number of workers of each server."""
        answers = self._on_all(lambda s: s.call("GET", "/get_world_size", doing="asking for its workers"))
        self.world_sizes = [answer["world_size"] for answer in answers]
        return self.world_sizes

    def close(self) -> None:
        """End what is under way."""
        for server in self.servers:
            server.close()
        self.pool.close()

    def _post(self, path: str, bodies: Sequence[Any] = ({},), *, doing: str) -> None:
        by_server = list(bodies) * (len(self.servers) // len(bodies))
        pairs = list(zip(self.servers, by_server, strict=True))
        self._on_all(lambda pair: pair[0].once("POST", path, pair[1], doing=doing), pairs)

    def _on_all(self, call: Callable[[Any], Any], items: Sequence[Any] | None = None) -> list[Any]:
        with ThreadPoolExecutor(len(self.servers), "vllm-control") as pool:
            return list(pool.map(call, self.servers if items is None else items))


def _check_complete(answer: Any) -> None:
    """A server that shuts down answers with what it had."""
    reasons = {choice["finish_reason"] for choice in answer["choices"]} - {"stop", "length"}
    if reasons:
        raise LostAnswerError(f"the server ended a completion by {', '.join(sorted(map(str, reasons)))}")


def _tokens_so_far(server: HttpClient) -> float | None:
    """Tokens that the server has read and generated; None if it does not count."""
    text = server.once("GET", "/metrics", doing="asking for its progress", timeout=10.0)
    counts = _COUNTERS.findall(text or "")
    return sum(map(float, counts)) if counts else None
