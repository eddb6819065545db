"""vLLM as the sampler of a sweep: an engine in the process, or servers; a request has its run's adapter."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from groupwise.commands.sweeps.adapters import lora_layers, shared_copy
from groupwise.commands.sweeps.sampler import Runs
from groupwise.commands.sweeps.turns import TurnThread
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import json_dict
from groupwise.errors import BackendError
from groupwise.generation.vllm import colocate
from groupwise.generation.vllm.base import Request
from groupwise.generation.vllm.colocate import ColocatedBackend, EngineCall, generate_together
from groupwise.generation.vllm.server import VLLMServerBackend
from groupwise.policy.weight_iterator import PolicyWeights
from groupwise.random_state import preserved_state
from groupwise.records import Completion, SamplingOptions
from groupwise.tokenization.images import image_suppress_tokens
from groupwise.tokenization.text import ProcessingClass

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


class ServerBackend(VLLMServerBackend):
    """Backend of a run on vLLM servers: the other runs compute while its requests are in flight."""

    thread: TurnThread

    def load_weights(self, source: PolicyWeights, step: int) -> str | None:
        self._connect()
        info = self.server_info[0]
        if info.max_lora_rank is None:
            raise BackendError(
                f"the vLLM server at {info.url} was started without --enable-lora, so it would have the "
                "merged weights of the last run; runs of a sweep send their adapters: start it with "
                f"--enable-lora --max-lora-rank {self.lora_rank} --max-loras NUMBER_OF_RUNS"
            )
        return super().load_weights(source, step)

    def complete(self, requests: list[Request], sampling: SamplingOptions) -> list[list[Completion]]:
        self._submit(requests, sampling)
        self.thread.pause(requests)
        return super().complete(requests, sampling)


class ServerSampler:
    """Servers with ``--enable-lora``, on which each run has its adapters; see :class:`PolicySampler`."""

    def __init__(self, base: PreTrainedModel, runs: Runs, processing_class: ProcessingClass) -> None:
        self.base, self.processing_class = base, processing_class
        self.suppress_tokens = image_suppress_tokens(base, processing_class)

    def make_backend(self, config: GRPOConfig, adapter: PeftConfig) -> Any:
        backend = ServerBackend(lambda: self.base, config, self.processing_class, self.suppress_tokens)
        backend.lora_rank = _rank(adapter)
        return backend

    def check(self, backend: Any, policy: PeftModel) -> None:
        lora_layers(backend.thread.name, policy)

    def prepare(self, accelerator: Any) -> None:
        pass

    def sample(self, requests: Sequence[Any], policies: Mapping[str, PeftModel]) -> list[Any]:
        """Return None for each: the runs collect their completions, which are sampled meanwhile."""
        return [None] * len(requests)


class EngineBackend(ColocatedBackend):
    """Backend of a run on the engine of the sweep; the run pauses until the requests of all are sampled."""

    thread: TurnThread

    def complete(self, requests: list[Request], sampling: SamplingOptions) -> list[list[Completion]]:
        return self.thread.pause(self.calls(requests, sampling))

    def close(self) -> None:
        """Remove the files of the run; the engine is that of all runs."""
        assert self.adapters is not None
        self.adapters.remove()


class EngineSampler(ServerSampler):
    """One engine in the process, with the adapters of all runs above the weights of the base model.

    Attributes:
        started: backend that started the engine, and closes it.
    """

    def __init__(self, base: PreTrainedModel, runs: Runs, processing_class: ProcessingClass) -> None:
        from peft import get_peft_model

        super().__init__(base, runs, processing_class)
        config = copy.copy(runs[0][0])
        largest = max(colocate.engine_arguments(own, "", "auto")["max_logprobs"] for own, _ in runs)
        given = {"max_loras": len(runs), "max_logprobs": largest, **json_dict(config.vllm_engine_kwargs)}
        config.vllm_engine_kwargs = {**given, "enable_lora": True}
        with preserved_state():  # the engine takes the rank of this adapter
            widest = copy.deepcopy(max((adapter for _, adapter in runs), key=_rank))
            policy: Any = get_peft_model(shared_copy(base), widest)
        self.started = colocate.make_backend(lambda: policy, config, processing_class, self.suppress_tokens)

    def make_backend(self, config: GRPOConfig, adapter: PeftConfig) -> Any:
        engine, ends = self.started.engine, self.started.end_tokens
        group = self.started.group
        return EngineBackend(engine, config, ends, self.suppress_tokens, only_adapter=True, group=group)

    def sample(self, requests: Sequence[list[EngineCall]], policies: Mapping[str, PeftModel]) -> list[Any]:
        """Return the completions of all runs by request, from one call of the engine."""
        calls = [call for of_run in requests for call in of_run]
        samples = iter(generate_together(self.started.engine, calls))
        return [[next(samples) for _ in of_run] for of_run in requests]


def _rank(adapter: Any) -> int:
    return max([adapter.r, *adapter.rank_pattern.values()])
