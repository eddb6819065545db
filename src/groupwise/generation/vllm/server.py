"""Generation on vLLM servers that run beside the trainer.

Every process sends the requests for its own rows; process 0 sends the weights to all servers. Servers may
disappear and come back: what they were asked for is asked again with the same seeds, and a server that comes
back without this run's weights gets them first.
"""

from __future__ import annotations

import logging
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate.utils import gather_object

from groupwise.errors import BackendError, ConfigError
from groupwise.generation.transformers_generate import end_tokens
from groupwise.generation.vllm import transport
from groupwise.generation.vllm.client import LostWeightsError, VLLMServers
from groupwise.generation.vllm.colocate import check_policy
from groupwise.generation.vllm.http import HttpClient, LostAnswerError, ServerUnavailableError
from groupwise.generation.vllm.preflight import ServerFacts, check_servers
from groupwise.generation.vllm.sampling import Request, group_requests, sampling_fields
from groupwise.generation.vllm.serve import as_shell_line, serve_command
from groupwise.generation.weight_iterator import buckets, weight_iterator
from groupwise.records import Completion, SamplingOptions

logger = logging.getLogger(__name__)

_AS_CONFIGURED = SamplingOptions()
_ATTEMPTS = 4


class VLLMServerBackend:
    """Samples on the servers of ``vllm_server_base_url``.

    Args:
        config: a ``GRPOConfig``.
        policy: returns the unwrapped policy; training may wrap it anew.
        end_tokens: every token that ends a completion.
        tokenizer: the trainer's, compared with the servers'.
        never: tokens that are not sampled.
    """

    def __init__(
        self,
        config: Any,
        policy: Callable[[], Any],
        end_tokens: frozenset[int],
        tokenizer: Any = None,
        never: Sequence[int] = (),
    ) -> None:
        self.config, self.policy, self.end_tokens, self.tokenizer = config, policy, end_tokens, tokenizer
        self.sampling = sampling_fields(config, end_tokens, never)
        self.version: int | None = None
        self.facts: list[ServerFacts] = []
        self._servers: VLLMServers | None = None
        self._asked: dict[Any, Future[list[Completion]]] = {}
        self._sampled: dict[int, int] = {}  # samples of each prompt at step _sampled_at
        self._sampled_at: int | None = None
        self._sender: transport.WeightSender | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = _AS_CONFIGURED
    ) -> list[Completion]:
        """Sample one completion per prompt; repeated prompts next to each other are one request.

        Raises:
            BackendError: a server refuses a request; also a ConnectionError where one does not answer within
                ``vllm_server_timeout``. Every process raises when one does.
        """
        if self.version is None:
            raise BackendError("the servers have no weights; call sync_weights before generate")
        sampled = dict(self._sampled)
        requests = self._requests(prompts, sampling, self.version, sampled)
        completions: list[Any] = [None] * len(prompts)
        for request, samples in zip(requests, self._answers(requests, sampling), strict=True):
            for row, completion in zip(request.rows, samples, strict=True):
                completions[row] = completion
        self._sampled = sampled  # not before: what failed is asked for with the same seeds
        return completions

    def prefetch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = _AS_CONFIGURED, *, step: int
    ) -> None:
        """Begin with what ``generate`` will be asked for at optimizer step ``step``.

        What is not finished when new weights arrive goes on with those.
        """
        self._ask(self._requests(prompts, sampling, step, {}), sampling)

    def sync_weights(self, params: Iterator[tuple[str, torch.Tensor]] | None = None, *, step: int) -> None:
        """Send the policy's weights as of optimizer step ``step``, unless the servers have them.

        Args:
            params: not used: a server that restarts needs the weights a second time, so they are always taken
                from the policy.
        """
        if self.version == step:
            return
        self.version = None
        self._sampled = self._sampled if self._sampled_at == step else {}
        self._sampled_at = step
        self._send_weights(step)
        self.version = step

    def release(self) -> None:
        """Nothing to give back: the memory is the servers'."""

    def close(self) -> None:
        """End what is under way on the servers; the next use connects again."""
        if self._servers is not None:
            self._servers.close()
        self._drop_sender()
        self._servers = self.version = None
        self._asked = {}

    def state_dict(self) -> dict[str, Any]:
        """What was generated ahead and is finished, and what makes seeds differ within a step."""
        finished = {key: future.result() for key, future in self._asked.items() if _succeeded(future)}
        return {
            "finished": [(key, [vars(c) for c in samples]) for key, samples in finished.items()],
            "sampled": (self._sampled_at, dict(self._sampled)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over; what was not finished is asked for again when its turn comes."""
        self._asked = {}
        self._sampled_at, self._sampled = state["sampled"]
        for key, samples in state["finished"]:
            future: Future[list[Completion]] = Future()
            future.set_result([Completion(**fields) for fields in samples])
            self._asked[tuple(key)] = future

    # Requests.

    @property
    def context_length(self) -> int | None:
        """What every server takes; None before they have been asked."""
        return min((fact.max_model_length for fact in self.facts), default=None)

    def _requests(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, step: int, before: dict[int, int]
    ) -> list[Request]:
        longest = self.context_length
        limits = list(sampling.max_tokens or [self.config.max_completion_length] * len(prompts))
        if longest is not None:
            limits = [min(m, longest - len(prompt)) for m, prompt in zip(limits, prompts, strict=True)]
            if min(limits, default=1) < 1:
                raise BackendError(
                    f"a prompt of {max(map(len, prompts))} tokens leaves no room within the server's "
                    f"--max-model-len {longest}; raise that, or set max_prompt_length"
                )
        seed = self.config.seed
        if sampling.overrides:  # other settings are other requests
            seed ^= zlib.crc32(repr(sorted(sampling.overrides.items())).encode())
        return group_requests(prompts, limits, seed, step, self.config.process_index, before)

    def _ask(self, requests: list[Request], sampling: SamplingOptions) -> None:
        """Send the requests that have not been sent yet."""
        new = [request for request in requests if request.key not in self._asked]
        # Processes begin with different servers, so that a few requests of each do not all meet on the first.
        settings = {**self.sampling, **sampling.overrides}
        futures = self.servers.submit(new, settings, first=self.config.process_index)
        self._asked.update((request.key, future) for request, future in zip(new, futures, strict=True))

    def _answers(self, requests: list[Request], sampling: SamplingOptions) -> list[list[Completion]]:
        answers: dict[Any, list[Completion]] = {}
        missing = requests
        for _ in range(_ATTEMPTS):
            self._ask(missing, sampling)
            missing, error = self._collect(missing, answers, sampling)
            self._raise_together(error)
            if not any(self._of_all(bool(missing))):
                return [answers[request.key] for request in requests]
            logger.warning("a vLLM server came back without this run's weights; sending them again")
            self._send_weights(self.version or 0)
        raise BackendError(
            f"vLLM servers lost their weights {_ATTEMPTS} times within one generation; does another run send "
            "its weights to the same servers?"
        )

    def _collect(
        self, requests: list[Request], answers: dict[Any, list[Completion]], sampling: SamplingOptions
    ) -> tuple[list[Request], BackendError | None]:
        """Wait for the answers; what was lost with a server's weights, and the first failure."""
        lost: list[Request] = []
        error: BackendError | None = None
        waiting = {self._asked.pop(request.key): request for request in requests}
        try:
            while waiting and error is None:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                usable = []
                for future in [future for future in waiting if future in done]:
                    request = waiting.pop(future)
                    try:
                        answers[request.key] = future.result()
                        usable.append(request)
                    except LostWeightsError:
                        lost.append(request)
                    except BackendError as failure:
                        error = error or failure
                if sampling.finished is not None and usable and error is None:
                    rows = [row for request in usable for row in request.rows]
                    sampling.finished(rows, [one for request in usable for one in answers[request.key]])
        except BaseException:  # an interrupt: nobody will read the other answers
            self.close()
            raise
        return lost, error

    @property
    def servers(self) -> VLLMServers:
        """The servers, once they are connected to."""
        assert self._servers is not None
        return self._servers

    def _connect(self) -> None:
        """Find the servers and check them, before the first weights; every process calls it."""
        if self._servers is not None:
            return
        config, error = self.config, None
        urls = addresses(config)
        run = self._of_all(uuid.uuid4().hex[:12])[0]  # marks the weights as those of this run
        servers = VLLMServers(urls, config.vllm_server_timeout, self._how_to_start(urls[0]), run)
        try:
            servers.wait_until_up("connecting")
            self.facts = check_servers(servers, self.policy().config, config, self.tokenizer)
        except BackendError as failure:
            error = failure
        except BaseException:
            servers.close()
            raise
        self._servers = servers
        self._raise_together(error)

    def _how_to_start(self, url: str) -> str:
        command, environment = serve_command(
            getattr(self.policy().config, "_name_or_path", "") or "MODEL",
            port=urlsplit(url if "//" in url else f"http://{url}").port or 8000,
            device="cuda" if self.config.device.type == "cuda" else "cpu",
        )
        return as_shell_line(command, environment)

    # Weights.

    def _send_weights(self, step: int) -> None:
        """All processes together, because sharded weights are gathered by all of them."""
        self._connect()
        for attempt in range(1, _ATTEMPTS + 1):
            lost: LostAnswerError | None = None
            error: BackendError | None = None
            stream = buckets(weight_iterator(self.policy()))
            try:
                if self.config.process_index == 0:
                    self._push(stream, step, again=attempt > 1)
            except LostAnswerError as failure:
                lost = failure
                self._drop_sender()  # a server that restarted knows nothing of the transfer
            except BackendError as failure:
                error = failure
            if self.config.world_size > 1:
                for _ in stream:  # what process 0 left out or the others have to gather
                    pass
            if lost is not None and attempt == _ATTEMPTS:
                error = ServerUnavailableError(
                    f"sending weights to the vLLM servers failed {attempt} times; the last time: {lost}"
                )
            self._raise_together(error)
            if not any(self._of_all(lost is not None)):
                return
            if lost is not None:
                logger.warning("sending weights failed (%s); trying again", lost)

    def _push(self, stream: Iterator[transport.Bucket], step: int, *, again: bool) -> None:
        servers = self.servers
        servers.wait_until_up("sending weights")
        if again:
            servers.abandon_update()
        if self._sender is None:
            sender = self._new_sender(servers)
            sender.connect(servers)
            self._sender = sender
        servers.pause()
        self._sender.push(stream, servers, step)
        servers.resume()

    def _new_sender(self, servers: VLLMServers) -> transport.WeightSender:
        """The counterpart of the weight-transfer engine that the servers were started with."""
        engine = self.facts[0].weight_transfer
        if engine == transport.NcclSender.backend:
            workers = sum(servers.measure())
            return transport.NcclSender(_own_address(servers), self.config.vllm_group_port, workers)
        if engine == transport.CudaIpcSender.backend:
            return transport.CudaIpcSender()
        return transport.SharedMemorySender()

    def _drop_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    # Processes.

    def _of_all(self, value: Any) -> list[Any]:
        return gather_object([value]) if self.config.world_size > 1 else [value]

    def _raise_together(self, error: BackendError | None) -> None:
        """Raise in every process when one has failed, so that no other waits for it."""
        kinds = (ServerUnavailableError, BackendError)
        own = None if error is None else (not isinstance(error, ServerUnavailableError), str(error))
        failures = [(rank, *failure) for rank, failure in enumerate(self._of_all(own)) if failure is not None]
        if not failures:
            return
        self.close()
        if self.config.world_size == 1:
            raise error  # type: ignore[misc]
        rank, kind, message = failures[0]
        raise kinds[kind](f"process {rank}: {message}") from error


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def check_settings(config: Any) -> None:
    """Refuse addresses that are none. The servers themselves are asked before the first generation.

    Raises:
        ConfigError: with what an address looks like.
    """
    try:
        for url in addresses(config):
            HttpClient(url, config.vllm_server_timeout)
    except BackendError as error:
        raise ConfigError(f"vllm_server_base_url={config.vllm_server_base_url!r}: {error}") from None


def make_backend(
    policy: Callable[[], Any], config: Any, processing_class: Any, never: Sequence[int] = ()
) -> VLLMServerBackend:
    """What samples on the servers; they are connected to at the first use.

    Args:
        never: tokens that are not sampled.

    Raises:
        ConfigError: the policy is given images, quantised, or adapted in a way that weights cannot express.
    """
    check_policy(policy(), processing_class)
    tokens = frozenset(end_tokens(policy(), processing_class))
    return VLLMServerBackend(config, policy, tokens, processing_class, never)


def addresses(config: Any) -> list[str]:
    """The addresses of all servers."""
    given = config.vllm_server_base_url or f"http://{config.vllm_server_host}:{config.vllm_server_port}"
    return [url.strip() for url in given.split(",") if url.strip()]


def _own_address(servers: VLLMServers) -> str:
    """An address of this machine that the first server reaches."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((servers.servers[0].host, servers.servers[0].port))  # sends nothing
        return probe.getsockname()[0]
