"""Subclasses written for TRL, each made from one class body for both libraries: the same run."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.parity_runs import (
    COMMON,
    OBJECTIVES,
    PROMPTS,
    Policy,
    Run,
    Setting,
    assert_same_log,
    assert_same_update,
    completion,
    largest_difference,
    mixed_reward,
    noisy_sampler,
    prompt_text,
    train_groupwise,
    train_trl,
)
from transformers import Trainer

from groupwise import GRPOConfig, GRPOTrainer, trl_hooks
from groupwise.compat.trl import REFUSED_METHODS, UNREAD_ATTRIBUTES
from groupwise.trl_hooks import checks

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.parity

#: Two optimizer steps on each generation, two micro-batches in each: rows are shuffled, ratios leave 1.
SPLIT: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "epsilon": 0.01,
    "epsilon_high": 0.02,
    "learning_rate": 0.03,
}


def train_both(policy: Policy, setting: Setting, directory: Path, prepare: Any = lambda trainer: None):
    ours = train_groupwise(policy, setting, directory / "ours", prepare, trl_hooks.GRPOTrainer)
    return ours, train_trl(policy, setting, directory / "theirs", prepare)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "vespo"])  # a divisor of its own each
def test_without_an_override_rows_are_shuffled_and_the_loss_is_divided_as_in_trl(
    loss_type: str, policy: Policy, tmp_path: Path
) -> None:
    setting = Setting({**SPLIT, **OBJECTIVES[loss_type], "beta": 0.04})
    ours, theirs = train_both(policy, setting, tmp_path)
    assert_same_update(ours, theirs, policy)
    assert_same_log(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_metrics_are_means_of_micro_batches_and_generations_as_in_trl(
    loss_type: str, policy: Policy, tmp_path: Path
) -> None:
    """Every third step is logged; micro-batches have different numbers of tokens."""
    options = {**SPLIT, **OBJECTIVES[loss_type], "beta": 0.04, "entropy_coef": 0.05}
    options |= {"logging_steps": 3, "max_steps": 6, "num_iterations": 2}
    ours, theirs = train_both(policy, Setting(options), tmp_path)
    assert_same_log(ours, theirs)
    plain = train_groupwise(policy, Setting(options), tmp_path / "plain")
    for name in ("kl", "entropy", "policy_loss"):
        assert ours.logged(name) != pytest.approx(plain.logged(name), rel=1e-3), name


OPTIONS: dict[str, dict[str, Any]] = {
    "several_generations_in_a_window": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "iterations": {"num_iterations": 2},
    "sequence_ratio": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "top_entropy": {"top_entropy_quantile": 0.4},
    "entropy_bonus": {"entropy_coef": 0.05, "loss_type": "grpo"},
    "masked_truncated": {"mask_truncated_completions": True},
    "off_policy_mask": {"off_policy_mask_threshold": 0.005},
    "padded": {"sequence_layout": "padded"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, policy: Policy, tmp_path: Path) -> None:
    options = {**SPLIT, **OPTIONS[name]}
    ours = train_groupwise(policy, Setting(options), tmp_path / "ours", base=trl_hooks.GRPOTrainer)
    theirs = {key: value for key, value in options.items() if key != "sequence_layout"}
    assert_same_update(ours, train_trl(policy, Setting(theirs), tmp_path / "theirs"), policy)


def no_std(base: type) -> type:
    """Advantages without the division by the standard deviation, from rewards that a hook has kept."""

    class Trainer(base):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            self.rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return self.rewards

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            grouped = self.rewards.nansum(dim=1).view(-1, self.num_generations)
            centred = (grouped - grouped.mean(dim=1, keepdim=True)).flatten()
            start = self.accelerator.process_index * len(inputs)
            output["advantages"] = 0.2 * centred[start : start + len(inputs)]
            return output

    return Trainer


def shaped_rewards(base: type) -> type:
    """A length penalty on the rewards of all ranks, which are gathered already."""

    class Trainer(base):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            lengths = torch.tensor([len(ids) for ids in completion_ids_list], device=rewards.device)
            return rewards - 0.3 * self.accelerator.gather(lengths).unsqueeze(1) ** 1.5

    return Trainer


def own_rewards(base: type) -> type:
    """Rewards without the reward functions, from the dataset's rows."""

    class Trainer(base):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            assert [row["prompt"] for row in inputs] == prompts
            values = [[float(len(text) % 7)] for text in completions]
            return self.accelerator.gather(torch.tensor(values, device=self.accelerator.device))

    return Trainer


def extra_metrics(base: type) -> type:
    """Metrics of its own, and a metric of the trainer that it reads."""

    class Trainer(base):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            mode = "train" if self.model.training else "eval"
            metrics = self._metrics[mode]
            metrics["advantage/max"].append(output["advantages"].max().item())
            metrics["reward_doubled"].append(2 * metrics["reward"][-1])
            metrics["prompts_logged"].append(len(self._logs["prompt"]))
            metrics["generated_at"].append(self._step)
            metrics["last_advantage"].append(self._logs["advantages"][-1])
            return output

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            self._metrics["train"]["rows"].append(len(inputs["advantages"]))
            self._metrics["train"]["step_seen"].append(self._step)
            return loss

    return Trainer


def length_penalised_loss(base: type) -> type:
    """A loss of its own, built with the trainer's helper, divided by the accumulation."""

    class Trainer(base):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            mask = inputs["completion_mask"]
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                model, ids, attention, mask.size(1), compute_entropy=True
            )
            lengths = mask.sum(-1)
            weight = inputs["advantages"] - 0.1 * (lengths - lengths.float().mean())
            loss = -((logps * mask).sum(-1) / lengths.clamp(min=1) * weight).mean()
            self._metrics["train"]["entropy_of_first"].append((entropies * mask)[0].sum().item())
            return loss / self.current_gradient_accumulation_steps

    return Trainer


def kl_schedule(base: type) -> type:
    """A KL term whose coefficient grows with the step, with log-probs of the reference in the inputs."""

    class Trainer(base):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            coefficient = 0.2 * self.state.global_step
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            mask = inputs["completion_mask"]
            logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention, mask.size(1))
            gap = inputs["ref_per_token_logps"] - logps
            kl = ((gap.exp() - gap - 1) * mask).sum() / mask.sum()
            return loss + coefficient * kl / self.current_gradient_accumulation_steps

    return Trainer


def filtered_groups(base: type) -> type:
    """Rows of groups without variance are dropped, and the others put in another order."""

    class Trainer(base):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            keep = output["advantages"].abs().argsort(descending=True, stable=True)
            keep = keep[output["advantages"][keep] != 0]
            return {
                name: value[keep] if isinstance(value, torch.Tensor) and value.dim() else value
                for name, value in output.items()
            }

    return Trainer


def replay(base: type) -> type:
    """Rows without an advantage are replaced by the best rows of earlier generations."""

    class Trainer(base):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            stored = self.__dict__.setdefault("stored", [])
            names = [name for name, value in output.items() if value.dim() == 2]
            fresh = [
                {**{name: output[name][row] for name in names}, "advantages": output["advantages"][row]}
                for row in range(len(inputs))
            ]
            for row, sample in enumerate(fresh):
                if sample["advantages"] == 0 and stored:
                    fresh[row] = stored[row % len(stored)]
            stored += [sample for sample in fresh if sample["advantages"] > 0.8]
            rebuilt = {"advantages": torch.stack([sample["advantages"] for sample in fresh])}
            for name in names:
                width = max(len(sample[name]) for sample in fresh)
                side = -1 if name.startswith("prompt") else 1
                rebuilt[name] = torch.stack(
                    [
                        torch.nn.functional.pad(sample[name], (width - len(sample[name]), 0)[::side])
                        for sample in fresh
                    ]
                )
            return {**rebuilt, "num_items_in_batch": rebuilt["completion_mask"].sum()}

    return Trainer


def fixed_sampler(base: type) -> type:
    """A sampler of its own for one turn."""

    class Trainer(base):
        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations):
            seen, sampled = Counter(), []
            for prompt in self.processing_class.batch_decode(prompt_ids):
                sampled.append(completion(prompt, seen[prompt]))
                seen[prompt] += 1
            assert set(seen.values()) == {num_generations}
            return sampled, None

    return Trainer


def rewritten_generation(base: type) -> type:
    """Completions cut to four tokens after ``_generate``, and a column for the rewards."""

    class Trainer(base):
        def _generate(self, prompts):
            prompt_ids, completion_ids, tool_mask, texts, logps, extra, *images = super()._generate(prompts)
            completion_ids = [ids[:4] for ids in completion_ids]
            texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
            extra = {**extra, "bonus": [0.5 * len(ids) for ids in completion_ids]}
            return prompt_ids, completion_ids, tool_mask, texts, logps, extra, *images

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            bonus = torch.tensor([row["bonus"] for row in inputs], device=rewards.device)
            return rewards + self.accelerator.gather(bonus).unsqueeze(1)

    return Trainer


def entropy_filtered_tokens(base: type) -> type:
    """Tokens of low entropy are masked in the dictionary that ``super()`` receives, attention included."""

    class Trainer(base):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            mask = inputs["completion_mask"]
            with torch.no_grad():
                _, entropies, _ = self._get_per_token_logps_and_entropies(
                    model, ids, attention, mask.size(1), compute_entropy=True
                )
            keep = self.get_high_entropy_mask(entropies, mask, 0.5)
            return super()._compute_loss(model, {**inputs, "completion_mask": mask * keep})

    return Trainer


def distillation(base: type) -> type:
    """A term that pulls the policy to the reference model, whose log-probs a hook computes."""

    class Trainer(base):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            mask = inputs["completion_mask"]
            with torch.no_grad():
                teacher, _, _ = self._get_per_token_logps_and_entropies(
                    self.ref_model, ids, attention, mask.size(1), batch_size=2
                )
            logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention, mask.size(1))
            term = ((logps - teacher).square() * mask).sum() / mask.sum()
            return loss + term / self.current_gradient_accumulation_steps

    return Trainer


def weaker_negatives(base: type) -> type:
    """Rows with a negative advantage count less."""

    class Trainer(base):
        def _compute_loss(self, model, inputs):
            advantages = inputs["advantages"]
            inputs["advantages"] = torch.where(advantages < 0, 0.3 * advantages, advantages)
            return super()._compute_loss(model, inputs)

    return Trainer


def own_keys(base: type) -> type:
    """Keys of its own in the dictionary, a tensor, a list and a scalar, follow their rows to the loss."""

    class Trainer(base):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["weights"] = 1.0 + torch.arange(len(inputs)) / len(inputs)
            output["texts"] = [row["prompt"] for row in inputs]
            output["scale"] = torch.tensor(0.5)
            return output

        def _compute_loss(self, model, inputs):
            decoded = self.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
            assert decoded == inputs["texts"]
            scaled = inputs["advantages"] * inputs["weights"] * inputs["scale"]
            return super()._compute_loss(model, {**inputs, "advantages": scaled})

    return Trainer


def token_advantages(base: type) -> type:
    """Advantages per token, which grow along a completion."""

    class Trainer(base):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            ramp = torch.arange(output["completion_ids"].size(1)) / 5
            output["advantages"] = output["advantages"].unsqueeze(1) * ramp
            return output

    return Trainer


def regularised_outer_loss(base: type) -> type:
    """``compute_loss`` with a term on the weights."""

    class Trainer(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            norm = sum(parameter.square().sum() for parameter in model.parameters())
            return loss + 0.01 * norm / self.current_gradient_accumulation_steps

    return Trainer


def bounded_logps(base: type) -> type:
    """Log-probs bounded from below wherever the trainer computes them: old, reference and current."""

    class Trainer(base):
        def _get_per_token_logps_and_entropies(self, model, *given, **options):
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(model, *given, **options)
            return logps.clamp(min=-4.5), entropies, aux_loss

    return Trainer


def _perturb(model: Any, factor: float) -> None:
    """Move the weights along the accumulated gradient."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += factor * parameter.grad


def sharpness_aware(base: type) -> type:
    """A ``training_step`` of its own: the gradient at weights that a first backward pass has perturbed."""

    class Trainer(base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            self._metrics["train"]["words"].append(float(len(inputs[0]["prompt"].split())))
            inputs = self._prepare_inputs(inputs)
            mask = inputs["completion_mask"]
            first = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(first)
            before = [(p, p.detach().clone()) for p in model.parameters()]
            _perturb(model, 0.05)
            second = self.compute_loss(model, inputs)
            self.accelerator.backward(second)
            with torch.no_grad():
                for parameter, value in before:
                    parameter.copy_(value)
            self._metrics["train"]["masked"].append(mask.float().mean().item())
            self._step += 1
            return (first + second).detach() / 2

    return Trainer


def two_training_steps(base: type) -> type:
    """``training_step`` twice with the same inputs: in TRL the second call takes the next micro-batch."""

    class Trainer(base):
        def training_step(self, model, inputs, num_items_in_batch):
            self._metrics["train"]["rows"].append(float(len(inputs)))
            self._metrics["train"]["words"].append(float(len(inputs[-1]["prompt"].split())))
            first = super().training_step(model, inputs, num_items_in_batch)
            _perturb(model, 0.05)
            second = super().training_step(model, inputs, num_items_in_batch)
            self._metrics["train"]["gap"].append((first - second).item())
            return second

    return Trainer


def repeated_training_step(base: type) -> type:
    """``training_step`` twice on one micro-batch, by a step that is set back."""

    class Trainer(base):
        def training_step(self, model, inputs, num_items_in_batch):
            super().training_step(model, inputs, num_items_in_batch)
            _perturb(model, 0.05)
            self._step -= 1
            return super().training_step(model, inputs, num_items_in_batch)

    return Trainer


def constant_step(base: type) -> type:
    """A ``training_step`` that leaves ``_step`` alone: a new generation for every micro-batch."""

    class Trainer(base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    return Trainer


def changed_micro_batches(base: type) -> type:
    """``_prepare_inputs`` with advantages that are changed again in every iteration."""

    class Trainer(base):
        def _prepare_inputs(self, generation_batch):
            inputs = super()._prepare_inputs(generation_batch)
            inputs["advantages"] = inputs["advantages"] * 0.7
            return inputs

    return Trainer


SUBCLASSES: dict[Any, dict[str, Any]] = {
    no_std: {},
    shaped_rewards: {},
    own_rewards: {},
    extra_metrics: {},
    length_penalised_loss: {},
    kl_schedule: {"beta": 0.04},
    filtered_groups: {"loss_type": "grpo"},
    replay: {"steps_per_generation": 2},  # on-policy, so that no log-probs are stored
    fixed_sampler: {},
    rewritten_generation: {},
    entropy_filtered_tokens: {"loss_type": "grpo"},
    distillation: {"beta": 0.04},
    weaker_negatives: {"num_iterations": 2},
    own_keys: {},
    token_advantages: {},
    regularised_outer_loss: {},
    bounded_logps: {"beta": 0.04},
    sharpness_aware: {"entropy_coef": 0.05, "use_adaptive_entropy": True, "entropy_target": 3.2},
    two_training_steps: {"entropy_coef": 0.05, "use_adaptive_entropy": True, "entropy_target": 3.2},
    repeated_training_step: {},
    constant_step: {},
    changed_micro_batches: {"num_iterations": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("subclass", SUBCLASSES, ids=lambda subclass: subclass.__name__)
def test_subclass(subclass: Any, policy: Policy, tmp_path: Path) -> None:
    options = {**SPLIT, **SUBCLASSES[subclass]}
    setting = Setting(options, subclass=subclass, scripted=subclass is not fixed_sampler)
    ours, theirs = train_both(policy, setting, tmp_path)
    assert_same_update(ours, theirs, policy)
    # TRL counts lengths inside ``_generate``, before an override shortens completions; here those trained on.
    lengths = frozenset(name for name in ours.log[0] if name.startswith("completions/"))
    without = {rewritten_generation: lengths, length_penalised_loss: frozenset(["entropy"])}
    assert_same_log(ours, theirs, but=without.get(subclass, frozenset()))
    assert_override_matters(ours, policy, tmp_path, options)
    for name in {"words", "rows", "masked", "gap"} & theirs.log[0].keys():
        assert ours.logged(name) == pytest.approx(theirs.logged(name), abs=1e-5), name
    if subclass is extra_metrics:
        own = ["advantage/max", "reward_doubled", "prompts_logged", "last_advantage", "rows", "step_seen"]
        own.append("generated_at")
        for name in own:
            assert ours.logged(name) == pytest.approx(theirs.logged(name), abs=1e-5), name
        assert ours.logged("step_seen") == [0.5, 2.5, 4.5, 6.5]  # two micro-batches in each of four steps


def assert_override_matters(ours: Run, policy: Policy, tmp_path: Path, options: dict[str, Any]) -> None:
    if ours.trainer.__class__.__qualname__.split(".")[0] in ("extra_metrics", "fixed_sampler"):
        return
    without = train_groupwise(policy, Setting(options), tmp_path / "without", base=trl_hooks.GRPOTrainer)
    assert largest_difference(ours.parameters, without.parameters) > 1e-5


@pytest.mark.slow
def test_methods_replaced_on_the_instance(policy: Policy, tmp_path: Path) -> None:
    def prepare(trainer: Any) -> None:
        given_loss, given_rewards = trainer._compute_loss, trainer._calculate_rewards
        trainer._compute_loss = lambda model, inputs: 2 * given_loss(model, inputs)
        trainer._calculate_rewards = lambda *given: given_rewards(*given).clamp(max=1.0)

    ours, theirs = train_both(policy, Setting(SPLIT), tmp_path, prepare)
    assert_same_update(ours, theirs, policy)
    without = train_groupwise(policy, Setting(SPLIT), tmp_path / "without", base=trl_hooks.GRPOTrainer)
    assert largest_difference(ours.parameters, without.parameters) > 1e-4


@pytest.mark.slow
def test_steps_of_several_generations_in_a_window(policy: Policy, tmp_path: Path) -> None:
    options = {**SPLIT, **OPTIONS["several_generations_in_a_window"]}
    ours, theirs = train_both(policy, Setting(options, subclass=extra_metrics), tmp_path)
    for name in ("generated_at", "step_seen"):
        assert ours.logged(name) == theirs.logged(name)
    assert ours.logged("generated_at")[:2] == [1.0, 5.0]  # means of 0 and 2, of 4 and 6


def bounded_correction(base: type) -> type:
    """The sampler correction in the dictionary, with a bound of its own, also where it is zero."""

    class Trainer(base):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            ratio = output["importance_sampling_ratio"]
            output["importance_sampling_ratio"] = ratio.clamp(max=1.1) * (ratio > 0.8)
            self._metrics["train"]["sampler_gap"].append(
                (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs().sum().item()
            )
            return output

    return Trainer


CORRECTED: dict[str, dict[str, Any]] = {
    "token_truncate": {"loss_type": "dapo", "beta": 0.04, "off_policy_mask_threshold": 0.1},
    "sequence_mask": {"loss_type": "grpo", "entropy_coef": 0.05, "num_iterations": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", CORRECTED)
@pytest.mark.parametrize("subclass", [lambda base: base, bounded_correction], ids=["plain", "bounded"])
def test_sampler_correction(mode: str, subclass: Any, policy: Policy, tmp_path: Path) -> None:
    options = {
        "learning_rate": 0.03,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": 1.4,
        **CORRECTED[mode],
    }
    setting = Setting(options, sampler_logps=noisy_sampler(policy), subclass=subclass)
    ours, theirs = train_both(policy, setting, tmp_path)
    assert theirs.trainer.use_vllm
    assert_same_update(ours, theirs, policy)
    assert_same_log(ours, theirs)
    if subclass is bounded_correction:
        assert ours.logged("sampler_gap") == pytest.approx(theirs.logged("sampler_gap"), rel=1e-4)


def smaller_correction(base: type) -> type:
    """The square root of the sampler correction, in the dictionary."""

    class Trainer(base):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return {**output, "importance_sampling_ratio": output["importance_sampling_ratio"].sqrt()}

    return Trainer


@pytest.mark.slow
@pytest.mark.parametrize("subclass", [lambda base: base, smaller_correction], ids=["plain", "smaller"])
def test_sampler_correction_inside_the_weight_of_a_sequence(
    subclass: Any, policy: Policy, tmp_path: Path
) -> None:
    options = {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate", "num_iterations": 2}
    options |= {"learning_rate": 0.03, "off_policy_mask_threshold": 0.3}
    setting = Setting(options, sampler_logps=noisy_sampler(policy), subclass=subclass)
    assert_same_update(*train_both(policy, setting, tmp_path), policy)


@pytest.mark.slow
def test_evaluation(policy: Policy, tmp_path: Path) -> None:
    """A hook's metrics of an evaluation, and its loss. TRL shuffles the prompts, which neither depends on."""
    options = {**SPLIT, "max_steps": 1, "per_device_eval_batch_size": 8, "loss_type": "dr_grpo"}
    ours, theirs = train_both(policy, Setting(options, subclass=extra_metrics), tmp_path)
    logs = [run.trainer.evaluate(run.trainer.train_dataset) for run in (ours, theirs)]
    last = [run.trainer.state.log_history[-1] for run in (ours, theirs)]
    assert logs[0]["eval_loss"] == pytest.approx(logs[1]["eval_loss"], abs=1e-6)
    for name in ("eval_reward_doubled", "eval_reward", "eval_completions/clipped_ratio"):
        assert last[0][name] == pytest.approx(last[1][name], abs=1e-5), name


def copied(*names: str) -> Any:
    """Return a maker of subclasses that override hooks with the bodies that TRL's own trainer has."""

    def make(base: type) -> type:
        if base is trl.GRPOTrainer:
            return base
        bodies = [textwrap.dedent(inspect.getsource(getattr(trl.GRPOTrainer, name))) for name in names]
        scope = {**vars(sys.modules[trl.GRPOTrainer.__module__]), "base": base}
        exec("class Trainer(base):\n" + textwrap.indent("\n".join(bodies), "    "), scope)
        return scope["Trainer"]

    return make


COPIES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "loss": (
        ("_compute_loss",),
        {
            **{"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_coef_delta": 0.03},
            **{"entropy_target": 3.2, "loss_type": "grpo", "top_entropy_quantile": 0.5},
        },
    ),
    "generation batch": (
        (
            *("_calculate_rewards", "_generate_and_score_completions", "compute_loss", "prediction_step"),
            *("get_high_entropy_mask", "log", "_prepare_inputs"),
        ),
        {"beta": 0.04},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_bodies_that_a_subclass_copied_from_trl(name: str, policy: Policy, tmp_path: Path) -> None:
    """Public subclasses often copy the whole body of a hook and change a few lines."""
    names, options = COPIES[name]
    ours, theirs = train_both(policy, Setting({**SPLIT, **options}, subclass=copied(*names)), tmp_path)
    assert_same_update(ours, theirs, policy)
    assert_same_log(ours, theirs)
    logged = {name for name, value in theirs.log[0].items() if value is not None}
    assert logged <= ours.log[0].keys() and ours.logged("entropy_coef") == theirs.logged("entropy_coef")


def sampler_with_logps(base: type) -> type:
    """A sampler of its own without vLLM, which reports log-probs far from those of the policy."""

    class Trainer(fixed_sampler(base)):
        def _generate_single_turn(self, *given, **named):
            sampled, _ = super()._generate_single_turn(*given, **named)
            return sampled, [[-1.0 - 0.5 * t for t in range(len(ids))] for ids in sampled]

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            assert "sampling_per_token_logps" in output and "importance_sampling_ratio" not in output
            return output

    return Trainer


def test_log_probs_of_a_hook_do_not_correct_the_loss_without_vllm(policy: Policy, tmp_path: Path) -> None:
    setting = Setting({**SPLIT, "max_steps": 2}, subclass=sampler_with_logps, scripted=False)
    assert_same_update(*train_both(policy, setting, tmp_path), policy)


def weighted_tokens(base: type) -> type:
    """Tokens with weights between 0 and 1, in the mask of tools."""

    class Trainer(base):
        def _compute_loss(self, model, inputs):
            mask = inputs["completion_mask"]
            weights = torch.arange(mask.shape[1]).remainder(3) / 2 * torch.ones_like(mask)
            return super()._compute_loss(model, {**inputs, "tool_mask": weights})

    return Trainer


def test_a_mask_of_weights_counts_once(policy: Policy, tmp_path: Path) -> None:
    options = {**SPLIT, "loss_type": "grpo", "entropy_coef": 0.05, "max_steps": 2}
    setting = Setting(options, subclass=weighted_tokens)
    assert_same_update(*train_both(policy, setting, tmp_path), policy)


#: Names of TRL's trainer without an effect here, and why an override needs none.
NOT_HERE = {
    "_send_telemetry": "nothing is sent",
    "_tool_call_loop": "missing, with the way out",
    "_get_tool_suffix_ids": "missing, with the way out",
}


def methods(of: type = trl.GRPOTrainer) -> list[str]:
    """Methods that a subclass of TRL's trainer may override, those of ``transformers.Trainer`` included."""
    names = [name for name in dir(of) if not name.startswith("__")]
    return [name for name in names if callable(getattr(of, name))]


@pytest.mark.parametrize("name", ["__init__", *methods()])
def test_signatures_are_those_of_trl(name: str) -> None:
    """Scripts look arguments up before they pass them: the names, order, kinds and defaults are TRL's."""
    theirs = list(inspect.signature(getattr(trl.GRPOTrainer, name)).parameters.values())
    for trainer in (trl_hooks.GRPOTrainer, GRPOTrainer):
        if name in NOT_HERE or (trainer is GRPOTrainer and name in REFUSED_METHODS):
            continue
        ours = list(inspect.signature(getattr(trainer, name)).parameters.values())
        assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]
        for mine, given in zip(ours, theirs, strict=False):
            assert given.default is given.empty or mine.default == given.default
        further = ours[len(theirs) :]  # named, and optional
        assert all(p.default is not p.empty for p in further) and bool(further) == (name == "__init__")


def recorded(base: type, called: set[str], without: tuple[str, ...] = ()) -> type:
    """A subclass that overrides every method of TRL's trainer, and adds the name of a method when called."""

    def override(name: str) -> Any:
        static = inspect.getattr_static(base, name)
        if isinstance(static, staticmethod):

            def function(*given: Any, **named: Any) -> Any:
                called.add(name)
                return static.__func__(*given, **named)

            return staticmethod(function)

        def method(self: Any, *given: Any, **named: Any) -> Any:
            called.add(name)
            return getattr(super(subclass, self), name)(*given, **named)

        return method

    # A loader of a subclass becomes the source of prompts, which has tests of its own.
    names = set(methods()) - {"get_train_dataloader", *NOT_HERE, *without}
    subclass = type("Recorded", (base,), {name: override(name) for name in names})
    return subclass


@pytest.mark.slow
@pytest.mark.parametrize("library", ["trl_hooks", "plain"])
def test_every_method_of_trl_is_called_or_refused(library: str, policy: Policy, tmp_path: Path) -> None:
    """What TRL calls in training, evaluation or saving, and what its class defines, is called or refused."""
    base, refused = {
        "trl_hooks": (trl_hooks.GRPOTrainer, checks.REFUSED_METHODS),
        "plain": (GRPOTrainer, REFUSED_METHODS),
    }[library]
    options = {
        **COMMON,
        **{"max_steps": 2, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 2},
        **{"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
        **{"load_best_model_at_end": True, "beta": 0.04, "top_entropy_quantile": 0.5},
        "off_policy_mask_threshold": 0.5,
    }
    calls: dict[str, list[set[str]]] = {}
    for name, kind, config in (("theirs", trl.GRPOTrainer, trl.GRPOConfig), ("ours", base, GRPOConfig)):
        called: set[str] = set()
        arguments = {
            "model": policy.load(),
            "reward_funcs": mixed_reward,
            "args": config(output_dir=str(tmp_path / name), **options),
            "train_dataset": Dataset.from_dict({"prompt": [prompt_text(i) for i in range(PROMPTS)]}),
            "processing_class": policy.tokenizer,
        }
        arguments["eval_dataset"] = arguments["train_dataset"].select(range(2))
        without = tuple(refused) if name == "ours" else ()
        trainer = recorded(kind, called, without)(**arguments)
        rows, saved = arguments["eval_dataset"], str(tmp_path / "saved")
        parts = [(trainer.train,), (trainer.evaluate,), (trainer.save_model, saved), (trainer.predict, rows)]
        parts.append((trainer.train, str(tmp_path / name / "checkpoint-1")))
        calls[name] = []
        for part, *given in parts:
            called.clear()
            part(*given)
            calls[name].append(set(called))
    # TRL writes the model card with every checkpoint, ours when it is uploaded or asked for.
    ignored = {"create_model_card", "_send_telemetry", "get_train_dataloader", *NOT_HERE}
    for theirs, ours in zip(calls["theirs"], calls["ours"], strict=True):
        assert theirs - ours - ignored <= set(refused), theirs - ours - ignored - set(refused)
    defined = {name for name in methods() if name in vars(trl.GRPOTrainer)} - ignored
    # Columns are removed with remove_unused_columns only, and never those of rewards.
    assert defined - set.union(*calls["ours"]) - set(refused) == {"_set_signature_columns_if_needed"}


@pytest.mark.parametrize("name", sorted({*REFUSED_METHODS, *UNREAD_ATTRIBUTES}))
def test_names_of_trl_that_do_not_exist_are_errors_on_the_class_too(name: str) -> None:
    """``old = GRPOTrainer._calculate_rewards`` is how scripts replace a hook for all trainers."""
    if not hasattr(Trainer, name):
        with pytest.raises(AttributeError, match=name):
            getattr(GRPOTrainer, name)


@pytest.mark.parametrize("correction", [None, (6, 5), (6, 1)])
def test_helpers_of_the_loss(correction: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    advantages, log_ratio, sampler = torch.randn(6, 1), torch.randn(6, 5), torch.randn(6, 5)
    mask = (torch.arange(5) < torch.tensor([[1], [2], [3], [4], [5], [5]])).long()
    ratio = None if correction is None else torch.rand(correction) + 0.5
    given: list[Any] = [advantages, log_ratio, mask, ratio, 1.5, 2.5, 2.0, 3.0]
    results = [
        (
            kind.get_gamma_weights(*given),
            kind.get_off_policy_mask(advantages, log_ratio, sampler, mask, -1.0),
        )
        for kind in (trl_hooks.GRPOTrainer, trl.GRPOTrainer)
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert 0 < int(results[0][1].sum()) < 6


def test_a_high_entropy_mask(policy: Policy, tmp_path: Path) -> None:
    ours, theirs = (
        setting_trainer.trainer
        for setting_trainer in train_both(policy, Setting({**SPLIT, "max_steps": 1}), tmp_path)
    )
    entropies = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(5) < torch.tensor([[5], [3], [0], [1]])).long()
    for threshold in (0.0, 0.3, 0.8, 1.0):
        expected = theirs.get_high_entropy_mask(entropies, mask, threshold)
        assert torch.equal(ours.get_high_entropy_mask(entropies, mask, threshold), expected)
    assert not ours.get_high_entropy_mask(entropies, 0 * mask, 0.5).any()
