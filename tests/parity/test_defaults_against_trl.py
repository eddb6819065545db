"""Fields and defaults of both configurations, and configurations that TRL wrote.

Files: ``compat/trl.py``, ``trl_hooks/config.py``.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import generate_docs
import pytest
import setting_guides
import yaml
from support.configs import messages
from transformers import HfArgumentParser
from transformers.quantizers.auto import AutoQuantizationConfig

from groupwise import GRPOConfig, trl_hooks
from groupwise.commands.cli.run_file import RunArguments, read_run
from groupwise.commands.cli.sources import lora_config
from groupwise.commands.cli.trl_keys import TRL_KEYS
from groupwise.compat.trl import TRL_DEFAULTS, TRL_SPELLINGS, TRL_VERSION
from groupwise.hf.arguments import check_arguments

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.parity

MIGRATING = Path(__file__).parents[2] / "docs" / "migrating.md"

#: Fields that are resolved when our configuration is built, TRL's when the trainer is.
RESOLVED: dict[str, object] = {"epsilon_high": 0.2, "num_generations_eval": 8}


def defaults(config_class: type) -> dict[str, object]:
    return {
        item.name: item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        for item in dataclasses.fields(config_class)
    }


def their_config(directory: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trl.GRPOConfig(output_dir=str(directory), report_to="none", bf16=False, use_cpu=True)


def assert_holds(config: GRPOConfig, dumped: dict[str, Any]) -> None:
    """Every field of ``dumped`` has its value in ``config``."""
    ours = config.to_dict()
    assert {name: ours[name] for name in dumped} == {**dumped, **RESOLVED}


def test_the_version_is_the_one_that_is_compared():
    assert trl.__version__ == TRL_VERSION


def test_every_field_of_trl_exists():
    assert set(defaults(trl.GRPOConfig)) <= set(defaults(GRPOConfig))
    own = {name for names in generate_docs.field_groups().values() for name in names}
    assert own - set(defaults(trl.GRPOConfig)) == setting_guides.NOT_IN_TRL


def test_table_of_defaults_that_differ():
    ours, theirs = defaults(GRPOConfig), defaults(trl.GRPOConfig)
    different = {name: value for name, value in theirs.items() if repr(ours[name]) != repr(value)}
    assert different == {**TRL_DEFAULTS, **TRL_SPELLINGS}


def test_migration_guide_has_a_row_for_each_of_them():
    rows = MIGRATING.read_text().splitlines()
    ours = defaults(GRPOConfig)
    different = {**TRL_DEFAULTS, **TRL_SPELLINGS}
    table = [f"| `{name}` | `{ours[name]!r}` | `{value!r}` |" for name, value in different.items()]
    start = rows.index(table[0])
    assert rows[start : start + len(table)] == table
    assert not rows[start + len(table)].startswith("|")


def test_readme_names_the_defaults_that_change_a_run():
    readme = (MIGRATING.parents[1] / "README.md").read_text()
    ours = defaults(GRPOConfig)
    for name, value in TRL_DEFAULTS.items():
        assert f"`{name}` ({ours[name]}, TRL {value})" in readme


def test_the_configuration_of_trl_hooks_has_the_defaults_of_trl(tmp_path):
    ours, theirs = defaults(trl_hooks.GRPOConfig), defaults(trl.GRPOConfig)
    assert {name: repr(ours[name]) for name in theirs} == {name: repr(theirs[name]) for name in theirs}
    settings = {"output_dir": str(tmp_path), "report_to": "none", "bf16": False, "use_cpu": True}
    config = trl_hooks.GRPOConfig(**settings)
    assert_holds(config, their_config(tmp_path).to_dict())
    assert type(pickle.loads(pickle.dumps(config))) is trl_hooks.GRPOConfig
    flags = ["--output_dir", str(tmp_path), "--top_k", "7", "--bf16", "false", "--use_cpu"]
    (parsed,) = HfArgumentParser(trl_hooks.GRPOConfig).parse_args_into_dataclasses(flags)
    assert (parsed.top_k, parsed.max_completion_length) == (7, 512)


def test_a_script_of_trl_names_the_defaults_that_it_leaves(tmp_path, caplog, monkeypatch):
    common = {"output_dir": str(tmp_path), "report_to": "none", "bf16": False, "use_cpu": True}
    for config in (
        trl_hooks.GRPOConfig(**common, beta=0.1),
        GRPOConfig(**common, max_completion_length=64),  # without a KL, its correction has no effect
        GRPOConfig(**common, max_completion_length=256),  # given, though it is the default
        trl_hooks.GRPOConfig(**common, max_completion_length=256),
    ):
        check_arguments("model", config)
    assert messages(caplog) == []
    with monkeypatch.context() as patch:  # a script that is not written for TRL
        for name in ("trl", "groupwise.trl_hooks"):
            patch.delitem(sys.modules, name)
        check_arguments("model", GRPOConfig(**common, beta=0.1))
    assert messages(caplog) == []
    flags = ["--output_dir", str(tmp_path), "--beta", "0.1", "--bf16", "false", "--use_cpu"]
    (parsed,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(flags)  # gives all fields
    for config in (GRPOConfig(**common, beta=0.1), parsed):
        check_arguments("model", config)
    (message,) = messages(caplog)
    assert message.startswith(
        "left at a default that differs from that of TRL 1.16.0: max_completion_length=256 (TRL: 512), "
        "use_bias_correction_kl=False (TRL: True); set it, or take GRPOConfig from groupwise.trl_hooks"
    )


@pytest.mark.parametrize("how", ["arguments", "dict", "json", "yaml"])
def test_a_configuration_that_trl_wrote_loads_without_a_warning(how, tmp_path, caplog):
    theirs = their_config(tmp_path)
    dumped, file = theirs.to_dict(), tmp_path / f"config.{how}"
    parser = HfArgumentParser(GRPOConfig)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        if how == "arguments":
            config = GRPOConfig(**dumped)
        elif how == "dict":
            (config,) = parser.parse_dict(dumped)
        elif how == "json":
            file.write_text(theirs.to_json_string())
            (config,) = parser.parse_json_file(file)
        else:
            file.write_text(yaml.safe_dump(dumped))
            (config,) = parser.parse_yaml_file(file)
    assert_holds(config, dumped)
    assert [record for record in caplog.records if record.name.startswith("groupwise")] == []


def script_classes() -> list[type]:
    """The classes that trl grpo parses, GRPOConfig excepted: all of its fields are ours."""
    from trl.scripts.grpo import GRPOScriptArguments

    return [GRPOScriptArguments, trl.ModelConfig, trl.DatasetMixtureConfig]


def test_every_key_of_trl_grpo_is_in_the_table():
    theirs = {name: value for cls in script_classes() for name, value in defaults(cls).items()}
    same = {item.name for item in dataclasses.fields(RunArguments)} & theirs.keys()
    assert same == {"dataset_config", "datasets"}
    assert TRL_KEYS.keys() - {"torch_dtype"} == theirs.keys() - same
    ours = {"model_revision": "main", "dtype": "float32", "dataset_train_split": "train"}
    for name, key in TRL_KEYS.items() - {("torch_dtype", TRL_KEYS["torch_dtype"])}:
        if key.default is not None:
            assert key.default == theirs[name], name
        elif name != "dataset_test_split":  # translate() has the default, which depends on eval_strategy
            assert not theirs[name] or theirs[name] == ours[name], name


@pytest.mark.parametrize(
    "given",
    [
        {"use_peft": True},
        {
            **{"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": True},
            **{"lora_target_modules": ["all-linear"], "lora_modules_to_save": ["lm_head"], "use_dora": True},
        },
        {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "lora_target_parameters": ["a.b"]},
        {"use_peft": True, "load_in_8bit": True, "lora_task_type": "SEQ_CLS", "torch_dtype": "auto"},
        {"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16", "use_bnb_nested_quant": True},
        {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "lora_r": 2},
        {"lora_r": 4, "attn_implementation": "sdpa", "model_revision": "v2", "dtype": "float16"},
    ],
)
def test_keys_of_trl_grpo_build_what_they_build_in_trl(tmp_path, given):
    from trl.scripts.grpo import make_parser

    base = {"model_name_or_path": "org/model", "dataset_name": "org/rows", "output_dir": str(tmp_path)}
    base |= {"report_to": "none", "bf16": False, "use_cpu": True, "reward_funcs": ["think_format_reward"]}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**base, **given}))
    settings, config = read_run(["--config", str(path)], "train")
    renamed = {"dtype" if name == "torch_dtype" else name: value for name, value in given.items()}
    path.write_text(yaml.safe_dump({**base, **renamed}))  # TRL 1.16 has the new name alone
    _, _, model, _ = make_parser().parse_args_and_config(["--config", str(path)])
    adapter, theirs = lora_config(settings), trl.get_peft_config(model)
    assert (adapter and adapter.to_dict()) == (theirs and theirs.to_dict())
    options = dict(config.model_init_kwargs or {})
    quantization = options.pop("quantization_config", None)
    theirs = trl.get_quantization_config(model)
    ours = quantization and AutoQuantizationConfig.from_dict(quantization)
    assert (ours and ours.to_dict()) == (theirs and theirs.to_dict())
    loading = {"revision": "main", "dtype": "float32", "attn_implementation": None, **options}
    fields = (model.model_revision, model.dtype, model.attn_implementation)
    assert tuple(loading.values()) == fields
