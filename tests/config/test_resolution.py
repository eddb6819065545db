"""Values that are resolved when a configuration is built, and the values that are kept."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from support.configs import messages

from groupwise.compat.torch import has_native_bf16_cpu
from groupwise.config import grpo_config
from groupwise.config.grpo_config import GRPOConfig, computes_bf16_natively
from groupwise.errors import ConfigError, warn_once
from groupwise.hf.arguments import check_arguments


def test_open_settings_are_filled_in(build):
    config = build(per_device_train_batch_size=4, gradient_accumulation_steps=6, epsilon=0.3)
    assert (config.steps_per_generation, config.generation_batch_size) == (6, 24)  # 4 x 1 process x 6
    assert (config.epsilon_high, config.num_generations_eval, config.top_k) == (0.3, 8, 0)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_generations", 3, "generation_batch_size=8 .* num_generations=3"),
        ("rollout_on_error", "x", "rollout_on_error='x' is unknown"),
        ("temperature", -1.0, r"temperature=-1.0 is out of range"),
    ],
)
def test_a_field_that_is_assigned_before_the_trainer_is_built_is_checked(build, name, value, said):
    config = build()
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=said):
        check_arguments("a/model that is never loaded", config)


def test_open_settings_follow_fields_that_are_assigned_before_the_trainer_is_built(build):
    config = build()  # 8 completions per micro-batch, groups of 8
    before = dict(vars(config))
    assert vars(check_arguments("a/model that is never loaded", config)) == before
    config.epsilon, config.num_generations, config.gradient_accumulation_steps = 0.3, 4, 2
    config.generation_kwargs = {"temperature": 0.5}  # the sampler's, which the log-probs have to use
    check_arguments("a/model that is never loaded", config)
    assert (config.epsilon_high, config.num_generations_eval, config.temperature) == (0.3, 4, 0.5)
    assert (config.steps_per_generation, config.generation_batch_size) == (2, 16)


def test_given_settings_stay(build):
    config = build(epsilon_high=0.28, num_generations_eval=1, top_k=50)
    assert (config.epsilon, config.epsilon_high, config.num_generations_eval, config.top_k) == (
        0.2,
        0.28,
        1,
        50,
    )


@pytest.mark.parametrize(
    ("given", "size", "steps"),
    [({"steps_per_generation": 3}, 24, 3), ({"generation_batch_size": 32}, 32, 4)],
)
def test_batch_and_steps_follow_from_each_other(build, given, size, steps):
    config = build(per_device_train_batch_size=8, gradient_accumulation_steps=2, **given)
    assert (config.generation_batch_size, config.steps_per_generation) == (size, steps)


def test_generation_kwargs_set_the_field_of_the_same_meaning(build):
    kwargs = {"temperature": 0.7, "max_new_tokens": 32, "do_sample": True}
    config = build(generation_kwargs=kwargs)
    assert (config.temperature, config.max_completion_length) == (0.7, 32)
    assert config.generation_kwargs == {"do_sample": True}
    assert kwargs == {"temperature": 0.7, "max_new_tokens": 32, "do_sample": True}


def test_a_later_value_of_the_field_wins_over_generation_kwargs(build):
    config = build(generation_kwargs={"temperature": 0.7})
    assert dataclasses.replace(config, temperature=1.0).temperature == 1.0  # the default
    config.temperature = 1.0
    assert check_arguments("a/model that is never loaded", config).temperature == 1.0


def test_generation_kwargs_override_fields_with_a_warning(build, caplog):
    kwargs = {"temperature": 0.7, "max_tokens": 32, "top_k": None}
    config = build(temperature=0.9, max_completion_length=64, top_k=0, generation_kwargs=kwargs)
    assert (config.temperature, config.max_completion_length, config.top_k) == (0.7, 32, 0)
    assert messages(caplog) == [
        "generation_kwargs['temperature']=0.7 overrides temperature=0.9",
        "generation_kwargs['max_tokens']=32 overrides max_completion_length=64",
    ]


@pytest.mark.parametrize("off", [-1, None])
def test_minus_one_and_none_turn_top_k_off(build, off):
    assert build(top_k=off).top_k == 0
    assert build(generation_kwargs={"top_k": off, "min_p": None}).top_k == 0


@pytest.mark.parametrize(
    ("given", "device", "resolved"),
    [
        ("auto", "cpu", None),
        ("auto", "neuron", 128),
        ("None", "neuron", None),
        (None, "neuron", None),
        (64, "neuron", 64),
    ],
)
def test_padding_of_devices(build, monkeypatch, given, device, resolved):
    config = build()
    monkeypatch.setattr(GRPOConfig, "device", SimpleNamespace(type=device))
    config.pad_to_multiple_of = given
    grpo_config.resolve_defaults(config)
    assert config.pad_to_multiple_of == resolved


@pytest.mark.parametrize(("given", "resolved"), [("auto", None), ("64", 64), ("null", None)])
def test_padding_of_flags(build, given, resolved):
    assert build(pad_to_multiple_of=given).pad_to_multiple_of == resolved


def test_unknown_padding_is_refused(build):
    with pytest.raises(ConfigError, match="pad_to_multiple_of='full' is unknown; allowed: auto, >= 1; "):
        build(pad_to_multiple_of="full")


def test_values_from_generation_kwargs_are_checked_too(build):
    with pytest.raises(ConfigError, match="temperature=-1 is out of range"):
        build(generation_kwargs={"temperature": -1})


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", 2.0),
        ("wandb_log_unique_prompts", "log_unique_prompts", True),
        ("use_liger_loss", "use_liger_kernel", False),
    ],
)
def test_old_names_move_to_the_new(build, old, new, value):
    with pytest.warns(FutureWarning, match=f"{old} is the old name of {new}") as caught:
        config = build(**{old: value})
    assert getattr(config, new) == value
    assert getattr(config, old) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataclasses.replace(config)
    assert len([one for one in caught if one.category is FutureWarning]) == 1


@pytest.mark.filterwarnings("ignore:.* is the old name of:FutureWarning")
@pytest.mark.parametrize(
    ("old", "new", "value", "reason"),
    [
        ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", -1.0, "is out of range"),
    ],
)
def test_old_names_are_judged_as_the_new(build, old, new, value, reason):
    with pytest.raises(ConfigError, match=f"{new}=.* {reason}"):
        build(**{old: value})


@pytest.mark.filterwarnings("ignore:.* is the old name of:FutureWarning")
def test_old_and_new_names_may_agree_but_not_differ(build):
    both = {"vllm_importance_sampling_cap": 2.0, "vllm_importance_sampling_clip_max": 2.0}
    assert build(**both).vllm_importance_sampling_clip_max == 2.0
    with pytest.raises(
        ConfigError, match=r"vllm_importance_sampling_cap=2\.0 is the old name of .*clip_max=4\.0"
    ):
        build(**{**both, "vllm_importance_sampling_clip_max": 4.0})


def _on(monkeypatch, device: str, native: bool) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(grpo_config, "_device_type", lambda use_cpu: device)
    monkeypatch.setattr(grpo_config, "computes_bf16_natively", lambda device_type: native)
    warn_once.cache_clear()


def test_bf16_is_on_where_it_is_asked_for(build, monkeypatch):
    monkeypatch.setattr(grpo_config, "_device_type", lambda use_cpu: "cpu")
    config = build(bf16=True)
    assert (config.bf16, config.use_cpu, config.mixed_precision) == (True, True, "bf16")
    assert build(bf16=False).use_cpu is False


def test_bf16_is_on_where_it_is_native(build, monkeypatch, caplog):
    _on(monkeypatch, "cpu", native=True)
    config = build(bf16=None)
    assert (config.bf16, config.mixed_precision, config.device.type) == (True, "bf16", "cpu")
    assert "bf16" not in caplog.text


def test_bf16_is_off_elsewhere_with_one_warning(build, monkeypatch, caplog):
    _on(monkeypatch, "cpu", native=False)
    assert [build(bf16=None).bf16, build(bf16=None).mixed_precision] == [False, "no"]
    said = [record.getMessage() for record in caplog.records if record.name == "groupwise.config.grpo_config"]
    assert said == ["bf16 is off, training in float32: the cpu device does not compute bfloat16 natively"]


def test_a_gpu_without_bf16_is_pointed_to_fp16(build, monkeypatch, caplog):
    _on(monkeypatch, "cuda", native=False)
    assert build(bf16=None).bf16 is False
    assert "the cuda device does not compute bfloat16 natively; fp16=True trains in half" in caplog.text


def test_bf16_gives_way_to_fp16(build, monkeypatch):
    _on(monkeypatch, "cpu", native=True)
    config = build(bf16=None, fp16=True)
    assert (config.bf16, config.fp16, config.mixed_precision) == (False, True, "fp16")


@pytest.mark.parametrize(("launched", "bf16", "native"), [("fp16", False, True), ("bf16", True, False)])
def test_bf16_follows_accelerate_launch(build, monkeypatch, launched, bf16, native):
    _on(monkeypatch, "cpu", native)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    config = build(bf16=None)
    assert (config.bf16, config.mixed_precision) == (bf16, launched)


@pytest.mark.parametrize(
    ("given", "launched", "warns"), [(False, "bf16", True), (True, "bf16", False), (False, "no", False)]
)
def test_bf16_false_that_accelerate_overrules_is_said(build, monkeypatch, caplog, given, launched, warns):
    _on(monkeypatch, "cpu", native=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    config = build(bf16=given, use_cpu=True)
    assert config.mixed_precision == ("bf16" if given or warns else "no")
    assert ("bf16=False does not turn off mixed_precision=bf16 of accelerate" in caplog.text) is warns


@pytest.mark.parametrize("given", [True, False])
def test_bf16_given_is_kept(build, monkeypatch, given):
    _on(monkeypatch, "cpu", native=not given)
    assert build(bf16=given, use_cpu=True).bf16 is given


@pytest.mark.parametrize(
    ("avx512", "amx", "native"),
    [(True, False, True), (False, True, True), (False, False, False)],
)
def test_cpus_with_avx512_bf16_or_amx_are_native(monkeypatch, avx512, amx, native):
    capabilities = {"avx512_bf16": avx512, "amx_tile": amx}
    monkeypatch.setattr(grpo_config, "has_native_bf16_cpu", has_native_bf16_cpu.__wrapped__)  # not cached
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert computes_bf16_natively("cpu") is native
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # an older torch has only these
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    assert computes_bf16_natively("cpu") is native


def test_cuda_bf16_support_is_queried_without_emulation(monkeypatch):
    # a device that only emulates bfloat16 answers True unless emulation is excluded
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert computes_bf16_natively("cuda") is False


def test_unknown_devices_are_not_native():
    assert computes_bf16_natively("mps") is False


def test_device_choice_follows_use_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert [grpo_config._device_type(True), grpo_config._device_type(False)] == ["cpu", "cuda"]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert grpo_config._device_type(False) == "cpu"


def test_gradient_checkpointing_can_be_turned_off(build):
    assert [build().gradient_checkpointing, build(gradient_checkpointing=False).gradient_checkpointing] == [
        True,
        False,
    ]


def test_the_defaults_warn_about_nothing(build):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build()


def test_dict_and_json_round_trips(build):
    config = build(
        model_init_kwargs={"dtype": torch.float32},
        generation_kwargs={"temperature": 0.7},
        reward_weights=[1.0, 0.5],
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        beta=0.04,
    )
    rebuilt = GRPOConfig(**config.to_dict())
    assert rebuilt.to_dict() == config.to_dict()
    assert json.loads(config.to_json_string())["generation_batch_size"] == 32
    assert json.loads(config.to_json_string())["model_init_kwargs"] == {"dtype": "float32"}


def test_to_dict_changes_nothing(build):
    kwargs = {"dtype": torch.float32, "nested": {"dtype": torch.bfloat16}}
    config = build(model_init_kwargs=kwargs)
    config.to_dict()
    assert kwargs == {"dtype": torch.float32, "nested": {"dtype": torch.bfloat16}}
    assert config.model_init_kwargs == kwargs


def test_pickle_save_and_copy(build, tmp_path):
    config = build(beta=0.04, reward_weights=[1.0])
    torch.save(config, tmp_path / "args.bin")
    loaded = torch.load(tmp_path / "args.bin", weights_only=False)
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), loaded):
        assert type(other) is GRPOConfig
        assert other.to_dict() == config.to_dict()


DERIVED = ("steps_per_generation", "generation_batch_size", "num_generations_eval", "epsilon_high")


def derived(config):
    return tuple(getattr(config, name) for name in DERIVED)


def copies(config):
    yield config
    yield GRPOConfig(**config.to_dict())
    yield from (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)))
    yield dataclasses.replace(config, beta=0.1)


def test_replace_derives_open_settings_again(build):
    for config in copies(build(gradient_accumulation_steps=2)):
        assert derived(config) == (2, 16, 8, 0.2)
        changes = {"gradient_accumulation_steps": 4, "num_generations": 4, "epsilon": 0.1}
        assert derived(dataclasses.replace(config, **changes)) == (4, 32, 4, 0.1)  # as a new configuration
        assert derived(dataclasses.replace(config, generation_batch_size=32)) == (4, 32, 8, 0.2)
        assert derived(dataclasses.replace(config, steps_per_generation=1)) == (1, 8, 8, 0.2)


def test_replace_keeps_given_settings(build):
    given = {"generation_batch_size": 16, "num_generations_eval": 8, "epsilon_high": 0.2}
    for config in copies(build(gradient_accumulation_steps=2, **given)):
        changes = {"gradient_accumulation_steps": 4, "num_generations": 4, "epsilon": 0.1}
        assert derived(dataclasses.replace(config, **changes)) == (2, 16, 8, 0.2)
        with pytest.raises(
            ConfigError, match="generation_batch_size=16 and steps_per_generation=4 are both given"
        ):
            dataclasses.replace(config, steps_per_generation=4)


def test_the_placeholder_of_a_token_is_no_token(build):
    config = build(hub_token="hf_secret")
    assert dataclasses.replace(config, beta=0.1).hub_token == "hf_secret"
    assert GRPOConfig(**config.to_dict()).hub_token is None


def test_repr_hides_tokens(build):
    text = repr(build(hub_token="secret-token"))
    assert "secret-token" not in text
    assert "loss_type=dapo" in text


def test_subclasses_with_fields_of_their_own_work(tmp_path):
    @dataclasses.dataclass
    class Mine(GRPOConfig):
        extra: float = 1.0
        temperature: float = 0.9

    mine = Mine(output_dir=str(tmp_path), bf16=False, extra=2.0, generation_kwargs={"temperature": 0.5})
    assert (mine.extra, mine.temperature) == (2.0, 0.5)
    with pytest.raises(ConfigError, match="extra=nan is not finite"):
        Mine(output_dir=str(tmp_path), bf16=False, extra=float("nan"))


def test_errors_of_training_arguments_stay_theirs(build):
    with pytest.raises(ValueError, match="non-zero --logging_steps") as caught:
        build(logging_steps=0)
    assert not isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("given", [{}, {"gradient_checkpointing": False}, {"gradient_checkpointing": True}])
def test_a_replaced_gradient_checkpointing_reaches_trainer_under_its_new_name(given):
    """transformers 5.24 reads ``activation_checkpointing``, which a copy of the settings has as if given."""
    config = GRPOConfig("out", report_to="none", **given)
    new_name = "activation_checkpointing" if hasattr(config, "activation_checkpointing") else None
    for value in (False, True):
        config = dataclasses.replace(config, gradient_checkpointing=value)
        assert config.gradient_checkpointing is value
        assert getattr(config, new_name or "gradient_checkpointing") == value


@pytest.mark.filterwarnings("error::FutureWarning")
def test_no_setting_of_ours_has_a_name_that_transformers_gives_up():
    GRPOConfig(
        "out", report_to="none", gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
