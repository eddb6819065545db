"""Settings and rewards that change between two optimizer steps, or when a run resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.resume_runs import make_trainer
from support.runs import count_reward, policy, prompts, tokenizer, trainer
from transformers import GenerationConfig, LlamaConfig, LlamaForSequenceClassification, TrainerCallback

from groupwise import ConfigError, GRPOTrainer
from groupwise.core.entropy import EntropyControl


class AtStepEnd(TrainerCallback):
    """Call a function at the end of optimizer step ``step``."""

    def __init__(self, step: int, change: Callable[[], Any]) -> None:
        self.step, self.change = step, change

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.change()


class Recording(GRPOTrainer):
    """Keeps micro-batches with their log-probs, and the temperatures that completions were sampled at."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[Any] = []
        self.temperatures: list[float] = []
        generate = self.model.generate

        def recorded(**given: Any) -> torch.Tensor:
            self.temperatures.append(given["generation_config"].temperature)
            return generate(**given)

        self.model.generate = recorded

    def compute_policy_loss(self, batch, logprobs):
        self.batches.append((self.state.global_step + 1, batch, logprobs.logps_BT.detach()))
        return super().compute_policy_loss(batch, logprobs)


def train(run: GRPOTrainer, step: int, change: Callable[[], Any]) -> GRPOTrainer:
    """Train; after optimizer step ``step`` something is changed."""
    run.add_callback(AtStepEnd(step, change))
    run.train()
    return run


def logged(run: GRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


def expected_logps(run: GRPOTrainer, batch: Any, temperature: float) -> torch.Tensor:
    """(B, T) log-softmax of the model's logits, divided by the temperature."""
    ids_BS = torch.cat([batch.prompt_ids_BL, batch.completion_ids_BT], dim=1)
    mask_BS = torch.cat([batch.prompt_mask_BL, batch.completion_mask_BT], dim=1)
    positions_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = run.model(input_ids=ids_BS, attention_mask=mask_BS, position_ids=positions_BS).logits
    start = batch.prompt_ids_BL.shape[1]
    logps = (logits[:, start - 1 : -1] / temperature).log_softmax(-1)
    return logps.gather(-1, batch.completion_ids_BT.unsqueeze(-1)).squeeze(-1)


def assert_logps_at(run: Recording, temperatures: list[float]) -> None:
    """The log-probs of each optimizer step are those of the policy at that step's temperature."""
    steps = sorted({step for step, _, _ in run.batches})
    assert len(steps) == len(temperatures)
    for step, batch, logps_BT in run.batches:
        mask = batch.completion_mask_BT.bool()
        wanted = expected_logps(run, batch, temperatures[step - 1])
        torch.testing.assert_close(logps_BT[mask], wanted[mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("where", ["trainer", "args"])
def test_a_temperature_reaches_sampler_and_log_probs_at_the_next_step(tmp_path, where):
    run = trainer(tmp_path, kind=Recording, max_steps=3, learning_rate=0.0, skip_zero_advantage=False)
    train(run, 1, lambda: setattr(run if where == "trainer" else run.args, "temperature", 0.5))
    assert run.temperatures == [1.0, 0.5, 0.5]
    assert_logps_at(run, [1.0, 0.5, 0.5])
    assert run.args.temperature == 0.5  # the attribute writes through


def test_completions_that_are_left_keep_the_temperature_that_they_were_sampled_at(tmp_path):
    run = trainer(
        tmp_path, kind=Recording, max_steps=4, num_iterations=2, learning_rate=0.0, skip_zero_advantage=False
    )
    train(run, 1, lambda: setattr(run, "temperature", 0.5))
    assert run.temperatures == [1.0, 0.5]
    assert_logps_at(run, [1.0, 1.0, 0.5, 0.5])


def test_further_sampler_settings_reach_the_sampler(tmp_path):
    run = trainer(tmp_path, max_steps=1)
    run.top_p, run.top_k, run.min_p, run.repetition_penalty = 0.9, 5, 0.01, 1.1
    used = []
    generate = run.model.generate
    run.model.generate = lambda **given: used.append(given["generation_config"]) or generate(**given)
    run.train()
    (config,) = used
    assert (config.top_p, config.top_k, config.min_p, config.repetition_penalty) == (0.9, 5, 0.01, 1.1)


def test_minus_one_turns_top_k_off_as_in_a_configuration(tmp_path):
    run = trainer(tmp_path, top_k=5)
    run.top_k = -1
    assert run.top_k == 0
    run.refresh_settings()
    assert run.args.top_k == 0 and run.make_request([]).generation_kwargs["top_k"] == 0
    with pytest.raises(ConfigError, match=r"trainer\.top_k=-2 is out of range"):
        run.top_k = -2


def test_an_assigned_entropy_coefficient_keeps_the_measured_entropy(tmp_path):
    """Otherwise a schedule in every step would turn the adaptive bonus off."""
    run = trainer(tmp_path, use_adaptive_entropy=True, entropy_coef=0.1)
    run.entropy_control = EntropyControl(0.15, entropy=0.1)
    run.entropy_coef = 0.3
    run.refresh_settings()
    assert run.entropy_control == EntropyControl(0.3, entropy=0.1)


def test_the_number_of_iterations_changes_with_the_next_generation(tmp_path):
    run = trainer(tmp_path, kind=Recording, max_steps=5)
    train(run, 1, lambda: setattr(run, "num_iterations", 2))
    assert len(run.temperatures) == 3  # step 1, steps 2 and 3, steps 4 and 5
    batches = [batch for _, batch, _ in run.batches]
    assert torch.equal(batches[1].completion_ids_BT, batches[2].completion_ids_BT)
    assert not batches[2].old_logps_BT.isnan().all()  # the policy has changed since they were sampled


def test_a_weight_of_the_kl_counts_from_the_next_step(tmp_path):
    run = trainer(tmp_path, max_steps=3, beta=0.5)
    used = []
    original = run.compute_policy_loss
    run.compute_policy_loss = lambda *given: used.append(run.objective_settings.beta) or original(*given)
    train(run, 1, lambda: setattr(run, "beta", 0.0))
    assert used == [0.5, 0.0, 0.0]
    assert [value > 1e-6 for value in logged(run, "kl")] == [False, True, True]  # the reference is kept


def test_beta_cannot_rise_without_a_reference(tmp_path):
    run = trainer(tmp_path)
    run.beta = 0.1
    for _ in range(2):  # it stays an error
        with pytest.raises(ConfigError, match=r"beta=0.1 needs a reference model, .* GRPOConfig\(beta=…\)"):
            run.train()


def test_a_reference_that_is_assigned_is_used(tmp_path):
    run = trainer(tmp_path, max_steps=1, model=policy(0))
    other = policy(1)
    run.ref_model, run.beta = other, 0.1
    run.train()
    assert run.ref_model is other and not any(p.requires_grad for p in other.parameters())
    assert logged(run, "kl")[0] > 1e-3  # the policy's own start would give 0


def even(completion_ids, **_):
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def length(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def test_assigned_rewards_replace_the_old_ones_with_their_names(tmp_path):
    calls = []

    def old(completion_ids, **_):
        calls.append(len(completion_ids))
        return [100.0] * len(completion_ids)

    run = trainer(tmp_path, old, max_steps=3)

    def change():
        run.reward_funcs = [even, length]
        run.reward_func_names = ["is even", "size"]
        run.reward_weights = torch.tensor([0.0, 2.0])

    train(run, 1, change)
    assert len(calls) == 1
    first, second, third = (entry for entry in run.state.log_history if "reward" in entry)
    assert first["rewards/old/mean"] == first["reward"] == 100.0
    for entry in (second, third):
        assert "rewards/old/mean" not in entry and 0 <= entry["rewards/is even/mean"] <= 1
        assert entry["reward"] == pytest.approx(2 * entry["rewards/size/mean"])
        assert entry["rewards/size/mean"] == pytest.approx(entry["completions/mean_length"])


def test_names_follow_assigned_rewards_and_lists_may_change_in_place(tmp_path):
    run = trainer(tmp_path, [even, length], max_steps=3, reward_weights=[0.25, 0.3])
    train(run, 1, lambda: run.reward_funcs.__setitem__(0, count_reward))
    names = ["rewards/even/mean", "rewards/count_reward/mean", "rewards/length/mean"]
    assert [[name in entry for name in names] for entry in run.state.log_history[:3]] == [
        [True, False, True], [False, True, True], [False, True, True],
    ]  # fmt: skip
    last = run.state.log_history[2]
    assert last["reward"] == pytest.approx(0.25 * last[names[1]] + 0.3 * last[names[2]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward_weights": torch.ones(3)}, "reward_weights has 3 entries for 2 reward functions"),
        ({"reward_func_names": ["one"]}, "reward_func_names has 1 entries for 2 reward functions"),
        ({"reward_funcs": []}, "reward_funcs is empty"),
        ({"reward_funcs": [even, 3]}, "reward_funcs holds 3 (int)"),
        ({"reward_funcs": even}, "reward_weights has 2 entries for 1 reward functions"),
    ],
)
def test_rewards_that_do_not_fit_together_are_refused_at_the_next_step(tmp_path, change, said):
    run = trainer(tmp_path, [even, length], reward_weights=[1.0, 2.0])
    for name, value in change.items():
        setattr(run, name, value)
    with pytest.raises(ConfigError) as error:
        run.train()
    assert said in str(error.value)


def test_weights_of_the_configuration_may_change(tmp_path):
    run = trainer(tmp_path, [even, length], max_steps=2, reward_weights=[1.0, 0.0])
    train(run, 1, lambda: setattr(run.args, "reward_weights", [0.0, 3.0]))
    first, second = (entry for entry in run.state.log_history if "reward" in entry)
    assert first["reward"] == pytest.approx(first["rewards/even/mean"])
    assert second["reward"] == pytest.approx(3 * second["rewards/length/mean"])
    assert run.reward_weights.tolist() == [0.0, 3.0]


def test_a_reward_model_is_loaded_when_it_is_assigned_and_kept_otherwise(tmp_path):
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "pad_token_id": 0, "num_labels": 1}
    model = LlamaForSequenceClassification(LlamaConfig(**shape, **heads))
    run = trainer(tmp_path, [even], max_steps=3)
    run.reward_funcs = [model, even]
    run.reward_processing_classes = [tokenizer(), None]
    run.refresh_settings()
    scorer = run.reward_callables[0]
    train(run, 1, lambda: setattr(run, "reward_weights", [1.0, 5.0]))
    assert run.reward_callables[0] is scorer and run.reward_callables[1] is even
    assert all(f"rewards/{run.reward_func_names[0]}/mean" in entry for entry in run.state.log_history[:3])


def test_evaluation_uses_the_newest_settings(tmp_path):
    sizes = []

    def size(completion_ids, **_):
        sizes.append(len(completion_ids))
        return [float(len(ids)) for ids in completion_ids]

    run = trainer(
        tmp_path, size, eval_dataset=prompts(2), per_device_eval_batch_size=8, eval_pass_at_k=[1],
    )  # fmt: skip
    run.evaluate()
    run.num_generations_eval, run.args.eval_pass_at_k = 2, [2]
    metrics = run.evaluate()
    assert sizes == [8, 4] and "eval_pass@2" in metrics and "eval_pass@1" not in metrics


def test_the_entropy_bonus_can_be_scheduled(tmp_path):
    run = trainer(tmp_path, max_steps=3, entropy_coef=0.1)
    assert run.entropy_coef == 0.1

    def change():
        run.entropy_coef = 0.3
        assert run.entropy_coef == 0.3 and run.entropy_control.coef == 0.1

    train(run, 1, change)
    assert logged(run, "entropy_coef") == pytest.approx([0.1, 0.3, 0.3])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_generations", 2),
        ("max_completion_length", 5),
        ("use_vllm", True),
        ("vllm_mode", "server"),
        ("shuffle_dataset", False),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("pad_to_multiple_of", 8),
        ("tools", [len]),
        ("aux_loss_enabled", True),
    ],
)
def test_what_cannot_change_is_refused_at_the_assignment(tmp_path, name, value):
    run = trainer(tmp_path)
    before = getattr(run, name)
    with pytest.raises(ConfigError, match=rf"trainer.{name}.*is read when the trainer is built"):
        setattr(run, name, value)
    assert getattr(run, name) == before


def test_a_generation_config_is_refused_at_the_assignment(tmp_path):
    run = trainer(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.generation_config is not read.*trainer\.temperature"):
        run.generation_config = GenerationConfig(temperature=0.5)
    assert not hasattr(run, "generation_config")


def test_another_training_set_is_refused_when_training_starts(tmp_path):
    """The prompts would be those of the first set, with the length of the second."""
    run = trainer(tmp_path)
    run.train_dataset = prompts(4)
    with pytest.raises(ConfigError, match=r"trainer\.train_dataset was replaced"):
        run.train()


def test_a_fixed_setting_changed_through_the_configuration_is_reported_and_not_used(tmp_path, caplog):
    run = trainer(tmp_path, max_steps=2)
    with caplog.at_level(logging.WARNING):
        train(run, 1, lambda: setattr(run.args, "num_generations", 2))
    assert (
        caplog.text.count("args.num_generations=2 has no effect: it is read when the trainer is built") == 1
    )
    assert logged(run, "frac_reward_zero_std")[1] in (0.0, 1.0)  # one group of four, not two of two
    assert run.args.num_generations == 4  # the configuration describes the run


def test_trainers_of_one_configuration_see_each_change(tmp_path):
    first = trainer(tmp_path)
    args = first.args
    args.num_generations = 2  # a script reuses the configuration
    second = GRPOTrainer(policy(), count_reward, args, prompts(4), processing_class=tokenizer())
    args.reward_weights, args.entropy_coef = [3.0], 0.5
    for run, size in ((second, 2), (first, 4)):
        run.refresh_settings()
        assert run.reward_weights.tolist() == [3.0] and run.entropy_control.coef == 0.5
        assert run.num_generations == size


# A run that resumes with other settings.

RUN = {"max_steps": 4, "save_steps": 2, "entropy_coef": 0.25, "learning_rate": 0.01}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}


class Groups(TrainerCallback):
    """Keeps settings of the optimizer, and the gradient norm after clipping, of every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer, model, **_):
        (group, _), norms = optimizer.param_groups, [p.grad.norm() for p in model.parameters()]
        norm = torch.stack(norms).norm().item()
        self.steps.append((group["lr"], group["betas"], group["eps"], group["weight_decay"], norm))


def resumed(directory, **changes: Any) -> tuple[GRPOTrainer, list[tuple[Any, ...]]]:
    run, groups = make_trainer(directory, **{**RUN, "save_strategy": "no", **changes}), Groups()
    run.add_callback(groups)
    run.train(resume_from_checkpoint=str(directory / "checkpoint-2"))
    return run, groups.steps


@pytest.mark.slow
def test_a_resumed_run_says_which_changed_settings_act(tmp_path, caplog):
    make_trainer(tmp_path, **RUN).train()
    resumed(tmp_path, max_grad_norm=1e-3)
    assert "resumed with" not in caplog.text  # it acts at once
    run, steps = resumed(
        tmp_path,
        learning_rate=0.1,
        weight_decay=0.5,
        adam_beta1=0.5,
        adam_epsilon=1e-3,
        optim="adamw_torch",
        lr_scheduler_type="constant",
        max_steps=5,
        logging_steps=2,
        max_grad_norm=1e-3,
        entropy_coef=0.5,
    )
    # linear to 0 in four steps: 0.005 was saved for the third; constant at the initial 0.01 after it
    assert [lr for lr, *_ in steps] == [0.005, 0.01, 0.01]
    assert {tuple(kept) for _, *kept, _ in steps} == {((0.9, 0.999), 1e-8, 0.0)}
    assert run.optimizer.param_groups[0]["fused"]
    assert max(norm for *_, norm in steps) < 1.01e-3
    assert [line["step"] for line in run.state.log_history if "loss" in line] == [1, 2, 3, 4, 5]
    assert logged(run, "entropy_coef") == [0.25, 0.25, 0.5, 0.5, 0.5]
    for words in (
        "resumed with learning_rate=0.1 (was 0.01), ",
        "optim=adamw_torch (was adamw_torch_fused), weight_decay=0.5 (was 0.0), adam_beta1=0.5 (was 0.9), "
        "adam_epsilon=0.001 (was 1e-08), which has no effect",
        "resumed with max_steps=5 (was 4), lr_scheduler_type=constant (was linear), which changes the "
        "learning rates from the second step on",
        "resumed with logging_steps=2 (was 1), which has no effect",
    ):
        assert words in caplog.text
    assert caplog.text.count("resumed with") == 3
    with pytest.raises(
        ConfigError, match=r"state of torch\.AdamW .* torch\.SGD and torch.LambdaLR cannot load"
    ):
        resumed(tmp_path, optim="sgd")


@pytest.mark.slow
def test_a_schedule_with_a_state_is_neither_changed_nor_replaced_on_resume(tmp_path, caplog):
    make_trainer(tmp_path, **RUN, **PLATEAU, lr_scheduler_kwargs={"factor": 0.5}).train()
    run, _ = resumed(tmp_path, **PLATEAU, lr_scheduler_kwargs={"factor": 0.25}, max_steps=3)
    assert run.lr_scheduler.factor == 0.5
    assert "lr_scheduler_kwargs={'factor': 0.25} (was {'factor': 0.5}), which has no effect" in caplog.text
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("groupwise")]
    assert not any("max_steps" in message for message in ours)  # the schedule does not depend on it
    with pytest.raises(ConfigError, match=r"torch\.ReduceLROnPlateau, which .* torch\.LambdaLR cannot load"):
        resumed(tmp_path, lr_scheduler_type="linear")
