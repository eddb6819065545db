"""Run files and command lines of ``trl grpo``: commands/cli/trl_keys.py.

Files: ``commands/cli/run_file.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support.workers.launch import run

from groupwise.commands.cli import main
from groupwise.commands.cli.run_file import read_run
from groupwise.compat.trl import OLD_NAMES
from groupwise.errors import ConfigError

#: The keys of ``run_file`` under the names of trl grpo, with an adapter on the attention and an evaluation.
TRL_RUN = {
    "model_name_or_path": ...,
    "model_revision": "main",
    "torch_dtype": "float32",
    "attn_implementation": "eager",
    "dataset_name": "rows",
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "dataset_streaming": False,
    "ignore_bias_buffers": False,
    "reward_funcs": ["my_rewards.even", "my_rewards.constant"],
    "use_peft": True,
    "lora_r": 2,
    "lora_alpha": 6,
    "lora_target_modules": ["q_proj", "v_proj"],
    "use_rslora": False,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "learning_rate": "1e-3",
    "reward_weights": [1.0, 0.5],
}

#: Keys of the GRPO recipes of open-r1 that this library or transformers does not have.
OPEN_R1 = {
    "dataset_prompt_column": "problem",
    "system_prompt": "You are a helpful assistant.",
    "num_processes": 7,
    "vllm_device": "auto",
    "overwrite_output_dir": True,
    "warmup_ratio": 0.1,
    "wandb_entity": "me",
    "wandb_project": "r1",
}


@pytest.fixture
def trl_file(run_file, tiny):
    """Write a run file with the keys of trl grpo, beside the rows of two splits."""
    Path("rows").mkdir(exist_ok=True)

    def write(**changes) -> str:
        ours = {"model": ..., "dataset": ..., "rewards": ..., "num_generations_eval": 2}
        path = run_file(**{**ours, **TRL_RUN, "model_name_or_path": str(tiny), **changes})
        rows = Path("rows.jsonl").read_text()
        for split in ("train", "test"):
            Path("rows", f"{split}.jsonl").write_text(rows)
        return path

    return write


def as_flags(path: str) -> list[str]:
    """Return the content of a run file as flags, those of TRL's documentation: --use_peft, lists in words."""
    flags = []
    for name, value in yaml.safe_load(Path(path).read_text()).items():
        words = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        flags += [f"--{name}", *([] if name == "use_peft" else words)]
    return flags


def test_keys_and_flags_of_trl_describe_the_same_run(trl_file, tiny, capsys):
    path = trl_file()
    runs = [read_run(given, "train") for given in (["--config", path], as_flags(path))]
    for settings, config in runs:
        assert (settings.model, settings.dataset) == (str(tiny), "rows")
        assert (settings.dataset_split, settings.eval_split) == ("train", "test")
        assert settings.rewards == ["my_rewards:even", "my_rewards:constant"]
        # 0.05 and CAUSAL_LM: TRL's defaults, where PEFT has 0.0 and None
        assert settings.lora == {
            **{"r": 2, "lora_alpha": 6, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]},
            **{"task_type": "CAUSAL_LM", "use_rslora": False},
        }
        assert config.model_init_kwargs == {
            **{"revision": "main", "dtype": "float32", "attn_implementation": "eager"}
        }
        assert (config.learning_rate, config.reward_weights) == (1e-3, [1.0, 0.5])
    assert runs[0][0] == runs[1][0] and runs[0][1].to_dict() == runs[1][1].to_dict()
    said = capsys.readouterr().err
    assert said.count("keys of trl grpo") == 2  # once per run
    assert "model_revision, torch_dtype, attn_implementation: model_init_kwargs={'revision': 'main'" in said
    assert "use_peft, lora_r, lora_alpha, lora_target_modules: lora={'r': 2" in said
    assert "dataset_test_split: eval_split='test'" in said


def test_flags_override_the_file_under_either_name(trl_file):
    path = trl_file(model_init_kwargs={"attn_implementation": "eager", "low_cpu_mem_usage": True})
    flags = ["--model", "mine", "--dataset-train-split", "test", "--lora_r", "8", "--dtype", "float32"]
    settings, config = read_run(["--config", path, *flags], "train")
    assert (settings.model, settings.dataset_split, settings.lora["r"]) == ("mine", "test", 8)
    assert config.model_init_kwargs["low_cpu_mem_usage"] is True


def test_parts_without_their_switch_are_said_to_have_no_effect(trl_file, capsys):
    # as in trl grpo: no adapter, no quantization, and no evaluation, whose split is not even read
    path = trl_file(use_peft=False, bnb_4bit_quant_type="fp4", eval_strategy="no", dataset_test_split="none")
    settings, config = read_run(["--config", path], "train")
    assert settings.lora is None and settings.eval_split is None
    assert "quantization_config" not in config.model_init_kwargs
    said = capsys.readouterr().err
    assert "lora_r, lora_alpha, lora_target_modules: no effect without use_peft" in said
    assert "bnb_4bit_quant_type: no effect without load_in_4bit or load_in_8bit" in said
    assert "dataset_test_split: no effect without eval_strategy" in said


def test_the_split_of_an_evaluation_is_test_by_default(trl_file):
    settings, _ = read_run(["--config", trl_file(dataset_test_split=...)], "train")
    assert settings.eval_split == "test"


def test_a_reward_model_comes_before_the_functions(trl_file):
    made = {"my_rewards:with_threshold": {"threshold": 3}}  # not in TRL, whose names are strings
    names = ["think_format_reward", "get_soft_overlong_punishment", made]
    path = trl_file(reward_model_name_or_path="org/judge", reward_funcs=names, reward_weights=...)
    settings, _ = read_run(["--config", path], "train")
    punishment = {"get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}}
    assert settings.rewards == ["org/judge", "think_format_reward", punishment, made]


def test_all_keys_of_a_recipe_that_do_not_exist_are_in_one_message(trl_file):
    path = trl_file(**OPEN_R1, num_generation=4, streaming=True, per_gpu_train_batch_size=4)
    with pytest.raises(ConfigError) as error:
        read_run(["--config", path, "--accelerate_config", "zero3", "--betta=1", "--frequency", "3"], "train")
    first, *lines = str(error.value).splitlines()
    assert first.startswith(f"{len(OPEN_R1) + 6} name(s)")
    elsewhere = '; names of other versions and libraries: "Coming from TRL" in the documentation'
    assert {
        "  - unknown key 'num_generation'; nearest: 'num_generations'",
        "  - unknown flag '--betta'; nearest: '--beta'",
        f"  - unknown flag '--frequency'{elsewhere}",
        f"  - unknown key 'system_prompt'{elsewhere}",
        "  - key 'streaming': it has no counterpart; see \"Coming from TRL\" in the documentation",
        "  - key 'warmup_ratio': write warmup_steps with the same value; below 1 it is a share of all steps",
        "  - key 'per_gpu_train_batch_size': write per_device_train_batch_size",
    } <= {*lines}
    names = [line.split("'")[1] for line in lines]
    assert {*names} == {
        *OPEN_R1, "num_generation", "streaming", "per_gpu_train_batch_size",
        "--accelerate_config", "--betta", "--frequency",
    }  # fmt: skip
    page = Path(__file__).parents[3].joinpath("docs", "migrating.md").read_text()
    assert all(f"`{name}`" in page for name in {*OPEN_R1, "accelerate_config"} - OLD_NAMES.keys())


def test_the_ways_out_are_settings():
    import dataclasses

    from transformers import TrainingArguments

    from groupwise import GRPOConfig
    from groupwise.commands.cli.run_file import RunArguments

    present = {item.name for item in dataclasses.fields(TrainingArguments)}
    assert not present & OLD_NAMES.keys()
    settings = present | {item.name for cls in (GRPOConfig, RunArguments) for item in dataclasses.fields(cls)}
    for text in OLD_NAMES.values():
        assert text.split()[0].rstrip(":") in settings, text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"r": 4}}, "lora={'r': 4} and {'r': 2, .* of TRL's keys contradict each other"),
        ({"rewards": "think_format_reward"}, "rewards='think_format_reward' and .'my_rewards:even'"),
        ({"dtype": "bfloat16"}, "'bfloat16'.* and .*'float32'.* contradict"),
        ({"model_init_kwargs": {"dtype": "float16"}}, "'float16'.* and .*'float32'.* contradict"),
        ({"model_init_kwargs": "fast"}, "model_init_kwargs='fast' and"),
        ({"model": "mine"}, "has model and model_name_or_path"),
        ({"lora_r": "many"}, "invalid int value: 'many'"),
        ({"datasets": [{"path": "org/rows"}]}, "and datasets are both given"),
        ({"env": {"WANDB_PROJECT": "r1"}}, "unknown key 'env'; names of other"),
    ],
)
def test_contradictions_are_refused(trl_file, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_run(["--config", trl_file(**changes)], "train")


@pytest.mark.slow
def test_a_file_and_the_flags_of_trl_train_an_adapter(trl_file):
    path = trl_file()
    done = run("-m", "groupwise.cli", "train", "--config", path, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "groupwise: keys of trl grpo, and what they are here:" in done.stderr
    assert "reward_funcs: rewards=['my_rewards:even', 'my_rewards:constant']" in done.stderr
    saved = json.loads(Path("out/adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["lora_dropout"]) == (2, 6, 0.05)
    assert sorted(saved["target_modules"]) == ["q_proj", "v_proj"]
    assert "| learning_rate | 0.001 |" in Path("out/README.md").read_text()
    assert main(["train", *as_flags(path), "--output_dir", "flags"]) == 0
    again = json.loads(Path("flags/adapter_config.json").read_text())
    assert {**again, "target_modules": sorted(again["target_modules"])} == {
        **saved,
        "target_modules": sorted(saved["target_modules"]),
    }


def test_the_server_command_reads_the_model_of_trl(trl_file, tiny, capsys):
    assert main(["vllm-serve", "--config", trl_file(), "--dry_run"]) == 0
    assert str(tiny) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"max_completion_length": ...}, True), ({"max_completion_length": 256}, False)],
)
def test_a_run_of_trl_names_a_default_that_it_leaves(trl_file, caplog, changes, said):

    read_run(["--config", trl_file(**changes)], "train")
    assert ("max_completion_length=256 (TRL: 512)" in caplog.text) is said
