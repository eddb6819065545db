"""Process that makes runs on a simulated device, and those without samples of their own on the CPU too.

    device_worker.py OUTPUT_DIR

The trained weights of a run come to OUTPUT_DIR/<device>-<run>.pt; the error of one that fails, to .txt; how
often it waited for the device and copied to it, by file, to .json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from transformers import LlamaConfig, LlamaForSequenceClassification

from groupwise import trl_hooks
from groupwise.rewards import ProcessRewardModel, get_distillation_reward
from support import agent_runs, runs, tiny_vlm
from support.fakes import simulated_device
from support.process_rewards import STEP, byte_tokenizer, step_classifier

Settings = dict[str, Any]


def rollouts(prompts: list[str], trainer: Any) -> Settings:
    """Completions that depend on no sampler."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = [[5 + i % 3, STEP, 7 + i * i % 5, *[9] * (i % 4 > 1), 1] for i in range(len(ids))]
    logprobs = [[-3.4] * len(completion) for completion in completions]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}


def step_rewards(completion_ids: list[list[int]], **_: Any) -> list[list[tuple[int, float]]]:
    return [[(0, 0.5 * (ids[2] % 2)), (len(ids) - 1, float(ids[0]))] for ids in completion_ids]


def score_model() -> LlamaForSequenceClassification:
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=32, num_labels=1, pad_token_id=0, **shape))


class Hooks(trl_hooks.GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return super()._generate_and_score_completions(inputs)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs)


def trained(make: Callable[..., Any], directory: str, **settings: Any) -> Any:
    run = make(directory, **settings)
    run.train()
    return run


def resumed(make: Callable[..., Any], directory: str, **settings: Any) -> Any:
    saved = {"save_strategy": "steps", "save_steps": 1, **settings}
    trained(make, directory, **{**saved, "max_steps": 1})
    run = make(directory, **saved)
    run.train(resume_from_checkpoint=True)
    return run


def with_rollouts(directory: str, **settings: Any) -> Any:
    # The update of plain gradient descent is proportional to the gradient, rounding errors included. One step
    # unless a case uses a generation or its reference again.
    defaults = {"rollout_func": rollouts, "optim": "sgd", "learning_rate": 1.0, "max_steps": 1}
    return runs.trainer(directory, **{**defaults, **settings})


#: Runs on completions of ``rollouts``: updates on both devices agree within rounding.
SAME: dict[str, Callable[[], Settings]] = {
    "shared_prefix": lambda: {},
    "padded, batch scale, high_entropy, entropy_bonus": lambda: {
        **{"sequence_layout": "padded", "skip_zero_advantage": False},
        **{"scale_rewards": "batch", "loss_type": "sapo"},
        **{"top_entropy_quantile": 0.5, "entropy_coef": 0.01, "use_adaptive_entropy": True},
    },
    "packed, kl_in_reward, moving_reference": lambda: {
        **{"beta": 0.1, "kl_in_reward": True, "sync_ref_model": True, "ref_model_sync_steps": 1},
        **{"sequence_layout": "packed", "max_steps": 2},
    },
    "off_policy_mask, sampler_correction, sequence_ratios, dense_head": lambda: {
        **{"off_policy_mask_threshold": 0.5, "num_iterations": 2, "max_steps": 2},
        **{"importance_sampling_level": "sequence", "logprob_head": "dense"},
        "rollout_func_importance_sampling_correction": True,
    },
    "step_rewards, reward_model": lambda: {
        "rewards": [step_rewards, score_model()],
        "reward_processing_classes": [None, runs.tokenizer()],
    },
    "process_reward_model": lambda: {
        "rewards": ProcessRewardModel(step_classifier(), step_separator=runs.tokenizer().decode([STEP])),
        "reward_processing_classes": byte_tokenizer(),
    },
    "teacher": lambda: {"rewards": get_distillation_reward(runs.policy(seed=1))},
    "lora": lambda: {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "beta": 0.1},
    "virtual_tokens": lambda: {
        "peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    },
    "hooks": lambda: {"kind": Hooks, "rollout_func": rollouts, "beta": 0.1},
    "resumed, reused, kl": lambda: {
        **{"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2, "beta": 0.1},
        **{"run": resumed, "max_steps": 2},
    },
}
#: Runs with samples of their own.
SAMPLED: dict[str, Callable[[], Settings]] = {
    "samples": lambda: {"top_p": 0.8, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1},
    "evaluation": lambda: {
        "eval_dataset": runs.prompts(6),
        **{"eval_strategy": "steps", "eval_steps": 1, "log_completions": True},
    },
    "dynamic_sampling": lambda: {"dynamic_sampling": True, "num_iterations": 2},
    "tools": lambda: {"make": agent_runs.trainer, "tools": [agent_runs.measure]},
    # Recomputed layers make an empty cache in the thread of the backward pass, which the simulation cannot.
    "gemma3": lambda: {"make": tiny_vlm.trainer, "family": "gemma3", "gradient_checkpointing": False},
}


def check_refusals() -> None:
    with simulated_device.simulated_device():
        there, here = torch.ones(2, device=simulated_device.NAME), torch.ones(2)
        assert (there + torch.tensor([1, 2], device=there.device)).tolist() == [2, 3] and there[
            [1]
        ].cpu().equal(here[:1])
        for refused in (lambda: there + here, lambda: there.double(), lambda: there.numpy()):
            with pytest.raises((RuntimeError, TypeError), match=r"same device|float64|numpy"):
                refused()


def main(output: Path) -> None:
    simulated_device.register()
    check_refusals()
    for device in ("cpu", simulated_device.NAME):
        on_device = device != "cpu"
        os.environ["ACCELERATE_TORCH_DEVICE"] = device
        for name, settings in {**SAME, **(SAMPLED if on_device else {})}.items():
            given = settings()
            run, make = given.pop("run", trained), given.pop("make", None)
            make = make or (with_rollouts if name in SAME else runs.trainer)
            torch.manual_seed(0)
            simulated_device.counts.clear()
            try:
                with (
                    tempfile.TemporaryDirectory() as directory,
                    simulated_device.simulated_device() if on_device else nullcontext(),
                ):
                    trainer = run(make, directory, use_cpu=not on_device, **given)
                    counts: Counter[str] = Counter()
                    for (kind, place), count in simulated_device.counts.items():
                        counts[f"{kind} {place.partition(':')[0]}"] += count
                    (output / f"{device}-{name}.json").write_text(json.dumps(counts))
                    assert trainer.model.device.type == device
                    weights = {key: value.detach().cpu() for key, value in trainer.model.named_parameters()}
                    norm = trainer.state.log_history[0]["grad_norm"]
                    torch.save((weights, norm), output / f"{device}-{name}.pt")
            except Exception:  # the test of the run shows it
                (output / f"{device}-{name}.txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
