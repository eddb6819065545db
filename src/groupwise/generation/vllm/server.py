"""Generation on vLLM servers outside the trainer's processes.

Each rank sends the requests of its own rows; rank 0 pushes the weights to all servers. Servers may restart at
any time: lost requests are repeated with the same seeds, and a restarted server gets the weights first.
"""

from __future__ import annotations

import logging
import socket
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from accelerate.utils import gather_object
from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.cpu import malloc_trim
from groupwise.errors import BackendError, ConfigError
from groupwise.generation.backends import BackendEntry
from groupwise.generation.base import RUN_SETTINGS
from groupwise.generation.vllm.base import Request, RequestKey, VLLMBackend, check_policy, lora_rank
from groupwise.generation.vllm.client import (
    LostAnswerError,
    LostWeightsError,
    ServerUnavailableError,
    VLLMServers,
    parse_url,
)
from groupwise.generation.vllm.plugin import ADAPTERS, DIFFERS, PLACE_ADAPTER, SAME, WEIGHTS
from groupwise.generation.vllm.preflight import ServerInfo, check_servers
from groupwise.generation.vllm.serve import as_shell_line, serve_command
from groupwise.generation.vllm.transfer import WITH_METADATA, AdapterTransfer, WeightTransfer
from groupwise.generation.vllm.weight_check import Report, WeightCheck
from groupwise.generation.vllm.weight_source import EngineWeights, NamedTensor
from groupwise.policy.weight_iterator import LoRAWeights, PolicyWeights, rounded
from groupwise.records import Completion, SamplingOptions
from groupwise.threads import settle
from groupwise.tokenization.images import is_processor
from groupwise.tokenization.text import ProcessingClass, end_tokens, text_tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 4


class VLLMServerBackend(VLLMBackend):
    """Samples on the servers of ``vllm_server_base_url``; connects in the first ``sync_weights``.

    Args:
        policy, config, suppress_tokens: see :class:`groupwise.generation.backends.BackendFactory`.
        processing_class: compared with the servers' tokenizer.

    Attributes:
        lora_rank: rank of an adapter that can be sent alone, to servers with ``--enable-lora``; 0: the policy
            has none.

    Raises:
        ConfigError: vLLM cannot load the policy's weights.
    """

    supports_images = True

    def __init__(
        self,
        policy: Callable[[], PreTrainedModel],
        config: GRPOConfig,
        processing_class: ProcessingClass,
        suppress_tokens: Sequence[int] = (),
    ) -> None:
        model = policy()
        check_policy(model)
        ends = end_tokens(model.generation_config, text_tokenizer(processing_class))
        super().__init__(config, frozenset(ends), suppress_tokens)
        self.model_config, self.processing_class, self.lora_rank = model.config, processing_class, 0
        with suppress(ConfigError):
            self.lora_rank = lora_rank(model)
        self.server_info: list[ServerInfo] = []
        self._servers: VLLMServers | None = None
        self._pending: dict[RequestKey, Future[list[Completion]]] = {}
        self._source: PolicyWeights | None = None  # for servers that restart before the next sync
        self._weights = EngineWeights()
        self._transfer: WeightTransfer | None = None
        self._adapters: AdapterTransfer | None = None
        self._num_pushes = 0  # of adapters, part of their names
        self._check = WeightCheck("off", (), self._weight_reports)

    def prefetch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions = RUN_SETTINGS, *, step: int
    ) -> list[Future[Completion]]:
        """Send the requests of optimizer step ``step``; unfinished ones continue with the next weights.

        Other threads may call it. Results are kept until a later step, so that a checkpoint contains them.
        """
        requests = self.make_requests(prompts, sampling, step, {})
        self._submit(requests, sampling)
        futures: list[Future[Completion]] = [Future() for _ in prompts]
        for request in requests:

            def settle_rows(answer: Future[list[Completion]], rows: Sequence[int] = request.rows) -> None:
                error = CancelledError() if answer.cancelled() else answer.exception()
                for place, row in enumerate(rows):
                    sample = None if error else self.with_digest(answer.result()[place])
                    settle(futures[row], sample, error)

            self._pending[request.key].add_done_callback(settle_rows)
        return futures

    def reports_sampling_mask(self, generation_kwargs: Mapping[str, Any]) -> bool:
        """See :class:`VLLMBackend`. Connects to the servers: their flags decide."""
        self._connect()
        return super().reports_sampling_mask(generation_kwargs)

    def close(self) -> None:
        """Cancel all requests and disconnect; the next ``sync_weights`` connects again."""
        if self._adapters is not None:
            self._adapters.unload(self._adapters.names)
            self._adapters.remove()
        if self._servers is not None:
            self._servers.close()
        self.disconnect()
        self._adapters = self._servers = self.version = self._source = None
        self._pending = {}

    def disconnect(self) -> None:
        """Close the transfer of weights; the next push connects again."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def snapshot(self) -> dict[str, Any]:
        """Return finished prefetched completions, and the number of samples per prompt in this step."""
        done = [(key, f) for key, f in list(self._pending.items()) if f.done() and not f.cancelled()]
        finished = [(key, future.result()) for key, future in done if future.exception() is None]
        return {"finished": finished, **super().snapshot()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot. ``generate`` repeats the requests that were not finished."""
        super().restore(snapshot)
        for stale in list(self._pending.values()):
            stale.cancel()  # closes its connection, and the server aborts the request
        self._pending = {}
        for key, samples in snapshot["finished"]:
            future: Future[list[Completion]] = Future()
            future.set_result(samples)
            self._pending[tuple(key)] = future

    def merge(self, snapshots: Sequence[dict[str, Any]], config: GRPOConfig) -> dict[str, Any]:
        """Return the finished completions of all ranks: a rank takes those of its own requests."""
        finished = {tuple(each[0]): each for part in snapshots for each in part["finished"]}  # each once
        return {**snapshots[0], "finished": list(finished.values())}

    # Requests.

    def _submit(self, requests: list[Request], sampling: SamplingOptions) -> None:
        """Send the requests that are not pending."""
        shared = self.shared_params(sampling.generation_kwargs)
        for request in requests:
            if request.key not in self._pending:
                params = request.params(shared, self.max_logprobs)
                # Ranks prefer different servers, so that a few requests of each do not all go to the first.
                self._pending[request.key] = self.servers.submit(request, params, self.config.process_index)

    def complete(self, requests: list[Request], sampling: SamplingOptions) -> list[list[Completion]]:
        """Return the samples of each request; pushes the weights again to servers that lost them."""
        samples: dict[RequestKey, list[Completion]] = {}
        for _ in range(_ATTEMPTS):
            lost = "".join(self._on_all_ranks(partial(self._collect, requests, samples, sampling)))
            if not lost:
                malloc_trim()  # of the client's thread, whose heap no other uses: responses left it free
                return [samples[request.key] for request in requests]
            logger.warning(
                "a vLLM server restarted without this run's weights (%s); sending them again", lost
            )
            self.disconnect()
            self._check.done, step = False, self.version or 0
            assert self._source is not None  # set before the version
            self.record_digest(step, self.load_weights(self._source, step))
        raise BackendError(
            f"vLLM servers lost their weights {_ATTEMPTS} times within one generation; does another run send "
            f"its weights to the same servers? The last one: {lost}"
        )

    def _collect(
        self,
        requests: list[Request],
        samples: dict[RequestKey, list[Completion]],
        sampling: SamplingOptions,
    ) -> str:
        """Wait for the requests that ``samples`` lacks, add their results to it, and raise the first failure.

        Returns:
            the last message about servers that lost their weights, so that results are missing; "" without.
        """
        missing, lost = [request for request in requests if request.key not in samples], ""
        self._submit(missing, sampling)
        waiting = {self._pending.pop(request.key): request for request in missing}
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            finished = []
            for future in [future for future in waiting if future in done]:
                request = waiting.pop(future)
                try:
                    samples[request.key] = future.result()
                    finished.append(request)
                except LostWeightsError as error:
                    lost = str(error)
            if sampling.on_finished is not None and finished:
                rows = [row for request in finished for row in request.rows]
                sampling.on_finished(rows, [one for request in finished for one in samples[request.key]])
        return lost

    @property
    def servers(self) -> VLLMServers:
        """Client of the servers; ``sync_weights`` connects it."""
        if self._servers is None:
            raise BackendError("not connected to the servers; call sync_weights first")
        return self._servers

    def _connect(self) -> None:
        """Wait for the servers and check them. A collective: all ranks call it."""
        if self._servers is None:
            config, urls = self.config, server_urls(self.config)
            run_id = gather_object([uuid.uuid4().hex[:12]])[0]  # that of rank 0
            vocab_size = self.model_config.get_text_config(decoder=True).vocab_size
            self._servers = VLLMServers(
                urls, config.vllm_server_timeout, self._start_hint, run_id, vocab_size
            )
            self._on_all_ranks(self._check_servers)

    def _check_servers(self) -> None:
        servers, config = self.servers, self.config
        servers.wait_until_up("connecting")
        infos = check_servers(servers, self.model_config, config, self.processing_class, self.lora_rank)
        self.server_info, self.context_length = infos, min(info.max_model_length for info in infos)
        self._check = WeightCheck(
            config.vllm_weight_check,
            [info.dtype for info in infos],
            self._weight_reports,
            self._compare_engines,
        )
        if infos[0].returns_sampling_mask:
            self.max_logprobs = None

    def _start_hint(self, url: str) -> str:
        command, environment = serve_command(
            self.model_config.name_or_path or "MODEL",
            port=urlsplit(parse_url(url)).port or 8000,
            device="cuda" if self.config.device.type == "cuda" else "cpu",
        )
        return f"; start it with: {as_shell_line(command, environment)}"

    # Weights.

    def _weight_reports(self, adapter: bool, given: dict[str, Any]) -> list[tuple[str, str, list[Any]]]:
        """Return (server, dtype, reports of its workers) of all servers; see :class:`WeightCheck`."""
        dtypes = {info.url: info.dtype for info in self.server_info}
        answers = self.servers.call_workers(ADAPTERS if adapter else WEIGHTS, given)
        return [(f"the vLLM server at {url}", dtypes[url], reports) for url, reports in answers.items()]

    def _compare_engines(self, name: str, reports: Sequence[Report]) -> None:
        """Compare the data-parallel engines of a server with the reports of its first one."""
        info = next(info for info in self.server_info if name.endswith(info.url))
        if info.num_engines > 1:
            try:
                self.servers.call_workers(SAME, {"reports": list(reports)}, info.url)
            except LostAnswerError as error:
                if DIFFERS not in str(error):
                    raise
                raise BackendError(
                    f"one of the {info.num_engines} data-parallel engines of {name} does not compute with "
                    f"the trainer's weights ({error})"
                ) from error

    def load_weights(self, source: PolicyWeights, step: int) -> str | None:
        """Push the weights, again if a server restarts meanwhile. A collective: all ranks gather shards."""
        self._source = source
        self._connect()
        for key in [key for key in list(self._pending) if key[-1] < step]:
            del self._pending[key]  # turns that were sampled ahead of an earlier step
        first, dtypes = self.server_info[0], [info.dtype for info in self.server_info]

        def read() -> Iterator[NamedTensor]:
            weights = rounded(source.full(), dtypes)
            return self._check.record(weights) if self.config.process_index == 0 else weights

        for attempt in range(1, _ATTEMPTS + 1):
            self._find_lost()
            self._num_pushes += 1
            try:
                if first.max_lora_rank is not None:  # it stands for all: they do not differ
                    adapter, base = source.adapter(), iter(source.base() if self._check.needs_base else ())
                    name = f"{self.servers.run_id}:{self._num_pushes}:{step}"
                    digests = self._on_all_ranks(partial(self._push_adapter, adapter, name, base))
                    # In this order: a request that another thread sends names an adapter of a known step.
                    self.servers.adapter = name
                    self.servers.steps.append(step)
                else:
                    self._weights.begin(read)
                    if first.weight_transfer in WITH_METADATA:
                        self._weights.metadata()  # a collective, so before a failure of rank 0
                    self._on_all_ranks(partial(self._prepare, retry=attempt > 1))
                    self._on_all_ranks(partial(self.servers.steps.append, step))  # on all, while suspended
                    digests = self._on_all_ranks(partial(self._push, step))
                self._check.done = True
                return digests[0]
            except LostAnswerError as error:
                lost, self._check.done = str(error), False
                self.disconnect()  # a restarted server must be connected again
                logger.warning("sending weights failed (%s)", lost)
        self.close()
        raise ServerUnavailableError(
            f"sending weights to the vLLM servers failed {_ATTEMPTS} times; the last error: {lost}"
        )

    def _find_lost(self) -> None:
        """Leave out servers that do not respond, and take back those that do again; the same on all ranks."""
        servers, is_first = self.servers, self.config.process_index == 0
        by_rank = self._on_all_ranks(
            lambda: (is_first and servers.find_lost("sending weights"), servers.lost)
        )
        changed, servers.lost = by_rank[0]
        if changed:
            self.disconnect()
            self._check.done = False

    def _push_adapter(self, adapter: LoRAWeights, name: str, base: Iterator[NamedTensor]) -> str | None:
        """Load the adapter of this step under its own name, which later requests carry.

        ``base``, the weights below the adapter, are compared before; empty if they were.
        """
        config = self.config
        try:
            if config.process_index == 0 and self._check.needs_base:
                self._check.compare_base(base)
        except BackendError as error:
            raise BackendError(
                f"{error}. With --enable-lora it must serve the weights below the adapter (of a policy in 4 "
                "bits its dequantized matrices); without, it gets merged weights"
            ) from error
        finally:
            for _ in base:  # gathering it is a collective
                pass
        if config.process_index != 0:
            return None
        self._adapters = self._adapters or AdapterTransfer(self, config.rollout_staleness)
        self._adapters.push(adapter, name)
        return self._check.compare_adapter(adapter)

    def load_adapter(self, name: str, path: Path) -> int:
        """Load an adapter on every server by its path, or its bytes where a server cannot read the path.

        Returns:
            number of bytes.
        """
        size, way = sum(file.stat().st_size for file in path.iterdir()), "by its path"
        try:
            places = self.servers.call_workers(PLACE_ADAPTER, {"path": str(path)})
        except BackendError:  # without groupwise in its environment, a server can load only from the path
            places = {server.url: [str(path)] for server in self.servers.live}
        if any(None in of_workers for of_workers in places.values()):
            files = {file.name: b64encode(file.read_bytes()).decode() for file in path.iterdir()}
            size, way = sum(map(len, files.values())), "as bytes, because a server cannot read its path"
            places = self.servers.call_workers(PLACE_ADAPTER, {"path": str(path), "files": files})
        logger.info("sending the adapter %s %s: %.2f MB", name, way, size / 1e6)
        bodies = [{"lora_name": name, "lora_path": places[one.url][0]} for one in self.servers.live]
        self.servers.post("/v1/load_lora_adapter", bodies, doing="loading the LoRA adapter")
        return size

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter from servers that respond, and remove its files there."""
        files = {"method": PLACE_ADAPTER, "kwargs": {"path": name, "files": {}}}
        for path, body in (("/v1/unload_lora_adapter", {"lora_name": name}), ("/collective_rpc", files)):
            with suppress(LostAnswerError, BackendError):  # a restarted server does not have it
                self.servers.post(path, [body], doing="unloading an adapter", timeout=5.0)

    def _prepare(self, *, retry: bool) -> None:
        """Connect to the servers and suspend them."""
        servers, rank = self.servers, self.config.process_index
        if rank == 0 and retry:
            with suppress(LostAnswerError, BackendError):  # refused if no update is in progress
                servers.finish_weight_update()
        if self._transfer is None:
            backend, timeout = str(self.server_info[0].weight_transfer), self.config.vllm_server_timeout
            given: dict[str, Any] = {}
            if backend == "nccl" and rank == 0:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    server = urlsplit(servers.servers[0].url)
                    try:
                        probe.connect((server.hostname, server.port))  # UDP: sends nothing
                    except OSError as error:  # vLLM opens the process group on an IPv4 address
                        reason = f"the server at {server.netloc} has no IPv4 address for NCCL: {error}"
                        raise BackendError(f"{reason}; give another address of it") from error
                    given["master_address"] = probe.getsockname()[0]  # of this machine, for the first server
                given["master_port"] = self.config.vllm_group_port
                given["world_size"] = 1 + sum(servers.fetch_world_sizes())
            self._transfer = WeightTransfer(
                backend, servers, self._weights, rank=rank, timeout=timeout, **given
            )
        if rank == 0:
            servers.pause()

    def _push(self, step: int) -> str | None:
        assert self._transfer is not None  # _prepare connected it
        self._transfer.push(step)
        if self.config.process_index != 0:
            return None
        digest = self._check.compare()
        self.servers.resume(with_images=is_processor(self.processing_class))
        return digest

    # Ranks.

    def _on_all_ranks(self, run: Callable[[], T]) -> list[T]:
        """Run a function on each rank and return the results of all ranks.

        If it fails on one, all ranks raise, so that none waits for another.
        """
        result: Any = None
        failure: Exception | None = None
        try:
            result = run()
        except (LostAnswerError, BackendError) as error:
            failure = error
        except BaseException:  # an interrupt; nothing will read the results of requests
            self.close()
            raise
        by_rank = gather_object([(result, failure)])
        failed = [(rank, of_rank) for rank, (_, of_rank) in enumerate(by_rank) if of_rank is not None]
        # A lost answer, after which a caller may try again, counts only if no rank has another failure.
        for rank, first in sorted(failed, key=lambda pair: isinstance(pair[1], LostAnswerError)):
            if isinstance(first, BackendError):
                self.close()
            if self.config.world_size == 1:
                raise first
            raise type(first)(f"rank {rank}: {first}") from failure
        return [result for result, _ in by_rank]


def check_config(config: GRPOConfig) -> None:
    """Check the format of the server addresses. The servers themselves are checked in the first sync.

    Raises:
        ConfigError: with the format of an address.
    """
    try:
        for url in server_urls(config):
            parse_url(url)
    except BackendError as error:
        raise ConfigError(f"vllm_server_base_url: {error}") from None


def server_urls(config: GRPOConfig) -> list[str]:
    """Return the addresses of all servers."""
    given = config.vllm_server_base_url or f"http://{config.vllm_server_host}:{config.vllm_server_port}"
    return [url.strip() for url in given.split(",") if url.strip()]


ENTRY = BackendEntry(VLLMServerBackend, check_config, supports_images=True)
