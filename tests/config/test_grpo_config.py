"""Names, defaults and types of the fields, and their parsing from flags, YAML and JSON.

Files: ``config/fields.py``.
"""

from __future__ import annotations

import dataclasses

import pytest
from transformers import HfArgumentParser, TrainingArguments

from groupwise.config.fields import INHERITED, GRPOFields
from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.settings import Setting
from groupwise.errors import ConfigError

# name: (type, default), as the public contract states them
CONTRACT = {
    "learning_rate": (float, 1e-6),
    "logging_steps": (float, 10),
    "gradient_checkpointing": (bool, True),
    "activation_memory_fraction": (float, 0.5),
    "remove_unused_columns": (bool, False),
    "report_to": (list, None),
    "bf16": (bool, None),
    "model_init_kwargs": (dict, None),
    "trust_remote_code": (bool, False),
    "disable_dropout": (bool, False),
    "cast_lm_head_to_fp32": (bool, False),
    "router_aux_loss_coef": (float, None),
    "router_aux_loss_scope": (str, "micro_batch"),
    "router_replay": (str, "disabled"),
    "num_generations": (int, 8),
    "num_generations_eval": (int, None),
    "max_completion_length": (int, 256),
    "max_prompt_length": (int, None),
    "pad_to_multiple_of": (int, None),
    "ds3_gather_for_generation": (bool, True),
    "shuffle_dataset": (bool, True),
    "dataset_weights": (dict, None),
    "prompt_filter": (dict, None),
    "generation_batch_size": (int, None),
    "steps_per_generation": (int, None),
    "temperature": (float, 1.0),
    "top_p": (float, 1.0),
    "top_k": (int, None),
    "min_p": (float, None),
    "repetition_penalty": (float, 1.0),
    "generation_kwargs": (dict, None),
    "chat_template_kwargs": (dict, None),
    "use_transformers_continuous_batching": (bool, False),
    "transformers_continuous_batching_config": (dict, None),
    "cache_implementation": (str, None),
    "use_vllm": (bool, False),
    "vllm_mode": (str, "colocate"),
    "vllm_model_impl": (str, "vllm"),
    "vllm_enable_sleep_mode": (bool, False),
    "vllm_structured_outputs_regex": (str, None),
    "vllm_server_base_url": (str, None),
    "vllm_server_host": (str, "0.0.0.0"),
    "vllm_server_port": (int, 8000),
    "vllm_server_timeout": (float, 240.0),
    "vllm_group_port": (int, 51216),
    "vllm_gpu_memory_utilization": (float, 0.3),
    "vllm_max_model_length": (int, None),
    "vllm_tensor_parallel_size": (int, 1),
    "vllm_engine_kwargs": (dict, None),
    "vllm_weight_check": (str, "every_sync"),
    "vllm_importance_sampling_correction": (bool, True),
    "vllm_importance_sampling_mode": (str, "sequence_mask"),
    "vllm_importance_sampling_clip_max": (float, 3.0),
    "vllm_importance_sampling_clip_min": (float, None),
    "rollout_func_importance_sampling_correction": (bool, False),
    "beta": (float, 0.0),
    "kl_estimator": (str, "k3"),
    "kl_in_reward": (bool, False),
    "use_bias_correction_kl": (bool, False),
    "num_iterations": (int, 1),
    "epsilon": (float, 0.2),
    "epsilon_high": (float, None),
    "delta": (float, None),
    "loss_type": (str, "dapo"),
    "loss_kwargs": (dict, None),
    "importance_sampling_level": (str, "token"),
    "sapo_temperature_pos": (float, 1.0),
    "sapo_temperature_neg": (float, 1.05),
    "vespo_k_pos": (float, 2.0),
    "vespo_lambda_pos": (float, 3.0),
    "vespo_k_neg": (float, 3.0),
    "vespo_lambda_neg": (float, 2.0),
    "off_policy_mask_threshold": (float, None),
    "reward_weights": (list, None),
    "scale_rewards": (str, "group"),
    "multi_objective_aggregation": (str, "sum_then_normalize"),
    "advantage_baseline": (str, "group_mean"),
    "mask_truncated_completions": (bool, False),
    "sync_ref_model": (bool, False),
    "ref_model_mixup_alpha": (float, 0.6),
    "ref_model_sync_steps": (int, 512),
    "top_entropy_quantile": (float, 1.0),
    "entropy_coef": (float, 0.0),
    "use_adaptive_entropy": (bool, False),
    "entropy_coef_min": (float, 0.0),
    "entropy_coef_max": (float, 1.0),
    "entropy_coef_delta": (float, 0.005),
    "entropy_target": (float, 0.2),
    "max_tool_calling_iterations": (int, None),
    "tool_timeout": (float, None),
    "rollout_on_error": (str, "raise"),
    "rollout_retries": (int, 2),
    "rollout_credit": (str, "rollout"),
    "use_liger_kernel": (bool, False),
    "logprob_head": (str, "auto"),
    "sequence_layout": (str, "auto"),
    "skip_zero_advantage": (bool, True),
    "dynamic_sampling": (bool, False),
    "dynamic_sampling_max_rounds": (int, 10),
    "rollout_staleness": (int, 0),
    "logprob_mismatch_check": (str, "warn"),
    "logprob_mismatch_steps": (int, 20),
    "reward_timeout": (float, None),
    "reward_on_error": (str, "raise"),
    "eval_pass_at_k": (list, None),
    "eval_pass_threshold": (float, 0.0),
    "eval_max_samples": (int, None),
    "eval_generation_kwargs": (dict, None),
    "metrics_by": (str, None),
    "terminal_metrics": (list, None),
    "log_completions": (bool, False),
    "num_completions_to_print": (int, None),
    "log_unique_prompts": (bool, False),
    "log_multimodal": (bool, True),
    "log_completions_hub_repo": (str, None),
    "save_rollouts": (bool, False),
    "hub_include": (list, None),
}

OLD_NAMES = {
    "use_transformers_paged",
    "vllm_guided_decoding_regex",
    "vllm_importance_sampling_cap",
    "use_liger_loss",
    "wandb_log_unique_prompts",
}


def _parse(*flags: str) -> GRPOConfig:
    return HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(
        ["--output_dir", "unused", "--report_to", "none", "--bf16", "false", *flags], look_for_args_file=False
    )[0]


@pytest.mark.parametrize("name", CONTRACT)
def test_default_and_type(name):
    declared = {item.name: item for item in dataclasses.fields(GRPOConfig)}[name]
    kind, default = CONTRACT[name]
    assert declared.default == default
    assert type(declared.default) is type(default)
    assert kind in GRPOConfig.SETTINGS[name].types
    assert default is not None or type(None) in GRPOConfig.SETTINGS[name].types


def test_the_class_declares_the_contract_and_the_old_names_and_nothing_else():
    assert set(GRPOFields.__annotations__) - {"SETTINGS"} == set(CONTRACT) | OLD_NAMES
    assert set(GRPOConfig.SETTINGS) == set(CONTRACT) | OLD_NAMES | set(INHERITED)


def test_every_field_is_described():
    described = {name: setting.description for name, setting in GRPOConfig.SETTINGS.items()}
    assert all(described[name].endswith(".") for name in [*CONTRACT, *OLD_NAMES])
    assert described["use_liger_loss"] == "Old name of use_liger_kernel."


def test_fields_of_training_arguments_are_described_if_they_differ_here():
    fields = {item.name for item in dataclasses.fields(TrainingArguments)}
    assert set(INHERITED) <= fields - set(CONTRACT)
    assert all(setting != Setting() for setting in INHERITED.values())
    described = GRPOConfig.SETTINGS["use_cache"].description
    assert described == "No effect: generation always caches keys and values, and training never does."


def test_help_can_be_printed():
    # argparse expands % in help texts, and a text it cannot expand breaks --help
    text = " ".join(HfArgumentParser(GRPOConfig).format_help().split())
    assert "Weight of the KL to the reference model. 0: no reference model in memory. Allowed: >= 0." in text
    assert "Estimator of the KL per token. No effect unless beta > 0. Allowed: k1, k2, k3, k3_k2grad." in text


def test_inherited_defaults_stay(build):
    changed = {"learning_rate", "logging_steps", "gradient_checkpointing", "remove_unused_columns"}
    changed |= {"bf16", "report_to"}
    ours = {item.name: item.default for item in dataclasses.fields(GRPOConfig)}
    for item in dataclasses.fields(TrainingArguments):
        assert (ours[item.name] != item.default) == (item.name in changed)


def test_flags():
    config = _parse(
        *("--beta", "0.04", "--kl-in-reward", "--loss_type", "dr_grpo", "--no_shuffle_dataset"),
        *("--reward_weights", "1.0", "0.5", "--num_generations", "4", "--top_k", "20", "--min_p", "0.1"),
        *("--vllm_importance_sampling_correction", "false", "--log_completions", "true"),
    )
    assert (config.beta, config.kl_in_reward, config.loss_type, config.shuffle_dataset) == (
        0.04,
        True,
        "dr_grpo",
        False,
    )
    assert (config.reward_weights, config.num_generations, config.top_k, config.min_p) == (
        [1.0, 0.5],
        4,
        20,
        0.1,
    )
    assert (config.vllm_importance_sampling_correction, config.log_completions) == (False, True)


@pytest.mark.parametrize("flags", [("--bf16",), ("--bf16", "true")])
def test_bf16_flag_needs_no_value(flags):
    assert _parse("--use_cpu", *flags).bf16 is True


@pytest.mark.filterwarnings("ignore:.* is the old name of:FutureWarning")
def test_old_flags_need_no_value():
    assert _parse("--wandb_log_unique_prompts").log_unique_prompts is True


@pytest.mark.parametrize(("flag", "expected"), [("true", "group"), ("False", "none"), ("batch", "batch")])
def test_scale_rewards_flag(flag, expected):
    assert _parse("--scale_rewards", flag).scale_rewards == expected


@pytest.mark.parametrize(("value", "expected"), [(True, "group"), (False, "none"), ("none", "none")])
def test_scale_rewards_value(build, value, expected):
    assert build(scale_rewards=value).scale_rewards == expected


@pytest.mark.parametrize("name", ["model_init_kwargs", "generation_kwargs", "chat_template_kwargs"])
def test_json_flags(name):
    config = _parse(f"--{name}", '{"revision": "0123", "nested": {"on": true, "share": 0.5}}')
    # a string of digits in JSON stays a string: a revision is no number
    assert getattr(config, name) == {"revision": "0123", "nested": {"on": True, "share": 0.5}}


@pytest.mark.parametrize("text", ['{"revision": ', '["revision"]', "path/to/file.json"])
def test_invalid_json_objects_are_refused_by_name(text):
    with pytest.raises(
        ConfigError, match=r"model_init_kwargs=.* is of type .*; allowed: None or dict or str"
    ):
        _parse("--model_init_kwargs", text)


def test_yaml(tmp_path):
    file = tmp_path / "config.yaml"
    # YAML 1.1 reads 1e-3 (no point) as a string
    file.write_text(
        f"output_dir: {tmp_path}\nreport_to: none\nbf16: false\nbeta: 1e-3\nlearning_rate: 2e-6\n"
        "model_init_kwargs:\n  dtype: float32\ngeneration_kwargs: '{\"top_k\": 5}'\n"
        "reward_weights: [1, '5e-1']\nscale_rewards: false\nper_device_train_batch_size: '16'\n"
    )
    (config,) = HfArgumentParser(GRPOConfig).parse_yaml_file(file)
    assert (config.beta, config.learning_rate, config.scale_rewards) == (1e-3, 2e-6, "none")
    assert config.model_init_kwargs == {"dtype": "float32"}
    assert (config.generation_kwargs, config.top_k) == (None, 5)
    assert config.reward_weights == [1, 0.5]
    assert config.generation_batch_size == 16


def test_parse_dict_with_json_lists(tmp_path):
    (config,) = HfArgumentParser(GRPOConfig).parse_dict(
        {
            "output_dir": str(tmp_path),
            "bf16": False,
            "reward_weights": "[1.0, 2.0]",
            "log_completions": "true",
        }
    )
    assert config.reward_weights == [1.0, 2.0]
    assert config.log_completions is True


def test_unknown_arguments_are_in_one_message_with_the_nearest_name_and_the_way_out():
    given = {"num_generation": 4, "betta": 0.1, "frequency": 3}
    old = {
        "evaluation_strategy": "steps",
        "vllm_dtype": "auto",
        "vllm_max_model_len": 64,
        "peft_config": None,
    }
    with pytest.raises(ConfigError) as error:
        GRPOConfig("out", **given, **old)
    assert str(error.value).splitlines() == [
        "7 name(s) that are no settings:",
        "  - unknown argument 'num_generation'; nearest: 'num_generations'",
        "  - unknown argument 'betta'; nearest: 'beta'",
        "  - unknown argument 'frequency'; names of other versions and libraries: "
        '"Coming from TRL" in the documentation',
        "  - argument 'evaluation_strategy': write eval_strategy",
        "  - argument 'vllm_dtype': write vllm_engine_kwargs: {dtype: …}",
        "  - unknown argument 'vllm_max_model_len'; nearest: 'vllm_max_model_length'",
        "  - argument 'peft_config': pass it to GRPOTrainer",
    ]
    with pytest.raises(ConfigError, match="nearest: 'seed'"):
        dataclasses.replace(GRPOConfig("out", report_to="none"), sed=1)


def test_unknown_arguments_of_subclasses():
    @dataclasses.dataclass
    class WithField(GRPOConfig):
        reward_scale: float = 1.0

    class WithConstructor(GRPOConfig):
        def __init__(self, *args, reward_scale=1.0, **kwargs):
            super().__init__(*args, **kwargs)
            self.reward_scale = reward_scale

    for kind in (WithField, WithConstructor):
        assert kind("out", report_to="none", reward_scale=2.0).reward_scale == 2.0
    with pytest.raises(ConfigError, match="unknown argument 'reward_scal'; nearest: 'reward_scale'"):
        WithField("out", reward_scal=2.0)
    with pytest.raises(TypeError, match="reward_scal"):  # of its own constructor, which takes any name
        WithConstructor("out", reward_scal=2.0)
