"""Check before training that the running servers fit the run."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from packaging.version import Version
from transformers import AutoConfig, PreTrainedConfig

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import sampler_settings, truncating
from groupwise.errors import BackendError
from groupwise.generation.base import ProcessingClass
from groupwise.generation.vllm.client import VLLMServers
from groupwise.generation.vllm.http import HttpClient
from groupwise.records import SamplerSettings
from groupwise.tokenization.text import text_tokenizer

logger = logging.getLogger(__name__)

#: Config fields that determine the shapes of weights.
_SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_FROM_GPU = ("nccl", "ipc", "sparse_nccl")
_SENDABLE = ("groupwise", *_FROM_GPU)
#: Quantizations of checkpoints with packed weights, which do not take the full matrices that are sent.
_PACKED = ("bitsandbytes", "awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin")
_REPORTS_WEIGHTS = Version("0.32")
_PROBE = "The answer: 3.14 + 2.7 = 5.84\n\tünïcode 你好"


@dataclass(frozen=True)
class ServerInfo:
    """Configuration that a server reports, as far as it is read after the checks.

    Attributes:
        max_lora_rank: None without ``--enable-lora``.
        num_engines: data-parallel copies of the model.
    """

    url: str
    model: str
    dtype: str
    max_model_length: int
    weight_transfer: str | None
    max_lora_rank: int | None
    returns_sampling_mask: bool
    num_engines: int


def check_servers(
    servers: VLLMServers,
    model_config: PreTrainedConfig,
    config: GRPOConfig,
    tokenizer: ProcessingClass | None,
    lora_rank: int | None = None,
) -> list[ServerInfo]:
    """Compare every server with the policy and the config.

    Args:
        servers: client of the servers.
        model_config: config of the policy.
        config: settings of the run.
        tokenizer: None skips the comparison of tokenizers.
        lora_rank: rank of an adapter that can be sent alone; 0: the policy has none; None skips that.

    Raises:
        BackendError: a server does not fit; the message lists all reasons, each with the fix.
    """
    policy = model_config.get_text_config(decoder=True)
    dtype = "bfloat16" if config.bf16 else "float16" if config.fp16 else "float32"
    infos, problems = [], []
    servers.find_workers()
    for server in servers.servers:
        info, found = _compare(servers, server, policy, config, lora_rank)
        if tokenizer is not None and not found:
            found = _tokenizer_problem(servers, server, tokenizer, info)
        infos.append(info)
        problems += [f"\n  - {info.url}: {problem}" for problem in found]
        if info.dtype != dtype:
            logger.warning(
                "the vLLM server at %s computes in %s and the trainer in %s, so log-probs differ; start it "
                "with --dtype %s",
                *(info.url, info.dtype, dtype, dtype),
            )
    flags: dict[str, set[Any]] = {
        "--enable-lora": {info.max_lora_rank is None for info in infos},
        "--weight-transfer-config": {info.weight_transfer for info in infos},
        "--return-sampling-mask": {info.returns_sampling_mask for info in infos},
    }
    differing = [flag for flag, values in flags.items() if len(values) > 1]
    problems += [f"\n  - the servers differ in {flag}; start all with the same" for flag in differing]
    if problems:
        raise BackendError(f"{len(problems)} reason(s) not to train with these servers{''.join(problems)}")
    return infos


def _fetch(servers: VLLMServers, server: HttpClient) -> tuple[ServerInfo, dict[str, Any], str]:
    """Return the configuration of a server, as far as it is kept and whole, and its version of vLLM."""
    path = "/server_info?config_format=json"
    given = servers.run(server.call("GET", path, doing="reading its configuration"))["vllm_config"]
    version = servers.run(server.call("GET", "/version", doing="reading its version"))["version"]
    model = given["model_config"]
    info = ServerInfo(
        url=server.url,
        model=model["model"],
        dtype=str(model["dtype"]).removeprefix("torch."),
        max_model_length=model["max_model_len"],
        weight_transfer=(given.get("weight_transfer_config") or {}).get("backend"),
        max_lora_rank=(given.get("lora_config") or {}).get("max_lora_rank"),
        returns_sampling_mask=bool(model.get("return_sampling_mask")),
        num_engines=given["parallel_config"]["data_parallel_size"],
    )
    return info, given, version


def _compare(
    servers: VLLMServers,
    server: HttpClient,
    policy: PreTrainedConfig,
    config: GRPOConfig,
    lora_rank: int | None,
) -> tuple[ServerInfo, list[str]]:
    """Return the configuration of a server, and the reasons why it does not fit."""
    info, given, version = _fetch(servers, server)
    model, max_samples = given["model_config"], given["scheduler_config"]["max_num_seqs"]
    transfer, max_rank, has_router = info.weight_transfer, info.max_lora_rank, servers.router is not None
    quantization, logprobs_mode = model.get("quantization"), model["logprobs_mode"]
    loads_4_bits = (
        quantization == "bitsandbytes" and getattr(policy, "quantization_config", None) and max_rank
    )
    fits_raw = (  # raw log-probs are those of the sampling distribution if nothing changes it
        sampler_settings(config) == SamplerSettings()
        and not config.generation_kwargs
        and config.vllm_structured_outputs_regex is None
    )
    needed = config.max_completion_length + (config.max_prompt_length or 1)
    checks = {
        f"it serves {info.model} with {name}={size}, but the policy has {expected}; serve that model": True
        for name, size in _shape(info.model).items()
        if (expected := getattr(policy, name, None)) not in (None, size)
    } | {
        f"its weights are quantized by {quantization}, but full matrices are sent; serve the model without "
        "quantization, or with --enable-lora the checkpoint of a policy in 4 bits": (
            quantization in _PACKED and not loads_4_bits
        ),
        "it takes no weights; start it with --weight-transfer-config, as groupwise vllm-serve does": (
            transfer is None
        ),
        f"its weight transfer {transfer!r} is not supported; allowed: {', '.join(_SENDABLE)}": (
            transfer not in (None, *_SENDABLE)
        ),
        f"its weight transfer {transfer!r} sends from a GPU, but the policy trains on {config.device.type}; "
        "start it with the backend 'groupwise'": transfer in _FROM_GPU and config.device.type != "cuda",
        f"it reports {logprobs_mode}, which are not log-probs of the sampling distribution; start it with "
        "--logprobs-mode processed_logprobs": logprobs_mode
        not in ("processed_logprobs", *(["raw_logprobs"] if fits_raw else [])),
        f"it runs vLLM {version}, which does not report the weights that sampled each token, as routers and "
        f"rollout_staleness need; install {_REPORTS_WEIGHTS} or newer there, or set rollout_staleness=0 and "
        "give the addresses of servers": (has_router or config.rollout_staleness > 0)
        and Version(version) < _REPORTS_WEIGHTS,
        "it sends keys and values to workers behind the router, which an update would not replace; start it "
        "without --kv-transfer-config": has_router and given.get("kv_transfer_config") is not None,
        f"it runs {max_samples} sequences at a time, fewer than num_generations={config.num_generations}; "
        "raise --max-num-seqs": max_samples < config.num_generations,
        "it was started with --return-sampling-mask, and refuses requests without truncation; start it "
        "without, or set top_k, top_p or min_p": info.returns_sampling_mask and not truncating(config),
        f"--max-model-len {info.max_model_length} is less than {needed}, the sum of max_prompt_length and "
        "max_completion_length; raise it, or lower those": info.max_model_length < needed,
        "it was started with --enable-lora, but the policy has no plain LoRA adapter, which can be sent "
        "alone; start it without, to send merged weights": max_rank is not None and lora_rank == 0,
        f"its --max-lora-rank {max_rank} is less than the adapter's {lora_rank}; raise it": (
            max_rank is not None and (lora_rank or 0) > max_rank
        ),
    }
    return info, [problem for problem, applies in checks.items() if applies]


def _shape(model: str) -> dict[str, int]:
    """Return the shape of a served model from its files; empty if they are not on this machine."""
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):
        return {}
    sizes = {name: getattr(config.get_text_config(decoder=True), name, None) for name in _SHAPE}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def _tokenizer_problem(
    servers: VLLMServers, server: HttpClient, tokenizer: ProcessingClass, info: ServerInfo
) -> list[str]:
    body = {"model": None, "prompt": _PROBE, "add_special_tokens": False}
    own = text_tokenizer(tokenizer)(_PROBE, add_special_tokens=False)["input_ids"]
    with suppress(BackendError):  # a server without a tokenizer: only token ids are exchanged
        found = servers.run(server.call("POST", "/tokenize", body, doing="comparing tokenizers"))["tokens"]
        if list(found) != list(own):
            return [
                f"the tokenizer of {info.model} is not the policy's: token ids have another meaning; serve "
                "its model"
            ]
    return []
