"""Check before training that the running servers fit the run."""

from __future__ import annotations

import logging
from contextlib import suppress
from operator import itemgetter
from typing import Any

from packaging.version import InvalidVersion, Version
from transformers import AutoConfig, PreTrainedConfig

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.sampling import truncating
from groupwise.errors import BackendError
from groupwise.generation.vllm.client import HttpClient, VLLMServers
from groupwise.generation.vllm.serve import EXPERTS
from groupwise.tokenization.text import ProcessingClass, text_tokenizer

logger = logging.getLogger(__name__)

#: Config fields that determine the shapes of weights.
_SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_FROM_GPU = ("nccl", "ipc")
_SENDABLE = ("groupwise", *_FROM_GPU)
#: Quantizations of checkpoints with packed weights, which do not take the full matrices that are sent.
_PACKED = ("bitsandbytes", "awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin")
_REPORTS_WEIGHTS = Version("0.32")
_PROBE = "The answer: 3.14 + 2.7 = 5.84\n\tünïcode 你好"


class ServerInfo:
    """Configuration that a server reports.

    Args:
        url: address.
        given: vLLM's configuration.
        version: of vLLM.
        probe_ids: tokens of ``_PROBE``; None: the server has no tokenizer, only token ids are exchanged.

    Attributes:
        weight_transfer: None without ``--weight-transfer-config``.
        max_lora_rank: None without ``--enable-lora``.
        num_engines: data-parallel copies of the model.
        reports_versions: each sample comes with the versions of the weights that sampled it.
    """

    def __init__(self, url: str, given: dict[str, Any], version: str, probe_ids: list[int] | None) -> None:
        model = given["model_config"]
        self.url, self.version, self.probe_ids = url, version, probe_ids
        self.model: str = model["model"]
        self.dtype = str(model["dtype"]).removeprefix("torch.")
        self.quantization: str | None = model.get("quantization")
        self.logprobs_mode: str = model["logprobs_mode"]
        self.max_model_length = int(model["max_model_len"])
        self.returns_sampling_mask = bool(model.get("return_sampling_mask"))
        self.max_num_seqs = int(given["scheduler_config"]["max_num_seqs"])
        self.num_engines = int(given["parallel_config"]["data_parallel_size"])
        self.weight_transfer: str | None = (given.get("weight_transfer_config") or {}).get("backend")
        self.max_lora_rank: int | None = (given.get("lora_config") or {}).get("max_lora_rank")
        self.sends_keys, self.reports_versions = given.get("kv_transfer_config") is not None, True
        with suppress(InvalidVersion):  # "dev": built from its source
            self.reports_versions = Version(version) >= _REPORTS_WEIGHTS


async def _fetch(server: HttpClient) -> ServerInfo:
    path = "/server_info?config_format=json"
    version = await server.call(
        "GET", "/version", doing="reading its version", read=lambda answer: str(answer["version"])
    )
    body, probe_ids = {"model": None, "prompt": _PROBE, "add_special_tokens": False}, None
    with suppress(BackendError):
        doing, read = "comparing tokenizers", itemgetter("tokens")
        probe_ids = await server.call("POST", "/tokenize", body, doing=doing, read=read)

    def info(answer: dict[str, Any]) -> ServerInfo:
        return ServerInfo(server.url, answer["vllm_config"], version, probe_ids)

    return await server.call("GET", path, doing="reading its configuration", read=info)


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
    own_ids = None
    if tokenizer is not None:
        own_ids = text_tokenizer(tokenizer)(_PROBE, add_special_tokens=False)["input_ids"]
    servers.find_workers()
    infos, problems = list(servers.on_all(_fetch).values()), []
    for info in infos:
        found = _problems(info, policy, config, lora_rank, has_router=servers.router is not None)
        if not found and None not in (own_ids, info.probe_ids) and own_ids != info.probe_ids:
            found = [
                f"the tokenizer of {info.model} is not the policy's: token ids have another meaning; serve "
                "its model"
            ]
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


def _problems(
    info: ServerInfo, policy: PreTrainedConfig, config: GRPOConfig, lora_rank: int | None, *, has_router: bool
) -> list[str]:
    """Return the reasons why a server does not fit."""
    served = policy
    with suppress(OSError, ValueError):  # its files may not be on this machine
        served = AutoConfig.from_pretrained(info.model, local_files_only=True).get_text_config(decoder=True)
    sizes = [(name, getattr(served, name, None), getattr(policy, name, None)) for name in _SHAPE]
    transfer, max_rank, mode = info.weight_transfer, info.max_lora_rank, info.logprobs_mode
    loads_4_bits = (
        info.quantization == "bitsandbytes" and getattr(policy, "quantization_config", None) and max_rank
    )
    shares_experts = info.num_engines > 1 and any(getattr(policy, name, None) for name in EXPERTS)
    needed = config.max_completion_length + (config.max_prompt_length or 1)
    checks = {
        f"it serves {info.model} with {name}={size}, but the policy has {expected}; serve that model": True
        for name, size, expected in sizes
        if None not in (size, expected) and size != expected
    } | {
        f"its weights are quantized by {info.quantization}, but full matrices are sent; serve the model "
        "without quantization, or with --enable-lora the checkpoint of a policy in 4 bits": (
            info.quantization in _PACKED and not loads_4_bits
        ),
        "it takes no weights; start it with --weight-transfer-config, as groupwise vllm-serve does": (
            transfer is None
        ),
        f"its weight transfer {transfer!r} is not supported; allowed: {', '.join(_SENDABLE)}": (
            transfer not in (None, *_SENDABLE)
        ),
        f"its weight transfer {transfer!r} sends from a GPU, but the policy trains on {config.device.type}; "
        "start it with the backend 'groupwise'": transfer in _FROM_GPU and config.device.type != "cuda",
        f"it reports {mode}, which are not log-probs of the sampling distribution; start it with "
        "--logprobs-mode processed_logprobs": mode != "processed_logprobs",
        f"it runs vLLM {info.version}, which does not report the weights that sampled each token, as routers "
        f"and rollout_staleness need; install {_REPORTS_WEIGHTS} or newer there, or set rollout_staleness=0 "
        "and give the addresses of servers": (
            (has_router or config.rollout_staleness > 0) and not info.reports_versions
        ),
        "it sends keys and values to workers behind the router, which an update would not replace; start it "
        "without --kv-transfer-config": has_router and info.sends_keys,
        f"it runs {info.max_num_seqs} sequences at a time, fewer than num_generations="
        f"{config.num_generations}; raise --max-num-seqs": info.max_num_seqs < config.num_generations,
        f"its {info.num_engines} data-parallel engines share experts, which cannot be compared; start it "
        "with --tensor-parallel-size instead, or set vllm_weight_check='off'": (
            shares_experts and config.vllm_weight_check != "off"
        ),
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
    return [problem for problem, applies in checks.items() if applies]
