"""Liger's fused loss moves the policy as the ordinary path does, for every objective it supports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import replace

import pytest
import torch
from support.configs import oldest_version, set_installed
from support.runs import WORDS, count_reward, experience, policy, prompts, tokenizer, trainer, weighed
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2VLConfig

from groupwise import ConfigError, GRPOConfig, GRPOTrainer
from groupwise.policy.liger import check_liger

needs_liger = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed"
)


def rollout(logprobs=False, masked=False):
    """Completions of different lengths that no sampler of this process made; token ids 2 to 31."""

    def sample(prompts, run):
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(1, 7, (len(prompts),), generator=generator).tolist()
        ids = [torch.randint(2, 32, (n,), generator=generator).tolist() for n in lengths]
        result = {"prompt_ids": [[4 + i % 8, 9] for i in range(len(prompts))], "completion_ids": ids}
        if logprobs:
            result["logprobs"] = [(-3.4 + 0.1 * torch.rand(n, generator=generator)).tolist() for n in lengths]
        if masked:
            result["tool_mask"] = [[1] + [i % 2 for i in range(n - 1)] for n in lengths]
        return result

    return sample


def moved(tmp_path, use_liger_kernel, rollout_func, model=None, **settings):
    """Parameters and logs after two optimizer steps, the second with ratios other than 1."""
    model = model or policy()
    run = trainer(
        tmp_path,
        model=model,
        rollout_func=rollout_func,
        use_liger_kernel=use_liger_kernel,
        optimizers=(torch.optim.SGD(model.parameters(), lr=2.0), None),
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        **{
            "num_iterations": 2,
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 4,
            "max_steps": 2,
            "epsilon": 0.1,
            **settings,
        },
    )
    run.train()
    return torch.cat([p.detach().flatten() for p in run.model.parameters()]), run.state.log_history


CASES = {
    "grpo": {"loss_type": "grpo"},
    "grpo_sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo_sequence": {"loss_type": "dapo", "importance_sampling_level": "sequence", "beta": 0.1},
    "delta": {"loss_type": "dapo", "delta": 1.15},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "kl": {"loss_type": "grpo", "beta": 0.5},
    "kl_bias_correction": {"loss_type": "dapo", "beta": 0.5, "use_bias_correction_kl": True},
    "kl_in_reward": {"loss_type": "dapo", "beta": 0.5, "kl_in_reward": True},
    "temperature": {"loss_type": "dapo", "temperature": 0.6},
    "fp32_head": {"loss_type": "dapo", "cast_lm_head_to_fp32": True},
}


@pytest.mark.slow
@needs_liger
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_two_steps_are_those_of_the_ordinary_path(tmp_path, settings):
    plain, plain_logs = moved(tmp_path, False, rollout(masked=True), **settings)
    fused, fused_logs = moved(tmp_path, True, rollout(masked=True), **settings)
    start = torch.cat([p.detach().flatten() for p in policy().parameters()])
    assert (plain - start).abs().max() > 1e-2
    torch.testing.assert_close(fused, plain, atol=5e-6, rtol=0)
    for one, other in zip(fused_logs[:2], plain_logs[:2], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-6)
        shared = {"kl", "clip_ratio/region_mean", "cispo_clip_ratio"} & set(one)
        assert {name: one[name] for name in shared} == pytest.approx(
            {name: other[name] for name in shared}, abs=2e-6
        )
        assert "entropy" in other and "entropy" not in one
    if settings.get("beta") and not settings.get("kl_in_reward"):
        assert fused_logs[1]["kl"] > 0
    if settings["loss_type"] not in ("sapo", "vespo") and "importance_sampling_level" not in settings:
        name = "cispo_clip_ratio" if settings["loss_type"] == "cispo" else "clip_ratio/region_mean"
        assert fused_logs[1][name] > 0


@needs_liger
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_gradients_of_uneven_micro_batches_far_off_policy(tmp_path, settings):
    """Micro-batches of 3, 3 and 2 rows, with ratios from a half to two and more; row 1 is dropped."""
    options = {"per_device_train_batch_size": 8, "epsilon": 0.1, "rollout_func": rollout(masked=True)}
    runs = [
        trainer(tmp_path, model=policy(), use_liger_kernel=use, **options, **settings)
        for use in (False, True)
    ]
    (batch,) = experience(runs[0], [{"prompt": WORDS[0], "row": 0}] * 8)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(batch.completion_ids_BT.shape, generator=generator) / 2
    dropped_B = torch.arange(8) == 1
    batch = replace(
        batch,
        old_logps_BT=runs[0].compute_logprobs(runs[0].model, batch).logps_BT.detach() + noise,
        loss_mask_BT=batch.loss_mask_BT * ~dropped_B.unsqueeze(1),
        dropped_B=dropped_B,
    )
    window = weighed(runs[0], list(batch.split(3)))
    gradients = []
    for run in runs:
        losses = [run.compute_loss(run.model, part) for part in window]
        for loss in losses:
            loss.backward()
        gradients.append({name: p.grad for name, p in run.model.named_parameters()})
        gradients[-1]["losses"] = torch.stack(losses).detach()
    for name, expected in gradients[0].items():
        # 64 roundings of the largest entry: another order of summation, through two layers
        budget = 64 * torch.finfo(torch.float32).eps * expected.abs().max().item()
        torch.testing.assert_close(gradients[1][name], expected, rtol=0, atol=budget)


@pytest.mark.slow
@needs_liger
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_a_separate_sampler_is_corrected_for(tmp_path, loss_type, mode):
    settings = {
        "loss_type": loss_type,
        "rollout_func_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": 1.2,
        "num_iterations": 1,
    }
    plain, plain_logs = moved(tmp_path, False, rollout(logprobs=True, masked=True), **settings)
    fused, fused_logs = moved(tmp_path, True, rollout(logprobs=True, masked=True), **settings)
    torch.testing.assert_close(fused, plain, atol=5e-6, rtol=0)
    name = "sampling/importance_sampling_ratio/mean"
    assert fused_logs[0][name] == pytest.approx(plain_logs[0][name], abs=1e-5)


@needs_liger
def test_the_models_own_scale_of_the_logits_counts(tmp_path):
    from transformers import CohereConfig, CohereForCausalLM

    def model():
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "logit_scale": 0.25, "pad_token_id": 0}
        return CohereForCausalLM(CohereConfig(**sizes, **heads, eos_token_id=1, bos_token_id=None))

    plain, _ = moved(tmp_path, False, rollout(), model())
    fused, _ = moved(tmp_path, True, rollout(), model())
    start = torch.cat([p.detach().flatten() for p in model().parameters()])
    assert (plain - start).abs().max() > 1e-3
    torch.testing.assert_close(fused, plain, atol=5e-6, rtol=0)


@pytest.mark.slow
@needs_liger
@pytest.mark.parametrize(
    ("tied", "settings"),
    [
        (True, {"target_modules": ["q_proj", "lm_head"]}),
        (True, {"trainable_token_indices": [3, 4]}),
        (False, {"target_modules": ["q_proj", "lm_head"]}),
        (False, {"trainable_token_indices": [3, 4]}),
        (False, {"modules_to_save": ["lm_head"]}),
    ],
    ids=str,
)
def test_an_adapter_of_the_head_moves_as_on_the_ordinary_path(tmp_path, tied, settings):
    peft = pytest.importorskip("peft")

    def trained(use_liger_kernel):
        config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **settings})
        torch.manual_seed(0)  # of the adapter
        model = peft.get_peft_model(policy(tie_word_embeddings=tied), config)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        _, history = moved(tmp_path / str(use_liger_kernel), use_liger_kernel, rollout(), model, beta=0.1)
        updates = {name: parameter.detach() - start[name] for name, parameter in parameters.items()}
        return updates, [line["kl"] for line in history[:2]]

    (ordinary, ordinary_kl), (fused, fused_kl) = trained(False), trained(True)
    assert any(update.abs().max() > 1e-3 for name, update in ordinary.items() if "q_proj" not in name)
    for name, update in ordinary.items():
        torch.testing.assert_close(fused[name], update, atol=2e-6, rtol=1e-4)
    assert fused_kl == pytest.approx(ordinary_kl, abs=1e-6) and ordinary_kl[1] > 1e-6


@needs_liger
def test_a_frozen_head_gets_no_gradient_and_changes_no_other(tmp_path):
    def model():
        made = policy()
        made.lm_head.requires_grad_(False)
        return made

    plain, _ = moved(tmp_path, False, rollout(), model())
    fused, _ = moved(tmp_path, True, rollout(), model())
    torch.testing.assert_close(fused, plain, atol=5e-6, rtol=0)


@needs_liger
def test_layers_stay_as_they_are_without_a_gpu(tmp_path, caplog):
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama)), dict(vars(modeling_llama.LlamaRMSNorm))
    run = trainer(tmp_path, use_liger_kernel=True, liger_kernel_config={"rope": True})
    run.train()
    assert run.args.use_liger_kernel and not any(run.args.liger_kernel_config.values())
    assert "Liger's layers need a GPU" in caplog.text
    assert before == (dict(vars(modeling_llama)), dict(vars(modeling_llama.LlamaRMSNorm)))
    assert not [m for m in run.model.modules() if {"forward", "extra_repr"} & set(vars(m))]


@needs_liger
def test_evaluation_uses_the_fused_loss_too(tmp_path):
    from support.runs import prompts

    runs = []
    for use in (False, True):
        run = trainer(
            tmp_path,
            use_liger_kernel=use,
            eval_dataset=prompts(4),
            rollout_func=rollout(),
            per_device_eval_batch_size=4,
        )
        runs.append(run.evaluate())
    assert runs[1]["eval_loss"] == pytest.approx(runs[0]["eval_loss"], abs=2e-6)


@needs_liger
def test_step_rewards_are_refused_when_they_appear(tmp_path):
    def reward(completion_ids, **_):
        return [[(i, float(i)) for i in range(len(ids))] for ids in completion_ids]

    run = trainer(tmp_path, reward, use_liger_kernel=True)
    with pytest.raises(ConfigError, match="one advantage per sequence"):
        run.train()


@needs_liger
def test_padding_far_from_the_reference_is_finite(tmp_path):
    """Liger multiplies by the mask last: e^(ℓ_ref - ℓ) must be finite on padding as well."""
    model = policy()
    model.lm_head.weight.data *= 3e4  # log-probs in the hundreds; the reference has the same
    run = trainer(tmp_path, model=model, use_liger_kernel=True, beta=0.1, rollout_func=rollout())
    (batch,) = run.make_window(1).batches
    assert (batch.loss_mask_BT == 0).any()
    with torch.no_grad():
        batch.ref_logps_BT[batch.loss_mask_BT == 0] = 1e4
    assert run.compute_loss(model, batch).isfinite()


def test_truncation_in_generation_kwargs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"typical_p.*Liger's log-probs are of the full distribution"):
        GRPOConfig(str(tmp_path), bf16=False, use_liger_kernel=True, generation_kwargs={"typical_p": 0.9})


def test_a_softcap_is_refused_before_the_weights_load(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    config.save_pretrained(tmp_path)  # there are no weights to load
    args = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, use_liger_kernel=True)
    for model in (str(tmp_path), Gemma2ForCausalLM(config)):
        with pytest.raises(ConfigError, match="final_logit_softcapping=30"):
            check_liger(model, args)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    args = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, use_liger_kernel=True)
    with pytest.raises(ConfigError, match="groupwise\\[liger\\]"):
        check_liger("nowhere", args)


@needs_liger
def test_a_liger_without_the_arguments_of_the_loss_is_refused(tmp_path, monkeypatch):
    set_installed(monkeypatch, "liger-kernel", "0.8.0")
    oldest = oldest_version("liger-kernel")
    with pytest.raises(ConfigError, match=rf"needs liger-kernel>={oldest}, and 0.8.0 is installed"):
        trainer(tmp_path, use_liger_kernel=True)


@needs_liger
def test_an_architecture_that_liger_cannot_patch_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    from transformers.models.qwen2_vl import modeling_qwen2_vl as modeling

    Qwen2VLConfig().save_pretrained(tmp_path)
    args = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, use_liger_kernel=True)
    before = dict(vars(modeling))
    if hasattr(modeling, "Qwen2VisionTransformerPretrainedModel"):  # transformers before 5.24
        check_liger(str(tmp_path), args)
        monkeypatch.delattr(modeling, "Qwen2VisionTransformerPretrainedModel")
    names = r"qwen2_vl: .*Qwen2VisionTransformerPretrainedModel.*liger-kernel \d.*, transformers \d.*"
    with pytest.raises(ConfigError, match=rf"{names}use_liger_kernel=False"):
        check_liger(str(tmp_path), args)  # the folder has no weights
    monkeypatch.undo()
    assert dict(vars(modeling)) == before  # the check patches nothing


@needs_liger
def test_an_overridden_loss_is_refused(tmp_path):
    class OwnLoss(GRPOTrainer):
        def compute_policy_loss(self, batch, logprobs):
            return super().compute_policy_loss(batch, logprobs)

    options = {"max_completion_length": 8, "bf16": False, "use_cpu": True}
    args = GRPOConfig(str(tmp_path), use_liger_kernel=True, **options)
    with pytest.raises(ConfigError, match=r"OwnLoss overrides compute_policy_loss.*use_liger_kernel=False"):
        OwnLoss(policy(), count_reward, args, prompts(), processing_class=tokenizer())


@needs_liger
def test_an_adapter_of_virtual_tokens_is_refused(tmp_path):
    peft = pytest.importorskip("peft")
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    message = "use_liger_kernel=True with a PromptTuningConfig, whose virtual tokens"
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, peft_config=tuning, use_liger_kernel=True)
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, model=peft.get_peft_model(policy(), tuning), use_liger_kernel=True)
