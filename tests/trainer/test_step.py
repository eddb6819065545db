"""One step through the real trainer: generation, reuse of a generation, windows, evaluation, logging.

Files: ``data/window.py``, ``trainer.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from support.runs import (
    WORDS,
    chats,
    count_reward,
    experience,
    generate,
    policy,
    prompts,
    tokenizer,
    trainer,
    weighed,
)
from transformers import TrainerCallback

from groupwise import Completion, ConfigError, GRPOTrainer, LossOutput, register_advantage, register_objective
from groupwise.core.surrogates import clipped
from groupwise.records import SamplingOptions


def fixed_rollout(logprobs=None, masks=None):
    """A rollout function whose completions follow from the prompt and a counter."""
    counter = itertools.count()

    def rollout(prompts_given, run):
        ids = tokenizer()(list(prompts_given))["input_ids"]
        completions = [
            [4 + (7 * next(counter) + j) % 28 for j in range(1 + i % 5)] + [1] for i in range(len(ids))
        ]
        output = {"prompt_ids": ids, "completion_ids": completions}
        if logprobs is not None:
            output["logprobs"] = [[logprobs] * len(tokens) for tokens in completions]
        if masks is not None:
            output["env_mask"] = [[masks(j) for j in range(len(tokens))] for tokens in completions]
        return output

    return rollout


def weights(run):
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


def test_completions_end_at_any_end_token_of_the_model(tmp_path):
    model = policy()
    model.generation_config.eos_token_id = [1, 7]
    run = trainer(tmp_path, model=model, max_completion_length=64)
    completions = run.backend.generate([[4, 5], [4, 5, 6], [9], [10]] * 4)
    assert run.backend.end_tokens == {1, 7}
    ended = [completion for completion in completions if not completion.truncated]
    assert ended and any(completion.token_ids[-1] == 7 for completion in ended)
    assert all(not {1, 7} & set(completion.token_ids[:-1]) for completion in completions)
    assert all(len(c.token_ids) == 64 and not {1, 7} & set(c.token_ids) for c in completions if c.truncated)


def test_sampling_settings_reach_the_sampler(tmp_path):
    run = trainer(
        tmp_path, temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, repetition_penalty=1.1,
        generation_kwargs={"no_repeat_ngram_size": 2},
    )  # fmt: skip
    sampler = run.backend.config_of(SamplingOptions())
    assert (sampler.temperature, sampler.top_p, sampler.top_k) == (0.7, 0.9, 5)
    assert (sampler.min_p, sampler.repetition_penalty, sampler.no_repeat_ngram_size) == (0.01, 1.1, 2)
    assert sampler.do_sample and sampler.max_new_tokens == 6


MODEL_SETTINGS = {
    "min_p": 0.5,
    "typical_p": 0.3,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": list(range(2, 20)),
    "bad_words_ids": [[token] for token in range(20, 30)],
    "forced_eos_token_id": 1,
    "num_beams": 3,
    "num_return_sequences": 2,
    "return_dict_in_generate": True,
    "prompt_lookup_num_tokens": 2,
}


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules=["q_proj"])])
@pytest.mark.parametrize("loop", [{}, {"use_cache": False}])  # ours, and that of generate
def test_settings_of_the_models_generation_config_are_reported_and_not_used(tmp_path, caplog, loop, adapter):
    def sampled(settings):
        model = policy()
        model.generation_config.update(**settings)
        run = trainer(tmp_path, model=model, generation_kwargs=loop, peft_config=adapter)
        before = model.generation_config.to_dict()  # without values that could not be saved
        torch.manual_seed(0)
        completions = run.backend.generate([[4, 5], [4, 5], [6]])
        assert model.generation_config.to_dict() == before
        return [completion.token_ids for completion in completions]

    plain = sampled({})
    assert "generation config" not in caplog.text
    assert sampled(MODEL_SETTINGS) == plain
    assert caplog.text.count("settings of the model's generation config are not used") == 1
    assert all(f"'{name}': {str(value)[:6]}" in caplog.text for name, value in MODEL_SETTINGS.items())


def test_settings_of_the_models_generation_config_apply_if_the_run_sets_them(tmp_path, caplog):
    model = policy()
    given = {"do_sample": True, "min_p": 0.5, "typical_p": 1.0}
    model.generation_config.update(suppress_tokens=list(range(2, 20)), **given)
    run = trainer(tmp_path, model=model, min_p=0.01, generation_kwargs={"suppress_tokens": [5, 6]})
    assert "generation config" not in caplog.text
    completions = run.backend.generate([[4, 5], [6]] * 20)
    seen = {token for completion in completions for token in completion.token_ids}
    assert not seen & {5, 6} and seen & set(range(7, 20))


def test_generation_kwargs_that_generate_would_ignore_are_refused(tmp_path):
    message = r"generation_kwargs\['temprature'\] is unknown to transformers; nearest valid: 'temperature'"
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, generation_kwargs={"temprature": 0.5})


@pytest.mark.parametrize(
    ("given", "decoder"),
    [
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation"),
        ({"assistant_early_exit": 1, "do_sample": False}, "assisted_generation"),
        ({"dola_layers": "low"}, "dola_generation"),
        ({"force_words_ids": [[3]], "num_beams": 2}, "constrained_beam_search"),
        ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": False}, "contrastive_search"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "group_beam_search"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_decoders_that_do_not_continue_each_row_are_refused(tmp_path, given, decoder):
    with pytest.raises(
        ConfigError, match=rf"{next(iter(given))}.* selects {decoder}, .*; allowed: sample, greedy"
    ):
        trainer(tmp_path, generation_kwargs=given)


def test_a_value_that_transformers_refuses_is_named_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"generation_kwargs=\{'compile_config': .* must be an instance of"):
        trainer(tmp_path, model="no/model", generation_kwargs={"compile_config": {"backend": "inductor"}})


def test_beams_train_with_the_loop_of_transformers(tmp_path, caplog):
    """Settings of a test of TRL. The samples of a row depend on its own seed alone."""
    beams = {"do_sample": True, "top_k": 50, "num_beams": 2, "length_penalty": -0.1}
    run = trainer(tmp_path, generation_kwargs=beams, max_steps=2)
    (path, *_) = run.fast_paths()
    assert str(path) == "decoding: transformers (num_beams, length_penalty may act on several rows)"
    assert "TransformersBackend does not report the sampling mask" in caplog.text
    together = run.backend.generate([[4, 5], [8, 9], [4, 5]], SamplingOptions(seeds=[5, 6, 7]))
    (alone,) = run.backend.generate([[8, 9]], SamplingOptions(seeds=[6]))
    assert together[1] == alone and together[0] != together[2]
    start = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.train()
    assert any(not torch.equal(a, b) for a, b in zip(start, run.model.parameters(), strict=True))


def test_sampler_settings_that_log_probs_do_not_have_are_reported(tmp_path, caplog):
    trainer(tmp_path, top_k=5, generation_kwargs={"suppress_tokens": [5]})  # recorded with the sampling mask
    assert "biases the importance ratio" not in caplog.text
    kwargs = {"suppress_tokens": [5], "num_beams": 2, "min_length": 0}
    trainer(tmp_path, repetition_penalty=1.2, generation_kwargs=kwargs)
    found = {"num_beams": 2, "repetition_penalty": 1.2, "suppress_tokens": [5]}
    assert f"sampled with {found}, but log-probs are those of the distribution without" in caplog.text


def test_sampled_frequencies_are_those_of_the_computed_log_probs(tmp_path):
    """The log-probs of the trainer are the distribution the completions were drawn from (chi-square test)."""
    run = trainer(tmp_path, max_completion_length=1, temperature=2.0, model=policy(initializer_range=0.6))
    rollout = generate(run, [{"prompt": "w3 w4"}] * 4000)
    counts = torch.zeros(32)
    for completion in rollout.completions:
        counts[completion.token_ids[0]] += 1
    every_token = [Completion([token]) for token in range(32)]
    batch = run.collate(
        dataclasses.replace(rollout, prompt_ids=rollout.prompt_ids[:32], completions=every_token)
    )
    with torch.no_grad():
        expected = 4000 * run.compute_logprobs(run.model, batch).logps_BT[:, 0].exp()
    assert expected.sum().item() == pytest.approx(4000, rel=1e-4)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    # 31 degrees of freedom: 99.9 % of correct samplers stay below 61.1; the seed is fixed.
    assert chi_square < 61.1


def test_log_probs_equal_the_models_log_softmax_for_any_padding(tmp_path):
    run = trainer(tmp_path, temperature=0.7)
    rollout = generate(run, [{"prompt": text} for text in ["w1", "w2 w3 w4 w5", "w6 w7"]] * 2)
    batch = run.collate(rollout)
    with torch.no_grad():
        scores = run.compute_logprobs(run.model, batch, with_entropy=True)
        for row, completion in enumerate(rollout.completions):
            ids = torch.tensor([rollout.prompt_ids[row] + completion.token_ids])
            start = len(rollout.prompt_ids[row]) - 1
            logps = torch.log_softmax(run.model(ids).logits[0, start:-1] / 0.7, -1)
            mine = scores.logps_BT[row, : len(completion.token_ids)]
            torch.testing.assert_close(
                mine, logps.gather(1, ids[0, start + 1 :, None])[:, 0], atol=1e-5, rtol=0
            )
            entropy = -(logps.exp() * logps).sum(-1)
            torch.testing.assert_close(scores.entropy_BT[row, : len(entropy)], entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("steps_per_generation", "accumulation", "iterations", "generations"),
    [(1, 1, 1, 4), (4, 1, 1, 1), (2, 1, 2, 1), (2, 2, 1, 4), (4, 2, 1, 2), (1, 2, 2, 4)],
)
def test_a_generation_is_used_as_often_as_configured(
    tmp_path, steps_per_generation, accumulation, iterations, generations
):
    """Four optimizer steps take 4·accumulation micro-batches; a generation gives steps·iterations of them."""
    calls = []

    run = trainer(
        tmp_path,
        max_steps=4,
        steps_per_generation=steps_per_generation,
        gradient_accumulation_steps=accumulation,
        num_iterations=iterations,
    )
    generate = run.generate_rollouts
    run.generate_rollouts = lambda request: calls.append(len(request.rows)) or generate(request)
    run.train()
    assert calls == [4 * steps_per_generation] * generations
    uses = steps_per_generation * iterations
    assert run.args.trains_on_policy is (accumulation % uses == 0)


def test_old_log_probs_are_kept_only_off_policy(tmp_path):
    rows = [{"prompt": "w1", "row": 0}] * 4
    assert experience(trainer(tmp_path), rows)[0].old_logps_BT.isnan().all()
    assert not experience(trainer(tmp_path, num_iterations=2), rows)[0].old_logps_BT.isnan().any()


class Windows(GRPOTrainer):
    """Keeps old log-probs and micro-batches of every window; generations have their own step."""

    def set_token_weights(self, window, *args, **kwargs):
        if self.model.training:
            self.__dict__.setdefault("windows", []).append(window)
        return super().set_token_weights(window, *args, **kwargs)


@pytest.mark.slow
def test_a_generation_that_two_windows_share_after_resuming_is_off_policy_in_the_second(tmp_path):
    # Two micro-batches a generation. Saved after one of them, the run goes on with windows of two: each takes
    # the rest of one generation and the beginning of the next.
    given = {"steps_per_generation": 2, "save_steps": 1, "kind": Windows, "learning_rate": 0.1}
    first = trainer(tmp_path, save_strategy="steps", max_steps=1, **given)
    first.train()
    run = trainer(tmp_path, gradient_accumulation_steps=2, max_steps=3, **given)
    run.train(resume_from_checkpoint=True)
    assert [len(window) for window in run.windows] == [2, 2]
    for window in run.windows:
        trained = [batch.loss_mask_BT.bool() & (batch.advantages_BX != 0) for batch in window]
        assert all(mask.any() for mask in trained)
        pairs = zip(window, trained, strict=True)
        assert torch.cat([batch.old_logps_BT[mask] for batch, mask in pairs]).isfinite().all()
    # The second half of the generation that the first window began.
    began, continued = run.windows[0][1], run.windows[1][0]
    assert began.group_ids_B.max() < continued.group_ids_B.min() <= began.group_ids_B.max() + 1
    with torch.no_grad():
        current = run.compute_logprobs(run.model, continued).logps_BT
    assert (current - continued.old_logps_BT)[trained[0]].abs().max() > 1e-3


class TokenWise(GRPOTrainer):
    """The same advantages, one per token in every other generation."""

    def compute_advantages(self, rewards):
        advantages = super().compute_advantages(rewards)
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        return advantages[:, None].expand(-1, 7) if self.calls % 2 == 0 else advantages


@pytest.mark.slow
@pytest.mark.parametrize("skip", [True, False])
def test_a_window_of_outcome_and_token_wise_advantages_trains_on_every_token(tmp_path, skip):
    def run(kind, sampler):
        lengths = itertools.cycle([6, 3])  # the second generation is shorter than the first

        def rollout(prompts_given, run):
            ids, length = tokenizer()(list(prompts_given))["input_ids"], next(lengths)
            completions = [[4 + (7 * i + j + length) % 28 for j in range(length)] for i in range(len(ids))]
            output = {"prompt_ids": ids, "completion_ids": completions}
            if sampler and length == 3:  # reported by every other generation
                output["logprobs"] = [[-3.0] * length for _ in ids]
            return output

        made = trainer(
            tmp_path, kind=kind, rollout_func=rollout, steps_per_generation=1, gradient_accumulation_steps=2,
            skip_zero_advantage=skip,
        )  # fmt: skip
        made.train()
        return weights(made)

    outcome = run(GRPOTrainer, sampler=False)
    assert (outcome - torch.cat([p.detach().flatten() for p in policy().parameters()])).abs().max() > 1e-3
    assert torch.equal(run(TokenWise, sampler=False), outcome)
    assert torch.equal(run(TokenWise, sampler=True), outcome)


@pytest.mark.parametrize("skip", [True, False])
def test_equal_rewards_move_no_weight(tmp_path, skip):
    def equal(completion_ids, **_):  # the float32 mean of the seven is 1000.2999
        return [1000.3] * len(completion_ids)

    run = trainer(
        tmp_path, equal, per_device_train_batch_size=7, num_generations=7, skip_zero_advantage=skip
    )  # AdamW: a gradient of any size is a step of the learning rate
    run.train()
    assert torch.equal(weights(run), torch.cat([p.detach().flatten() for p in policy().parameters()]))
    assert [log["frac_reward_zero_std"] for log in run.state.log_history if "loss" in log] == [1.0, 1.0]
    assert [log["reward_std"] for log in run.state.log_history if "loss" in log] == [0.0, 0.0]


def test_a_column_of_advantages_is_one_for_each_completion(tmp_path):
    class Column(GRPOTrainer):
        def compute_advantages(self, rewards):
            return super().compute_advantages(rewards)[:, None]

    trained = []
    for kind in (GRPOTrainer, Column):
        run = trainer(tmp_path, kind=kind, max_steps=1)
        run.train()
        trained.append(weights(run))
    assert torch.equal(*trained)


@pytest.mark.parametrize(("rows", "columns"), [(4, 2), (3, 6), (3, 1)])
def test_advantages_of_another_shape_are_refused(tmp_path, rows, columns):
    class Wrong(GRPOTrainer):
        def compute_advantages(self, rewards):
            return super().compute_advantages(rewards)[:rows, None].expand(-1, columns)

    run = trainer(tmp_path, kind=Wrong)
    with pytest.raises(
        ConfigError, match=rf"shape \({rows}, {columns}\); allowed: \(4,\), one .* or \(4, 6\)"
    ):
        run.train()


@pytest.mark.slow
def test_every_prompt_of_an_epoch_is_seen_once_in_groups(tmp_path):
    seen = []

    def reward(row, **_):
        seen.append(row)
        return [0.0] * len(row)

    run = trainer(tmp_path, reward, max_steps=-1, num_train_epochs=2, per_device_train_batch_size=8)
    run.train()
    groups = [batch[start] for batch in seen for start in (0, 4)]
    assert all(batch[:4] == batch[:1] * 4 and batch[4:] == batch[4:5] * 4 for batch in seen)
    assert sorted(groups[:8]) == sorted(groups[8:]) == list(range(8))
    assert groups[:8] != groups[8:]  # every epoch has an order of its own


def test_unshuffled_data_keep_their_order(tmp_path):
    seen = []

    def reward(row, **_):
        seen.extend(row[::4])
        return [0.0] * len(row)

    trainer(tmp_path, reward, max_steps=3, shuffle_dataset=False).train()
    assert seen == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_the_split_into_micro_batches_does_not_change_the_update(tmp_path, loss_type):
    """8 completions in one, two or four micro-batches: the same parameters after an SGD step."""
    after = []
    for accumulation in (1, 2, 4):
        model = policy()
        run = trainer(
            tmp_path,
            model=model,
            loss_type=loss_type,
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            rollout_func=fixed_rollout(),
            optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None),
            max_steps=1,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            epsilon_high=2.0,
        )
        run.train()
        after.append(weights(run))
    assert (after[0] - torch.cat([p.detach().flatten() for p in policy().parameters()])).abs().max() > 1e-3
    torch.testing.assert_close(after[1], after[0], atol=2e-6, rtol=0)
    torch.testing.assert_close(after[2], after[0], atol=2e-6, rtol=0)


def test_tokens_of_the_environment_carry_no_loss(tmp_path):
    """Masking all but the first token leaves a gradient that only depends on first tokens."""
    run = trainer(tmp_path, rollout_func=fixed_rollout(masks=lambda j: int(j == 0)))
    (batch,) = experience(run, [{"prompt": "w1", "row": 0}] * 4)
    assert batch.loss_mask_BT.sum(-1).tolist() == [1, 1, 1, 1]
    assert batch.completion_mask_BT.sum(-1).tolist() == [2, 3, 4, 5]
    (micro_batch,) = weighed(run, [batch])
    assert micro_batch.token_weights_BT.sum().item() == pytest.approx(1.0)
    assert micro_batch.token_weights_BT[:, 1:].abs().sum().item() == 0


def test_truncated_completions_can_be_left_out(tmp_path):
    run = trainer(tmp_path, mask_truncated_completions=True)
    rollout = generate(run, [{"prompt": "w1"}] * 4)
    cut = dataclasses.replace(
        rollout, completions=[Completion([5, 6], truncated=True), *rollout.completions[1:]]
    )
    assert run.collate(cut).loss_mask_BT[0].sum().item() == 0
    assert run.collate(cut).completion_mask_BT[0].sum().item() == 2


@pytest.mark.slow
def test_log_probs_of_a_rollout_func_are_logged_and_corrected_for_only_if_asked(tmp_path, caplog):
    """Log-probs of 0 from the sampler mean ratios far below 1; the mask mode removes nothing below its
    maximum."""
    placeholders = fixed_rollout(logprobs=0.0)
    run = trainer(tmp_path, rollout_func=placeholders, rollout_func_importance_sampling_correction=True)
    run.train()
    log = run.state.log_history[0]
    assert log["sampling/sampling_logp_difference/max"] > 1
    assert 0 < log["sampling/importance_sampling_ratio/mean"] < 1
    assert "rollout_func_importance_sampling_correction" not in caplog.text

    without = trainer(tmp_path, rollout_func=fixed_rollout())
    without.train()
    assert not torch.equal(weights(run), weights(without))
    logged_only = trainer(tmp_path, rollout_func=fixed_rollout(logprobs=0.0))
    logged_only.train()
    assert torch.equal(weights(logged_only), weights(without))
    log = logged_only.state.log_history[0]
    assert log["sampling/sampling_logp_difference/max"] > 1
    assert "sampling/importance_sampling_ratio/mean" not in log


def test_the_correction_of_a_rollout_func_says_that_it_has_no_effect_without_one(tmp_path, caplog):
    trainer(tmp_path, rollout_func_importance_sampling_correction=True)
    assert "has no effect without a rollout_func" in caplog.text


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({}, "no prompt_ids and no completion_ids"),
        ({"prompt_ids": [[1]], "completion_ids": [[1]]}, "1 entries for 'prompt_ids'"),
        (
            {"prompt_ids": [[4]] * 4, "completion_ids": [[4, 5]] * 4, "logprobs": [[0.0]] * 4},
            "'logprobs' holds 1 values; allowed: 2, one per token",
        ),
    ],
    ids=["nothing", "lengths", "logprobs"],
)
def test_rollout_functions_are_checked(tmp_path, returned, said):
    run = trainer(tmp_path, rollout_func=lambda prompts, run: returned)
    with pytest.raises(RuntimeError, match=said):
        generate(run, [{"prompt": "w1"}] * 4)


def test_extra_columns_of_a_rollout_function_reach_the_rewards(tmp_path):
    inner = fixed_rollout()
    seen = {}

    def reward(note, **_):
        seen["note"] = note
        return [0.0] * len(note)

    def rollout(prompts, run):
        return {**inner(prompts, run), "note": [f"n{i}" for i in range(len(prompts))]}

    trainer(tmp_path, reward, rollout_func=rollout, max_steps=1).train()
    assert seen["note"] == ["n0", "n1", "n2", "n3"]


def test_evaluation_returns_what_it_logs(tmp_path):
    run = trainer(tmp_path, eval_dataset=prompts(6), num_generations_eval=2, per_device_eval_batch_size=4)
    metrics = run.evaluate()
    assert {"eval_reward", "eval_rewards/count_reward/mean", "eval_loss", "eval_entropy"} <= set(metrics)
    logged = run.state.log_history[-1]
    assert logged["eval_reward"] == metrics["eval_reward"]


def test_evaluation_counts_every_row_once(tmp_path):
    """Five prompts twice each in batches of four: the last batch is short, and the mean is over ten rows."""
    seen = []

    def reward(row, **_):
        seen.extend(row)
        return [float(r) for r in row]

    run = trainer(
        tmp_path, reward, eval_dataset=prompts(5), num_generations_eval=2, per_device_eval_batch_size=4
    )
    metrics = run.evaluate()
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    # batch means (0+0+1+1)/4, (2+2+3+3)/4 and (4+4)/2, weighted by their sizes: 20/10
    assert metrics["eval_rewards/reward/mean"] == pytest.approx(2.0)


@pytest.mark.slow
def test_evaluation_sets_by_name_and_the_best_model(tmp_path):
    run = trainer(
        tmp_path,
        eval_dataset={"easy": prompts(4), "hard": prompts(4)},
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_easy_reward",
        per_device_eval_batch_size=8,
    )
    run.train()
    assert run.state.best_metric is not None
    assert run.state.best_model_checkpoint.startswith(str(tmp_path / "checkpoint-"))
    assert any("eval_hard_reward" in entry for entry in run.state.log_history)


@pytest.mark.parametrize("metric", ["reward", "eval_reward", "eval_easiest_reward"])
def test_a_best_metric_of_no_evaluation_set_is_refused_at_once(tmp_path, metric):
    given = {"eval_dataset": {"easy": prompts(4), "hard": prompts(4)}, "metric_for_best_model": metric}
    named = metric.removeprefix("eval_")
    with pytest.raises(ConfigError, match=f"none of the evaluation sets 'easy', 'hard'.*use 'easy_{named}'"):
        trainer(tmp_path, **given, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8)
    trainer(tmp_path, **given)  # nothing is evaluated, and nothing looked for


def test_logs_are_json_and_hold_the_metrics_of_the_contract(tmp_path):
    run = trainer(tmp_path, beta=0.1, entropy_coef=0.01, num_iterations=2, max_steps=4)
    run.train()
    log = run.state.log_history[1]
    json.dumps(log, allow_nan=False)
    expected = """num_tokens step_time completions/mean_length completions/min_length completions/max_length
        completions/clipped_ratio rewards/count_reward/mean rewards/count_reward/std reward reward_std
        frac_reward_zero_std entropy kl clip_ratio/low_mean clip_ratio/low_min clip_ratio/high_mean
        clip_ratio/high_max clip_ratio/region_mean policy_loss entropy_coef loss grad_norm learning_rate"""
    # the second log falls into the reuse of a generation: what was generated is in the first
    everything = {**run.state.log_history[0], **log}
    assert set(expected.split()) <= set(everything)
    assert all(math.isfinite(value) for value in everything.values())


def test_num_tokens_is_a_running_total(tmp_path):
    run = trainer(tmp_path, rollout_func=fixed_rollout(), max_steps=2, shuffle_dataset=False)
    run.train()
    totals = [entry["num_tokens"] for entry in run.state.log_history if "num_tokens" in entry]
    # completions of 2, 3, 4 and 5 tokens after four prompts of one word, then of two words
    assert totals == [14 + 4, 14 + 4 + 14 + 8]


def test_adaptive_entropy_moves_once_per_optimizer_step(tmp_path):
    run = trainer(
        tmp_path,
        use_adaptive_entropy=True,
        entropy_coef=0.5,
        entropy_target=100.0,  # far above: the coefficient rises every step
        entropy_coef_delta=0.1,
        entropy_coef_max=0.65,
        gradient_accumulation_steps=2,
        max_steps=3,
    )
    run.train()
    logged = [entry["entropy_coef"] for entry in run.state.log_history if "entropy_coef" in entry]
    assert logged == pytest.approx([0.6, 0.65, 0.65])
    assert run.entropy_coef == pytest.approx(0.65)


def test_high_entropy_tokens_are_chosen_over_the_whole_window(tmp_path):
    run = trainer(tmp_path, top_entropy_quantile=0.3, rollout_func=fixed_rollout(), steps_per_generation=2)
    batches = experience(run, [{"prompt": f"w{i // 4}", "row": 0} for i in range(8)])
    kept = sum(mask_BT.sum().item() for mask_BT in run.compute_entropy_masks(batches))
    tokens = sum(batch.loss_mask_BT.sum().item() for batch in batches)
    assert kept == math.ceil(0.3 * tokens)


def test_an_own_objective_and_an_own_advantage_by_name(tmp_path):
    register_objective("test_halved", lambda terms, settings: 0.5 * clipped(terms, settings), "sequence_sum")
    register_advantage("test_ones", lambda rewards, settings: torch.ones(len(rewards.rewards_NF)))
    run = trainer(tmp_path, loss_type="test_halved", advantage_baseline="test_ones", max_steps=1)
    run.train()
    (batch,) = experience(run, [{"prompt": "w1", "row": 0}] * 4)
    assert batch.advantages_BX.tolist() == [[1.0]] * 4
    assert run.state.log_history[0]["loss"] < 0


def test_verbs_can_be_overridden(tmp_path):
    class Constant(GRPOTrainer):
        def compute_advantages(self, scored):
            return torch.full((len(scored.rewards_NF),), 2.0)

        def compute_policy_loss(self, batch, logprobs):
            assert (batch.advantages_BX == 2.0).all()
            return LossOutput((logprobs.logps_BT * batch.token_weights_BT).sum())

    plain = trainer(tmp_path, max_steps=1)
    run = Constant(policy(), count_reward, plain.args, prompts(), processing_class=tokenizer())
    run.train()
    assert run.state.log_history[0]["loss"] < 0  # a mean log-prob


def test_chat_prompts_use_the_template_and_continue_an_unfinished_answer_if_set(tmp_path):
    continued = {"continue_final_message": True}
    run = trainer(tmp_path, train_dataset=chats(), max_prompt_length=2, chat_template_kwargs=continued)
    rollout = generate(run, [{"prompt": [{"role": "user", "content": "w5 w6 w7"}]}] * 4)
    # <user> w5 w6 w7 <assistant>, of which the last two tokens are kept
    assert rollout.prompt_ids[0] == [4 + 7, 3]
    started = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    answer = generate(run, [{"prompt": started}] * 4).texts[0]
    assert answer[0]["role"] == "assistant" and answer[0]["content"].startswith("w6")
    assert len(started) == 2
    run.args.chat_template_kwargs = None
    rollout = generate(run, [{"prompt": started}] * 4)
    assert rollout.prompt_ids[0] == [4 + 6, 3]
    assert not any(text[0]["content"].startswith("w6") for text in rollout.texts)


class Drills(torch.utils.data.Dataset):
    """Rows that are computed on access; a callback may change the level."""

    level = 1

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"prompt": " ".join(["w1"] * self.level), "row": index}


def test_a_torch_dataset_stays_what_it_is(tmp_path):
    class Harder(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            run.train_dataset.level += 1

    dataset, seen = Drills(), []

    def reward(prompts, completions, **_):
        seen.append(len(prompts[0].split()))
        return [float(len(text)) for text in completions]

    run = trainer(tmp_path, reward, train_dataset=dataset, callbacks=[Harder()], max_steps=3)
    assert run.train_dataset is dataset
    run.train()
    assert seen == [1, 2, 3]
    dataset.level = 0
    with pytest.raises(ConfigError, match=r"train_dataset, row .*: the prompt is empty"):
        run.train()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_dataset": Dataset.from_dict({"text": ["a"]})}, "no 'prompt' column; its columns are 'text'"),
        ({"train_dataset": Dataset.from_dict({"prompt": []})}, "train_dataset is empty"),
        ({"train_dataset": prompts(2), "per_device_train_batch_size": 16}, "has 2 prompts.*takes 4"),
        ({"train_dataset": IterableDataset.from_generator(lambda: []), "max_steps": -1}, "not known"),
        ({"eval_dataset": {"a": Dataset.from_dict({"text": ["a"]})}}, "eval_dataset.'a'.* no 'prompt'"),
        ({"train_dataset": None}, "train_dataset is missing"),
    ],
    ids=["column", "empty", "small", "streaming", "named", "missing"],
)
def test_unusable_data_are_refused_before_the_model_loads(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        trainer(tmp_path, model="nowhere/at-all", **changes)


def test_loading_options_beside_a_loaded_model_are_pointed_out(tmp_path, caplog):
    model = trainer(tmp_path, model_init_kwargs={"dtype": "bfloat16"}).model
    assert model.dtype == torch.float32
    assert "model_init_kwargs has no effect: the model is a loaded LlamaForCausalLM" in caplog.text
    assert "quantization_config" not in caplog.text


def test_callbacks_see_a_normal_trainer(tmp_path):
    events = []

    class Recorder(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            events.append(state.global_step)

        def on_log(self, args, state, control, logs=None, **kwargs):
            events.append("reward" in logs)

    trainer(tmp_path, callbacks=[Recorder()], max_steps=1).train()
    assert events == [1, True, False]  # the last log is the summary of the run


def test_the_saved_model_loads_and_the_card_is_written(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class Counts(GRPOTrainer):
        _tag_names = ("counting",)

    run = trainer(tmp_path, kind=Counts, max_steps=1)
    run.train()
    run.save_model()
    run.create_model_card(model_name="counts", tags="small")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in run.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    assert AutoTokenizer.from_pretrained(tmp_path).decode([4, 5]).split() == WORDS[:2]
    card = (tmp_path / "README.md").read_text()
    assert "GRPO" in card and "- counting\n- small\n" in card


def test_an_evaluation_batch_of_incomplete_groups_is_refused(tmp_path):
    run = trainer(tmp_path, eval_dataset=prompts(4), per_device_eval_batch_size=6, num_generations_eval=4)
    with pytest.raises(ConfigError, match=r"batch_size=6 x 1 .*num_generations_eval=4; .* 4 or 8"):
        run.evaluate()


def test_a_reference_forward_before_the_policy_keeps_the_layout(tmp_path):
    run = trainer(tmp_path, beta=0.1, max_steps=1)
    run.train()  # on-policy, so the reference is the first model that scores
    assert run.logprob_computer.layout == "shared_prefix"
