"""One tiny model, fixed completions and fixed rewards, trained by either library."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from groupwise.config.grpo_config import GRPOConfig
from groupwise.trainer import GRPOTrainer

PAD, EOS, FIRST_WORD, VOCABULARY = 0, 1, 2, 40
MAX_LENGTH = 7
PROMPTS = 16


@dataclass(frozen=True)
class Policy:
    """A checkpoint on disk (a reference model is loaded from there) and its tokenizer."""

    path: Path
    tokenizer: PreTrainedTokenizerFast

    def load(self) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(self.path, dtype=torch.float32)


def make_policy(path: Path) -> Policy:
    """Two layers with weights large enough that tokens differ in probability and entropy."""
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(FIRST_WORD, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            initializer_range=0.3,
            pad_token_id=PAD,
            bos_token_id=None,
            eos_token_id=EOS,
        )
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Policy(path, tokenizer)


def prompt_text(index: int) -> str:
    """Prompts of two to five words, so that they need padding."""
    return " ".join(
        f"w{FIRST_WORD + (index + 3 * i) % (VOCABULARY - FIRST_WORD)}" for i in range(2 + index % 4)
    )


def completion(prompt: str, sample: int) -> list[int]:
    """The fixed tokens of one sample: 1 to ``MAX_LENGTH``, one in four without an end token."""
    generator = random.Random(f"{prompt}/{sample}")
    if generator.random() < 0.25:
        return [generator.randrange(FIRST_WORD, VOCABULARY) for _ in range(MAX_LENGTH)]
    length = generator.randrange(MAX_LENGTH)
    return [generator.randrange(FIRST_WORD, VOCABULARY) for _ in range(length)] + [EOS]


SamplerLogps = Callable[[list[int], list[int]], list[float | None]]


def noisy_sampler(policy: Policy, *, unscored: bool = False) -> SamplerLogps:
    """Log-probs of the starting policy, off by up to 0.8 per token; ``unscored`` leaves single tokens out."""
    model = policy.load()

    def logps(prompt_ids: list[int], completion_ids: list[int]) -> list[float | None]:
        with torch.no_grad():
            all_logps = model(torch.tensor([prompt_ids + completion_ids])).logits[0].log_softmax(-1)
        noise = random.Random(str(completion_ids))
        values: list[float | None] = [
            all_logps[len(prompt_ids) - 1 + t, token].item() + noise.uniform(-0.8, 0.8)
            for t, token in enumerate(completion_ids)
        ]
        if unscored and len(values) > 2:
            values[1] = None
        return values

    return logps


def fixed_rollout(tokenizer: Any, sampler_logps: SamplerLogps | None = None) -> Callable[..., dict[str, Any]]:
    """A ``rollout_func`` for both libraries; without ``sampler_logps`` it reports no log-probs."""

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seen: Counter[str] = Counter()
        prompt_ids, completion_ids = [], []
        for prompt in prompts:
            prompt_ids.append(tokenizer(prompt)["input_ids"])
            completion_ids.append(completion(prompt, seen[prompt]))
            seen[prompt] += 1
        logps = None
        if sampler_logps is not None:
            logps = [sampler_logps(p, c) for p, c in zip(prompt_ids, completion_ids, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logps}

    return rollout_func


def mixed_reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards that differ within a group, except for every third prompt, whose group has no variance."""
    return [
        1.0 if len(prompt.split()) == 3 else float(sum(ids) % 5) - 0.5 * len(ids)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def patchy_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A second reward that has nothing to say on some completions."""
    return [None if sum(ids) % 3 == 0 else float(len(ids)) for ids in completion_ids]


def very_patchy_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A completion for which this and :func:`patchy_reward` return None has no reward."""
    return [None if sum(ids) % 2 == 0 else float(sum(ids) % 7) for ids in completion_ids]


#: Only plain SGD without gradient clipping shows a wrong scale of the gradient: Adam and clipping hide it.
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": MAX_LENGTH,
    "max_steps": 4,
    "optim": "sgd",
    "learning_rate": 0.05,
    "use_bias_correction_kl": False,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "shuffle_dataset": False,
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}


#: Options with which every objective moves by a similar amount: luspo sums over tokens, others take means,
#: and cispo's upper bound is on the ratio itself. The clip range is narrow, so that a second pass leaves it.
OBJECTIVES: dict[str, dict[str, Any]] = {
    name: {"loss_type": name, "learning_rate": 0.03, "epsilon": 0.01, "epsilon_high": 0.02, **own}
    for name, own in {
        "grpo": {},
        "bnpo": {},
        "dr_grpo": {},
        "dapo": {},
        "cispo": {"epsilon_high": 1.02},
        "sapo": {},
        "luspo": {"learning_rate": 0.003},
        "vespo": {},
    }.items()
}


@dataclass(frozen=True)
class Run:
    """Results of a run: parameters by name, the log, and the trainer."""

    parameters: dict[str, torch.Tensor]
    log: list[dict[str, float]]
    trainer: Any

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.log if name in entry]


@dataclass(frozen=True)
class Setting:
    """A comparison: settings that both libraries read, and what only one of them needs.

    subclass: makes the trainer's class from that of either library.
    scripted: a ``rollout_func`` gives the completions; else the subclass has to.
    from_vllm: the sampler's log-probs are vLLM's, and both libraries correct for them.
    """

    options: Mapping[str, Any]
    rewards: tuple[Any, ...] = (mixed_reward,)
    sampler_logps: SamplerLogps | None = None
    subclass: Callable[[type], type] = lambda base: base
    scripted: bool = True
    from_vllm: bool = True

    @property
    def corrects_for_sampler(self) -> bool:
        return self.sampler_logps is not None and self.from_vllm


def _arguments(policy: Policy, setting: Setting) -> dict[str, Any]:
    return {
        "model": policy.load(),
        "reward_funcs": list(setting.rewards),
        "train_dataset": Dataset.from_dict({"prompt": [prompt_text(i) for i in range(PROMPTS)]}),
        "processing_class": policy.tokenizer,
        "rollout_func": fixed_rollout(policy.tokenizer, setting.sampler_logps) if setting.scripted else None,
    }


def _trained(trainer: Any) -> Run:
    trainer.train()
    parameters = {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}
    return Run(parameters, trainer.state.log_history, trainer)


def train_groupwise(
    policy: Policy,
    setting: Setting,
    directory: Path,
    prepare: Callable[[Any], None] = lambda trainer: None,
    base: type[GRPOTrainer] = GRPOTrainer,
) -> Run:
    # Token metrics of both libraries are over the same rows only if none is skipped.
    args = GRPOConfig(
        output_dir=str(directory),
        rollout_func_importance_sampling_correction=setting.corrects_for_sampler,
        **{**COMMON, "skip_zero_advantage": False, **setting.options},
    )
    trainer = setting.subclass(base)(args=args, **_arguments(policy, setting))
    prepare(trainer)
    return _trained(trainer)


def make_trl_trainer(policy: Policy, setting: Setting, directory: Path) -> Any:
    """TRL's trainer; with sampler log-probs it believes that vLLM produced the completions.

    Its correction is gated by ``use_vllm``, whose engine only construction needs.
    """
    import trl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = trl.GRPOConfig(output_dir=str(directory), **{**COMMON, **setting.options})
        trainer = setting.subclass(trl.GRPOTrainer)(args=args, **_arguments(policy, setting))
    if setting.corrects_for_sampler and args.vllm_importance_sampling_correction:
        trainer.use_vllm = True
        trainer._last_loaded_step = -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return trainer


def train_trl(
    policy: Policy, setting: Setting, directory: Path, prepare: Callable[[Any], None] = lambda trainer: None
) -> Run:
    trainer = make_trl_trainer(policy, setting, directory)
    prepare(trainer)
    return _trained(trainer)


def largest_difference(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def movement(run: Run, policy: Policy) -> float:
    """The largest change of any parameter since the start."""
    return largest_difference(run.parameters, dict(policy.load().named_parameters()))


#: ``num_tokens``: ours counts at every step, TRL's only at those that generate. The rest measures time.
_NOT_COMPARED = {"num_tokens", "step_time", "train_runtime"}


def assert_same_log(ours: Run, theirs: Run, *, but: frozenset[str] = frozenset()) -> None:
    """Whatever both libraries log under one name during training has one meaning."""
    names = {name for entry in ours.log if "loss" in entry for name in entry} - _NOT_COMPARED - but
    shared = {name for entry in theirs.log if "loss" in entry for name in entry} & names
    assert {"loss", "grad_norm", "reward", "entropy"} <= shared | but
    for name in sorted(shared):
        assert ours.logged(name) == pytest.approx(theirs.logged(name), rel=1e-4, abs=2e-5), name


def assert_same_update(ours: Run, theirs: Run, policy: Policy) -> None:
    """Equal to a ten-thousandth of the movement or 1e-6; runs that stand still would agree as well."""
    moved = movement(ours, policy)
    assert moved > 1e-3
    assert largest_difference(ours.parameters, theirs.parameters) < max(1e-6, 1e-4 * moved)
