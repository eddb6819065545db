"""Mistakes in a script are named before a model is loaded, gradients of NaN before they are used."""

from __future__ import annotations

from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers
from support.configs import oldest_version, set_installed
from support.runs import chats, count_reward, policy, prompts, tokenizer, trainer

from groupwise import ConfigError, GRPOConfig, GRPOTrainer, TrainingError
from groupwise.config.arguments import TRL_METHODS, check_arguments, check_processes
from groupwise.errors import warn_once
from groupwise.policy.loading import load_policy


@pytest.mark.parametrize("name", TRL_METHODS)
def test_overrides_of_trl_methods_are_refused_with_the_name_to_use(tmp_path, name):
    subclass = type("Theirs", (GRPOTrainer,), {name: lambda self, *given: None})
    with pytest.raises(
        ConfigError, match=f"Theirs defines {name} .here: {TRL_METHODS[name].split(',')[0]}"
    ) as e:
        subclass(policy(), count_reward, GRPOConfig(str(tmp_path), bf16=False), prompts())
    assert "from groupwise.trl_hooks import GRPOConfig, GRPOTrainer" in str(e.value)


def test_a_method_of_trl_that_a_script_sets_on_the_trainer_is_refused(tmp_path):
    patched = trainer(tmp_path)
    patched._compute_loss = lambda model, inputs: torch.zeros(())
    with pytest.raises(ConfigError, match=r"defines _compute_loss .here: compute_policy_loss"):
        patched.train()


def test_suggested_verbs_exist_and_refused_names_do_not():
    verbs = {
        verb
        for text in TRL_METHODS.values()
        if " in a " not in text
        for verb in text.replace(" and ", ", ").split(", ")
    }
    assert verbs and all(callable(getattr(GRPOTrainer, verb)) for verb in verbs)
    assert not [name for name in TRL_METHODS if hasattr(GRPOTrainer, name)]


@pytest.mark.parametrize("args", [{"output_dir": "x"}, transformers.TrainingArguments("x", use_cpu=True)])
def test_arguments_of_another_class_are_refused(args):
    with pytest.raises(ConfigError, match="it must be a groupwise"):
        GRPOTrainer(policy(), count_reward, args, prompts())


def test_an_output_directory_below_a_file_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/run' cannot be created"):
        trainer(tmp_path / "file" / "run", model="a-model/that-is-not-there")


def test_a_missing_directory_is_not_read_as_a_hub_id(tmp_path):
    with pytest.raises(ConfigError, match="nothing' is not a directory"):
        trainer(tmp_path, model=str(tmp_path / "nothing"))


def test_a_model_without_name_or_path_needs_a_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match="pass the tokenizer or processor as processing_class"):
        GRPOTrainer(policy(), count_reward, GRPOConfig(str(tmp_path), bf16=False), prompts(64))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            datasets.DatasetDict(train=prompts(), test=prompts()),
            "is a DatasetDict of 'train', 'test'; pass one",
        ),
        ("trl-lib/tldr", "is the string 'trl-lib/tldr'; pass a dataset"),
    ],
    ids=["splits", "name"],
)
def test_datasets_of_a_wrong_type_are_refused(tmp_path, dataset, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, train_dataset=dataset)


def test_evaluation_without_a_dataset_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="eval_strategy='steps' needs an eval_dataset"):
        trainer(tmp_path, eval_strategy="steps")


def test_evaluate_names_the_missing_column(tmp_path):
    made = trainer(tmp_path)
    with pytest.raises(ConfigError, match="there is no eval_dataset"):
        made.evaluate()
    with pytest.raises(ConfigError, match="eval_dataset has no 'prompt' column; its columns are 'row'"):
        made.evaluate(prompts().remove_columns("prompt"))


def test_the_stock_count_of_tokens_is_left_to_num_tokens(tmp_path, caplog):
    warn_once.cache_clear()
    made = trainer(tmp_path, include_num_input_tokens_seen=True, max_steps=1)
    made.train()
    assert "include_num_input_tokens_seen='all' is ignored" in caplog.text
    assert made.state.log_history[0]["num_tokens"] > 0


def test_several_gpus_of_one_process_are_refused_with_the_command_to_use(tmp_path, monkeypatch):
    """``Trainer`` would wrap the model in ``DataParallel``, with twice the updates per generation."""
    monkeypatch.setattr(GRPOConfig, "n_gpu", 2)
    with pytest.raises(ConfigError, match=r"sees 2 GPUs, .*`accelerate launch --num_processes 2 SCRIPT`"):
        trainer(tmp_path, model="a/model that is never loaded")
    spread = policy()
    spread.hf_device_map = {"": "cpu"}  # not over several GPUs
    with pytest.raises(ConfigError, match="sees 2 GPUs"):
        trainer(tmp_path, model=spread)


def test_parallelism_that_the_launcher_sets_is_refused(tmp_path):
    check_processes(GRPOConfig(str(tmp_path), bf16=False), SimpleNamespace(cp_size=1, tp_size=None))
    with pytest.raises(ConfigError, match=r"parallelism_config=\(tp_size=2\): log-probs are"):
        check_processes(GRPOConfig(str(tmp_path), bf16=False), SimpleNamespace(tp_size=2))


def test_an_old_deepspeed_is_refused(tmp_path, monkeypatch):
    oldest = oldest_version("deepspeed")
    set_installed(monkeypatch, "deepspeed", "0.18.9")
    args = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True)
    args.deepspeed_plugin = object()  # as an argument or a launcher sets it
    with pytest.raises(ConfigError, match=f"deepspeed>={oldest}, and 0.18.9 is installed, with which ZeRO-2"):
        check_arguments("a/model that is never loaded", args)
    set_installed(monkeypatch, "deepspeed", oldest)
    assert check_arguments("a/model that is never loaded", args) is args


def test_a_reward_that_takes_no_further_arguments_is_refused_at_once(tmp_path):
    def narrow(completions, prompts):
        return [0.0] * len(completions)

    with pytest.raises(ConfigError, match="'narrow' does not accept completion_ids, trainer_state"):
        trainer(tmp_path, narrow, train_dataset=chats())


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("given", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_and_torch_dtype_set_the_dtype_of_the_weights(tmp_path, key, given):
    policy().save_pretrained(tmp_path)
    config = GRPOConfig(str(tmp_path / "run"), bf16=False, model_init_kwargs={key: given})
    assert load_policy(str(tmp_path), config).dtype is torch.bfloat16
    assert config.model_init_kwargs == {key: given}


def test_an_unknown_dtype_is_refused_with_the_nearest(tmp_path):
    config = GRPOConfig(str(tmp_path), bf16=False, model_init_kwargs={"dtype": "bf16"})
    with pytest.raises(ConfigError, match=r"dtype='bf16'.*nearest valid: 'bfloat16'"):
        load_policy(str(tmp_path), config)


def test_gradients_that_are_not_finite_end_training_before_they_reach_the_weights(tmp_path):
    class Spoilt(GRPOTrainer):
        def compute_policy_loss(self, batch, logprobs):
            output = super().compute_policy_loss(batch, logprobs)
            factor = float("nan") if self.state.global_step == 1 else 1.0
            return output.__class__(output.loss * factor, output.bonus_entropy, output.metrics)

    config = GRPOConfig(
        str(tmp_path), bf16=False, use_cpu=True, report_to="none", max_steps=3, max_completion_length=4,
        num_generations=4, per_device_train_batch_size=4, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    made = Spoilt(policy(), count_reward, config, prompts(), processing_class=tokenizer())
    with pytest.raises(TrainingError, match="the gradient norm of step 2 is nan; training ends before"):
        made.train()
    assert all(parameter.isfinite().all() for parameter in made.model.parameters())
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1"]
