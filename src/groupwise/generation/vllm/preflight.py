"""Check before training that the running servers fit the run."""

from __future__ import annotations

import logging
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
_SENDABLE = ("groupwise", "nccl", "ipc", "sparse_nccl")
#: Quantizations of checkpoints with packed weights, which do not take the full matrices that are sent.
_PACKED = ("bitsandbytes", "awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin")
_REPORTS_WEIGHTS = Version("0.32")
_PROBE = "The answer: 3.14 + 2.7 = 5.84\n\tünïcode 你好"


@dataclass(frozen=True)
class ServerInfo:
    """Configuration that a server reports.

    Attributes:
        max_lora_rank: None without ``--enable-lora``.
        shape: fields of ``_SHAPE``, as far as they are known.
    """

    url: str
    version: str
    model: str
    dtype: str
    logprobs_mode: str
    max_model_length: int
    max_samples: int
    weight_transfer: str | None
    quantization: str | None
    max_lora_rank: int | None
    returns_sampling_mask: bool
    shape: dict[str, int]


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
    infos = [_fetch_info(servers, server) for server in servers.servers]
    problems = []
    for info, server in zip(infos, servers.servers, strict=True):
        found = _problems(info, model_config.get_text_config(decoder=True), config)
        if tokenizer is not None and not found:
            found += _tokenizer_problem(servers, server, tokenizer, info)
        found += _adapter_problem(info, lora_rank)
        problems += [f"\n  - {info.url}: {problem}" for problem in found]
        _warn_about_dtype(info, config)
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


def _fetch_info(servers: VLLMServers, server: HttpClient) -> ServerInfo:
    path = "/server_info?config_format=json"
    info = servers.run(server.call("GET", path, doing="reading its configuration"))["vllm_config"]
    if isinstance(info, str):  # vllm-router drops the query of a route
        raise BackendError(f"{server.url} is the address of a router; give those of the servers behind it")
    model = info["model_config"]
    transfer = info.get("weight_transfer_config") or {}
    return ServerInfo(
        url=server.url,
        version=servers.run(server.call("GET", "/version", doing="reading its version"))["version"],
        model=model["model"],
        dtype=str(model["dtype"]).removeprefix("torch."),
        logprobs_mode=model["logprobs_mode"],
        max_model_length=model["max_model_len"],
        max_samples=info["scheduler_config"]["max_num_seqs"],
        weight_transfer=transfer.get("backend"),
        quantization=model.get("quantization"),
        max_lora_rank=(info.get("lora_config") or {}).get("max_lora_rank"),
        returns_sampling_mask=bool(model.get("return_sampling_mask")),
        shape=_shape(model["model"]),
    )


def _shape(model: str) -> dict[str, int]:
    """Return the shape of a served model from its files; empty if they are not on this machine."""
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):
        return {}
    sizes = {name: getattr(config.get_text_config(decoder=True), name, None) for name in _SHAPE}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def _problems(info: ServerInfo, policy: PreTrainedConfig, config: GRPOConfig) -> list[str]:
    found = []
    for name, size in info.shape.items():
        expected = getattr(policy, name, size)
        if expected is not None and expected != size:
            found.append(
                f"it serves {info.model} with {name}={size}, but the policy has {expected}; serve that model"
            )
    same_base = info.quantization == "bitsandbytes" and getattr(policy, "quantization_config", None)
    if info.quantization in _PACKED and not (same_base and info.max_lora_rank):
        found.append(
            f"its weights are quantized by {info.quantization}, but full matrices are sent; serve the model "
            "without quantization, or with --enable-lora the checkpoint of a policy in 4 bits"
        )
    if info.weight_transfer is None:
        found.append(
            "it takes no weights; start it with --weight-transfer-config, as groupwise vllm-serve does"
        )
    elif info.weight_transfer not in _SENDABLE:
        found.append(
            f"its weight transfer {info.weight_transfer!r} is not supported; allowed: {', '.join(_SENDABLE)}"
        )
    elif info.weight_transfer != "groupwise" and config.device.type != "cuda":
        found.append(
            f"its weight transfer {info.weight_transfer!r} sends from a GPU, but the policy trains on "
            f"{config.device.type}; start it with the backend 'groupwise'"
        )
    if info.logprobs_mode != "processed_logprobs" and not _raw_logprobs_fit(config, info.logprobs_mode):
        found.append(
            f"it reports {info.logprobs_mode}, which are not log-probs of the sampling distribution; start "
            "it with --logprobs-mode processed_logprobs"
        )
    if config.rollout_staleness and Version(info.version) < _REPORTS_WEIGHTS:
        found.append(
            f"it runs vLLM {info.version}, which does not report the weights that sampled each token, as "
            f"rollout_staleness needs; install {_REPORTS_WEIGHTS} or newer there, or set rollout_staleness=0"
        )
    if info.max_samples < config.num_generations:
        found.append(
            f"it runs {info.max_samples} sequences at a time, fewer than num_generations="
            f"{config.num_generations}; raise --max-num-seqs"
        )
    if info.returns_sampling_mask and not truncating(config):
        found.append(
            "it was started with --return-sampling-mask, and refuses requests without truncation; start it "
            "without, or set top_k, top_p or min_p"
        )
    needed = config.max_completion_length + (config.max_prompt_length or 1)
    if info.max_model_length < needed:
        found.append(
            f"--max-model-len {info.max_model_length} is less than {needed}, the sum of max_prompt_length "
            "and max_completion_length; raise it, or lower those"
        )
    return found


def _adapter_problem(info: ServerInfo, lora_rank: int | None) -> list[str]:
    if info.max_lora_rank is None or lora_rank is None:
        return []
    if lora_rank == 0:
        return [
            "it was started with --enable-lora, but the policy has no plain LoRA adapter, which can be sent "
            "alone; start it without, to send merged weights"
        ]
    if lora_rank > info.max_lora_rank:
        return [f"its --max-lora-rank {info.max_lora_rank} is less than the adapter's {lora_rank}; raise it"]
    return []


def _raw_logprobs_fit(config: GRPOConfig, mode: str) -> bool:
    """Return True if raw log-probs are those of the sampling distribution."""
    return (
        mode == "raw_logprobs"
        and sampler_settings(config) == SamplerSettings()
        and not config.generation_kwargs
        and config.vllm_structured_outputs_regex is None
    )


def _tokenizer_problem(
    servers: VLLMServers, server: HttpClient, tokenizer: ProcessingClass, info: ServerInfo
) -> list[str]:
    body = {"model": None, "prompt": _PROBE, "add_special_tokens": False}
    try:
        found = servers.run(server.call("POST", "/tokenize", body, doing="comparing tokenizers"))["tokens"]
    except BackendError:
        return []  # a server without a tokenizer: only token ids are exchanged
    expected = text_tokenizer(tokenizer)(_PROBE, add_special_tokens=False)["input_ids"]
    if list(expected) == list(found):
        return []
    return [
        f"the tokenizer of {info.model} is not the policy's: token ids have another meaning; serve its model"
    ]


def _warn_about_dtype(info: ServerInfo, config: GRPOConfig) -> None:
    expected = "bfloat16" if config.bf16 else "float16" if config.fp16 else "float32"
    if info.dtype != expected:
        logger.warning(
            "the vLLM server at %s computes in %s and the trainer in %s, so log-probs differ; start it with "
            "--dtype %s",
            *(info.url, info.dtype, expected, expected),
        )
