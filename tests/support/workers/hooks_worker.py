"""One of two processes that trains subclasses written for TRL with ``groupwise.trl_hooks`` and with TRL.

    torchrun --nproc_per_node 2 hooks_worker.py POLICY_DIRECTORY OUTPUT_DIR

Each process leaves ``RANK.pt``: parameters, logs and seen values by case, ours and TRL's.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from groupwise import trl_hooks
from support.parity_runs import (
    Policy,
    Run,
    Setting,
    noisy_sampler,
    prompt_text,
    train_groupwise,
    train_trl,
)

PATIENCE = 200  # seconds, after which a process that hangs prints its stack


def hooked(base: type) -> type:
    """Overrides of the hooks of rewards, generation batch and loss, which read and write ``_metrics``."""

    class Trainer(base):  # type: ignore[misc]
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.seen: dict[str, list[Any]] = defaultdict(list)

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            lengths = torch.tensor([len(ids) for ids in completion_ids_list], device=rewards.device)
            self.seen["rows and rewards"].append((len(inputs), len(rewards)))
            self.seen["completions"] += [list(map(int, ids)) for ids in completion_ids_list]
            self.rewards = rewards - 0.3 * self.accelerator.gather(lengths).unsqueeze(1) ** 1.5
            return self.rewards

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            metrics = self._metrics["train" if self.model.training else "eval"]
            grouped = self.rewards.nansum(dim=1).view(-1, self.num_generations)
            centred = (grouped - grouped.mean(dim=1, keepdim=True)).flatten()
            start = self.accelerator.process_index * len(inputs)
            output["advantages"] = 0.2 * centred[start : start + len(inputs)]  # rows of this rank
            metrics["reward_doubled"].append(2 * metrics["reward"][-1])
            metrics["largest_advantage"].append(output["advantages"].max().item())  # not that of other ranks
            self.seen["generated at"].append(self._step)
            return output

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            self.seen["losses at"].append(self._step)
            if self.model.training:
                self._metrics["train"]["rows_of_rank"].append(
                    len(inputs["advantages"]) + 10.0 * self.accelerator.process_index
                )
            return 1.5 * loss

    return Trainer


def filtered(base: type) -> type:
    """Rows without an advantage leave the dictionary; ranks keep different numbers of rows."""

    class Trainer(hooked(base)):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            if not self.model.training:
                return output
            keep = output["advantages"].abs() > 0.12
            self.seen["kept"].append(int(keep.sum()))
            return {
                name: value[keep] if isinstance(value, torch.Tensor) and value.dim() else value
                for name, value in output.items()
            }

    return Trainer


#: Two processes with 3 rows per micro-batch and groups of 4: the second group has rows on both.
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "epsilon": 0.01,
    "epsilon_high": 0.02,
    "learning_rate": 0.03,
}
ACCUMULATED: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "shuffle_dataset": True,
}
CORRECTED: dict[str, Any] = {"vllm_importance_sampling_mode": "token_truncate", "num_iterations": 2}
CASES: dict[str, dict[str, Any]] = {
    "grpo, accumulated": {"loss_type": "grpo", **ACCUMULATED, "beta": 0.04, "top_entropy_quantile": 0.4},
    "dapo, filtered": {"loss_type": "dapo", "subclass": filtered},
    "vespo, sampler": {"loss_type": "vespo", **CORRECTED, "sampler": True},
    "dapo, sampled": {"loss_type": "dapo", "scripted": False},
}


def train(train_one: Any, policy: Policy, directory: Path, case: dict[str, Any], **base: Any) -> Any:
    """Train four optimizer steps, evaluate, and return what the test compares."""
    options = {**COMMON, **case}
    sampler = noisy_sampler(policy) if options.pop("sampler", False) else None
    scripted = options.pop("scripted", True)  # else both libraries sample the completions
    setting = Setting(
        options, subclass=options.pop("subclass", hooked), sampler_logps=sampler, scripted=scripted
    )
    run: Run = train_one(policy, setting, directory, **base)
    trained = dict(run.trainer.seen)
    parameters = {name: value.clone() for name, value in run.parameters.items()}
    evaluation = run.trainer.evaluate(Dataset.from_dict({"prompt": [prompt_text(i) for i in range(4)]}))
    return {
        "parameters": parameters,
        "log": run.log,
        "seen": trained,
        "step": run.trainer._step,
        "evaluation": evaluation,
    }


def main(policy_directory: Path, output_dir: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    warnings.simplefilter("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import trl  # noqa: F401  # imported first, so that it is frozen too

    gc.freeze()  # every training run ends in a full garbage collection, which need not visit the imports
    policy = Policy(policy_directory, AutoTokenizer.from_pretrained(policy_directory))
    results = {
        name: {
            "ours": train(train_groupwise, policy, output_dir / "ours", case, base=trl_hooks.GRPOTrainer),
            "theirs": train(train_trl, policy, output_dir / "theirs", case),
        }
        for name, case in CASES.items()
    }
    torch.save(results, output_dir / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
