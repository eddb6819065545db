"""Whether the running servers fit the run: asked before training, answered with what to change."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from groupwise.errors import BackendError
from groupwise.generation.vllm.client import VLLMServers
from groupwise.generation.vllm.http import HttpClient

logger = logging.getLogger(__name__)

#: Sizes of the policy that weights depend on; names as in the configurations of transformers.
_SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SENDABLE = ("groupwise", "nccl", "ipc")
_PROBE = "The answer: 3.14 + 2.7 = 5.84\n\tünïcode 你好"


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself.

    shape: the sizes of its model, as far as they are known.
    """

    url: str
    model: str
    dtype: str
    logprobs_mode: str
    max_model_length: int
    max_samples: int
    weight_transfer: str | None
    shape: dict[str, int]


def check_servers(servers: VLLMServers, policy: Any, config: Any, tokenizer: Any) -> list[ServerInfo]:
    """Compare every server with the policy and the configuration.

    Args:
        policy: the configuration of the model that is trained.
        tokenizer: None leaves the servers' tokenizers unchecked.

    Raises:
        BackendError: a server does not fit; all reasons at once, each with what to change.
    """
    facts = [_ask(server) for server in servers.servers]
    problems = []
    for fact, server in zip(facts, servers.servers, strict=True):
        found = _problems(fact, policy.get_text_config(decoder=True), config)
        if tokenizer is not None and not found:
            found += _tokenizer_problem(server, tokenizer, fact)
        problems += [f"\n  - {fact.url}: {problem}" for problem in found]
        _warn(fact, config)
    if len({fact.weight_transfer for fact in facts}) > 1:
        problems.append("\n  - the servers differ in --weight-transfer-config; start all with the same")
    if problems:
        raise BackendError(f"{len(problems)} reason(s) not to train with these servers{''.join(problems)}")
    return facts


def _ask(server: HttpClient) -> ServerInfo:
    doing = "asking for its configuration"
    info = server.call("GET", "/server_info?config_format=json", doing=doing)["vllm_config"]
    model = info["model_config"]
    transfer = info.get("weight_transfer_config") or {}
    return ServerInfo(
        url=server.url,
        model=model["model"],
        dtype=str(model["dtype"]).removeprefix("torch."),
        logprobs_mode=model["logprobs_mode"],
        max_model_length=model["max_model_len"],
        max_samples=info["scheduler_config"]["max_num_seqs"],
        weight_transfer=transfer.get("backend"),
        shape=_shape(model["model"]),
    )


def _shape(model: str) -> dict[str, int]:
    """The sizes of a served model, which the server does not say; none without its files on this machine."""
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):
        return {}
    sizes = {name: getattr(config.get_text_config(decoder=True), name, None) for name in _SHAPE}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def _problems(fact: ServerInfo, policy: Any, config: Any) -> list[str]:
    found = []
    for name, size in fact.shape.items():
        own = getattr(policy, name, size)
        if own is not None and own != size:
            found.append(
                f"it serves {fact.model} with {name}={size}, but the policy has {own}; serve that model"
            )
    if fact.weight_transfer is None:
        found.append(
            "it takes no weights; start it with --weight-transfer-config, as groupwise vllm-serve does"
        )
    elif fact.weight_transfer not in _SENDABLE:
        found.append(
            f"its weight transfer {fact.weight_transfer!r} is unknown here; allowed: {', '.join(_SENDABLE)}"
        )
    elif fact.weight_transfer != "groupwise" and config.device.type != "cuda":
        found.append(
            f"its weight transfer {fact.weight_transfer!r} sends from a GPU, but the policy trains on "
            f"{config.device.type}; start it with the backend 'groupwise'"
        )
    if fact.logprobs_mode != "processed_logprobs" and not _samples_plainly(config, fact.logprobs_mode):
        found.append(
            f"it reports {fact.logprobs_mode}, which are not those of the distribution that it samples from; "
            "start it with --logprobs-mode processed_logprobs"
        )
    if fact.max_samples < config.num_generations:
        found.append(
            f"it runs {fact.max_samples} sequences at a time, fewer than num_generations="
            f"{config.num_generations}; raise --max-num-seqs"
        )
    needed = config.max_completion_length + (config.max_prompt_length or 1)
    if fact.max_model_length < needed:
        found.append(
            f"--max-model-len {fact.max_model_length} is less than {needed}, which max_prompt_length and "
            "max_completion_length add up to; raise it, or lower those"
        )
    return found


def _samples_plainly(config: Any, mode: str) -> bool:
    """Whether raw log-probabilities are those of the sampling distribution anyway."""
    changed = (config.temperature != 1.0, config.top_p < 1.0, config.top_k, config.min_p)
    return (
        mode == "raw_logprobs"
        and not any(changed)
        and config.repetition_penalty == 1.0
        and not config.generation_kwargs
        and config.vllm_structured_outputs_regex is None
    )


def _tokenizer_problem(server: HttpClient, tokenizer: Any, fact: ServerInfo) -> list[str]:
    body = {"model": None, "prompt": _PROBE, "add_special_tokens": False}
    try:
        theirs = server.call("POST", "/tokenize", body, doing="comparing tokenizers")["tokens"]
    except BackendError:
        return []  # started without a tokenizer: token ids go in and out, so it needs none
    own = getattr(tokenizer, "tokenizer", tokenizer)(_PROBE, add_special_tokens=False)["input_ids"]
    if list(own) == list(theirs):
        return []
    return [
        f"the tokenizer of {fact.model} is not the policy's: token ids would mean other text; serve its model"
    ]


def _warn(fact: ServerInfo, config: Any) -> None:
    expected = "bfloat16" if config.bf16 else "float16" if config.fp16 else "float32"
    if fact.dtype != expected:
        logger.warning(
            "the vLLM server at %s computes in %s and the trainer in %s, so log-probabilities differ; start "
            "it with --dtype %s",
            *(fact.url, fact.dtype, expected, expected),
        )
