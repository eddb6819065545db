"""Mistakes in a script are named before a model is loaded, gradients of NaN before they are used.

Files: ``data/dataset_checks.py``, ``data/prompt_checks.py``, ``errors.py``,
``hf/arguments.py``, ``policy/loading.py``.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support import tiny_vlm as tiny
from support.architectures import LINEAR, SIZES
from support.configs import config_of, oldest_version, set_installed
from support.runs import chats, count_reward, policy, prompts, tokenizer, trainer

from groupwise import ConfigError, GRPOConfig, GRPOTrainer, TrainingError
from groupwise.commands.sweeps.scheduler import Sweep
from groupwise.compat.trl import REFUSED_METHODS
from groupwise.data.prompt_checks import PromptCheck
from groupwise.hf.arguments import check_arguments, check_processes
from groupwise.policy.loading import load_policy
from groupwise.rewards import ProcessRewardModel


@pytest.mark.parametrize("name", REFUSED_METHODS)
def test_overrides_of_trl_methods_are_refused_with_the_name_to_use(tmp_path, name):
    subclass = type("Theirs", (GRPOTrainer,), {name: lambda self, *given: None})
    with pytest.raises(
        ConfigError, match=f"Theirs defines {name} .here: {REFUSED_METHODS[name].split(',')[0]}"
    ) as e:
        subclass(policy(), count_reward, GRPOConfig(str(tmp_path), bf16=False), prompts())
    assert "from groupwise.trl_hooks import GRPOConfig, GRPOTrainer" in str(e.value)


def test_a_method_of_trl_that_a_script_sets_on_the_trainer_is_refused(tmp_path):
    patched = trainer(tmp_path)
    patched._compute_loss = lambda model, inputs: torch.zeros(())
    with pytest.raises(ConfigError, match=r"defines _compute_loss .here: compute_policy_loss"):
        patched.train()


def read(record, key):
    return record[key]


class Step(GRPOTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return read(inputs, 0)


class Loss(GRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return read(inputs, "completion_mask")


class Metrics(GRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        getattr(self, "_met" + "rics")["train"]["x"].append(1.0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Step, r"AccumulationWindow has no key 0; its fields are attributes\. A subclass written for TRL: "),
        (
            Loss,
            r"no key 'completion_mask'; its fields are attributes: completion_mask_BT\. A subclass ",
        ),
        (Metrics, r"trainer\._metrics does not exist; use record_metric\(.*\. A subclass written for TRL"),
    ],
)
def test_what_only_trls_trainer_has_is_an_error_that_names_the_counterpart(tmp_path, kind, message):
    with pytest.raises((TypeError, AttributeError), match=rf"{message}.*groupwise\.trl_hooks import"):
        trainer(tmp_path, kind=kind).train()


def test_a_source_that_reads_what_only_trls_trainer_has_is_refused_before_the_model_is_loaded(tmp_path):
    class Appends(GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self._metrics["train"]["x"].append(1.0)

    class Subscripts(GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return (inputs["advantages"] * inputs["completion_mask"]).sum()

    class Calls(Subscripts):
        def compute_loss(self, model, batch, return_outputs=False, num_items_in_batch=None):
            return self._get_per_token_logps_and_entropies(model, batch.completion_ids_BT, None, 4)

    for kind, message in (
        (Appends, r"Appends reads self\._metrics, which does not exist; use record_metric"),
        (Subscripts, r"Subscripts\.compute_loss reads inputs\['advantages'\], but inputs is a MicroBatch"),
        (Calls, r"Calls reads self\._get_per_token_logps_and_entropies.* use compute_logprobs"),
    ):
        with pytest.raises(ConfigError, match=rf"{message}.*from groupwise\.trl_hooks import"):
            kind(str(tmp_path / "absent"), count_reward)


def test_a_subclass_may_have_its_own_attributes_and_dictionaries_of_these_names(tmp_path):
    class Own(GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self._step = getattr(self, "_step", 0) + 1
            if hasattr(self, "_metrics"):
                self._metrics["train"]["x"].append(1.0)
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            inputs = {"steps": self._step}
            return loss * (inputs["steps"] > 0)

    made = trainer(tmp_path, kind=Own)
    made.train()
    assert made._step == 2


def test_a_hook_replaced_on_the_class_of_the_library_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self, *given: None, raising=False)
    with pytest.raises(ConfigError, match=r"defines _calculate_rewards .here: compute_rewards"):
        trainer(tmp_path)


def test_suggested_verbs_exist_and_refused_names_do_not():
    verbs = {
        verb
        for text in REFUSED_METHODS.values()
        if " in a " not in text
        for verb in text.replace(" and ", ", ").split(", ")
    }
    assert verbs and all(callable(getattr(GRPOTrainer, verb)) for verb in verbs)
    assert not [
        name for name in REFUSED_METHODS if hasattr(GRPOTrainer, name) != hasattr(transformers.Trainer, name)
    ]


@pytest.mark.parametrize("args", [{"output_dir": "x"}, transformers.TrainingArguments("x", use_cpu=True)])
def test_arguments_of_another_class_are_refused(args):
    with pytest.raises(ConfigError, match="it must be a groupwise"):
        GRPOTrainer(policy(), count_reward, args, prompts())


def compiled_inside():
    model = policy()
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    return model


class WithValueHead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pretrained_model, self.config = policy(), policy().config


@pytest.mark.parametrize(
    ("wrapped", "named"),
    [
        (lambda: torch.compile(policy(), backend="eager"), "OptimizedModule"),
        (lambda: torch.compile(get_peft_model(policy(), LoraConfig()), backend="eager"), "OptimizedModule"),
        (lambda: torch.nn.DataParallel(policy()), "DataParallel"),
        (compiled_inside, "OptimizedModule"),
        (WithValueHead, "WithValueHead"),
        (lambda: Path("model"), "PosixPath"),
    ],
    ids=["compiled", "adapter", "data parallel", "inside", "value head", "path"],
)
def test_a_wrapper_that_renames_the_weights_is_refused(tmp_path, wrapped, named):
    found = f" is or contains a {named}; allowed: .*torch_compile=True compiles it"
    with pytest.raises(ConfigError, match=f"model{found}"):
        GRPOTrainer(wrapped(), count_reward, GRPOConfig(str(tmp_path), bf16=False), prompts())
    with pytest.raises(ConfigError, match=f"model{found}"):
        Sweep(wrapped(), count_reward, {"a": GRPOConfig(str(tmp_path / "a"), bf16=False)}, prompts())
    made = trainer(tmp_path)
    with pytest.raises(ConfigError, match=f"ref_model{found}"):
        made.ref_model = wrapped()


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), torch.nn.DataParallel])
def test_a_wrapped_reward_model_is_refused(tmp_path, wrap):
    with pytest.raises(ConfigError, match=r"reward '.*' is or contains a (OptimizedModule|DataParallel);"):
        trainer(tmp_path, wrap(policy()))


def test_a_model_that_is_compiled_in_place_keeps_its_names(tmp_path):
    model = policy()
    model.compile(backend="eager")
    assert trainer(tmp_path, model=model).model.state_dict().keys() == policy().state_dict().keys()


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
        ({"prompt": ["w1"] * 8}, r"is a dict of columns; pass datasets\.Dataset\.from_dict\(train_dataset\)"),
        (prompts().to_pandas(), r"is a DataFrame; pass datasets\.Dataset\.from_pandas\(train_dataset\)"),
        (prompts().data.table, r"is a Table; pass datasets\.Dataset\(train_dataset\)"),
        (["item 1", "item 2"], "has the row 'item 1', of type str; a row is a dictionary with a 'prompt'"),
        ([{"prompt": "w1"}, "item 2"], "has the row 'item 2', of type str"),
    ],
    ids=["splits", "name", "columns", "frame", "table", "texts", "one text"],
)
def test_datasets_of_a_wrong_type_are_refused(tmp_path, dataset, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, train_dataset=dataset)


def wants_one(completion, answer):
    return 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenizer": None}, "argument 'tokenizer': write processing_class"),
        ({"reward_func": None}, "unknown argument 'reward_func'; nearest: 'reward_funcs'"),
        ({"learning_rate": 1e-6}, "argument 'learning_rate': pass it to GRPOConfig"),
        (
            {"args": count_reward},
            r"builtins\.function; it must be a .*: model, reward_funcs, args, ",
        ),
        ({"reward_funcs": [1.0, 0.0]}, r"holds 1\.0 \(float\); .*pass a function itself, not the result of"),
        (
            {"reward_funcs": wants_one},
            r"an entry .*: rename completion to completions, and add \*\*",
        ),
        ({"reward_funcs": "correct"}, r"reward model 'correct' .a text is the id .* pass a function itself"),
        ({"peft_config": {"r": 16}}, r"peft_config is a dict; .* as peft\.LoraConfig\(\*\*\{'r': 16\}\)"),
    ],
)
def test_arguments_of_a_wrong_kind_are_named_before_the_model_is_loaded(tmp_path, arguments, message):
    kept = {"model": "absent", "reward_funcs": count_reward, "train_dataset": prompts()}
    kept["args"] = GRPOConfig(str(tmp_path), bf16=False, max_completion_length=4)

    class Theirs(GRPOTrainer):
        def __init__(self, **given):
            super().__init__(**given)

    for kind in (GRPOTrainer, Theirs):
        with pytest.raises(ConfigError, match=message):
            kind(**{**kept, **arguments})


def test_rewards_that_are_all_none_are_said_once(tmp_path, caplog):
    trainer(tmp_path, lambda completions, **_: [None] * len(completions)).train()
    assert caplog.text.count("every reward of a generation is None, and nothing is trained") == 1


class Rows(list):
    """Rows that are not in an Arrow table, which has columns of one type and no lone surrogates."""

    column_names = ("prompt",)


def rows(*given: object) -> Rows:
    return Rows({"prompt": prompt} for prompt in given)


def chat(content: object, **more: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content, **more}]


BLOCKS = [{"type": "text", "text": "w3"}]
NO_TEMPLATE = {"chat_template": None}


@pytest.mark.parametrize(
    ("prompt", "tokenizer_changes", "message"),
    [
        ("w1 \ud800", {}, r"the prompt has a lone surrogate, .*: 'w1 \\ud800'; repair the text"),
        (chat("w1 \ud800"), {}, "the prompt has a lone surrogate"),
        (chat("w1", name=["\udfff"]), {}, "the prompt has a lone surrogate"),
        (chat(None), {}, r"message 0 of the prompt has no content, .*; give it a text, if only ''"),
        ([*chat("w1"), {"role": "assistant", "tool_calls": None}], {}, "message 1 of the prompt has no con"),
        (chat([*BLOCKS, {"type": "image"}]), {}, r"block {'type': 'image'}, but a tokenizer reads text"),
        (chat(["w3"]), {}, "content block 'w3', but a tokenizer reads text only; allowed: {'type': 'text',"),
        (chat("w1"), {"chat_template": "{% for m in messages %}w2{% endfor %}"}, r"\(it leaves out 'w1'\): "),
        (chat("w1"), {"chat_template": "{{ raise_exception('who?') }}"},
         r"cannot render the prompt \(TemplateError: who\?\): .*; change the messages"),
        (chat("w1"), NO_TEMPLATE, "is a list of messages, but the .* has no chat template; set proc"),
        (chat(""), {"chat_template": "{% if false %}w{% endif %}"}, "chat template renders nothing for"),
        ("  ", {}, "the tokenizer finds no token in the prompt '  '; change the prompt$"),
        ("w1 w99", {"added": ["w99"]}, r"the token 'w99' \(id 32\), .* 32 token embeddings and .* 33 tokens"),
        (chat("w1 w99"), {"added": ["w99"]}, r"the token 'w99' \(id 32\), .*resize_token_embeddings\(33\)"),
    ],
)  # fmt: skip
def test_a_prompt_that_makes_no_tokens_is_named_before_the_model_is_loaded(
    tmp_path, monkeypatch, prompt, tokenizer_changes, message
):
    reads_text = tokenizer()
    reads_text.add_tokens(tokenizer_changes.get("added", []))
    reads_text.chat_template = tokenizer_changes.get("chat_template", reads_text.chat_template)
    monkeypatch.setattr("groupwise.trainer.prepare_policy", None)
    dataset = rows("w1", "w2", "w1 w2", prompt, "w3")
    with pytest.raises(ConfigError, match=f"^train_dataset, row 3: .*{message}"):
        trainer(tmp_path, train_dataset=dataset, processing_class=reads_text)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=f"^eval_dataset, row 3: .*{message}"):
        trainer(tmp_path, processing_class=reads_text).evaluate(dataset)


def test_prompts_of_every_kind_that_makes_tokens_are_accepted(tmp_path):
    """Content blocks under a template for them, calls without content, added tokens that no prompt has."""
    reads_blocks = tokenizer()
    reads_blocks.chat_template = (
        "{% for m in messages %}<user> {% if m.content is string %}{{ m.content }}{% else %}"
        "{% for block in m.content or [] %}{{ block.text }}{% endfor %}{% endif %} "
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
    )
    reads_blocks.add_tokens(["w99"])
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w1"}}]}]
    given = rows("w1", chat(""), chat(BLOCKS), chat("w1") + calls, "w1 \U0001f600")
    run = trainer(tmp_path, train_dataset=given, processing_class=reads_blocks, max_steps=1)
    run.train()
    own = trainer(
        tmp_path,
        train_dataset=rows(*[chat("w1 w2")] * 3, chat(None)),
        processing_class=without_template(),
        rollout_func=lambda prompts, trainer: {"prompt_ids": [[3]] * 4, "completion_ids": [[4, 5]] * 4},
        max_steps=1,
    )
    own.train()


def without_template():
    plain = tokenizer()
    plain.chat_template = None
    return plain


def test_a_tokenizer_without_pad_and_eos_token_is_refused_before_the_model_is_loaded(tmp_path):
    bare = tokenizer()
    bare.pad_token = bare.eos_token = None
    with pytest.raises(
        ConfigError, match=r"of the policy has neither a pad token nor an EOS token, .*; set tok"
    ):
        trainer(tmp_path, model="a-model/that-is-not-there", processing_class=bare)


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_a_reward_model_needs_its_own_tokenizer_before_the_policy_is_loaded(tmp_path, kind):
    def judge(size: int) -> transformers.PreTrainedModel:
        config = policy(vocab_size=size).config
        config.num_labels = 1
        names = {"sequence": "LlamaForSequenceClassification", "token": "LlamaForTokenClassification"}
        return getattr(transformers, names[kind])(config)

    title = f"reward model 'LlamaFor{kind.capitalize()}Classification'"
    with pytest.raises(
        ConfigError, match=f"{title} has no tokenizer: .*; pass it in reward_processing_classes"
    ):
        trainer(tmp_path, judge(32), model="a-model/that-is-not-there")
    with pytest.raises(
        ConfigError, match=rf"{title} has 16 .* has 32 tokens \('w\d+' has none\): it is another"
    ):
        trainer(tmp_path, judge(16), model="a-model/that-is-not-there", reward_processing_classes=tokenizer())
    extended = tokenizer()
    extended.add_tokens(["<image>"])  # released so with models of one family
    separator = {} if kind == "sequence" else {"step_separator": "w1"}
    reward = ProcessRewardModel(judge(32), **separator) if separator else judge(32)
    trainer(tmp_path, reward, reward_processing_classes=extended)


def test_stop_strings_are_refused_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"'stop_strings': \['w3'\].*eos_token_id.*'stop': "):
        trainer(tmp_path, model="a-model/that-is-not-there", generation_kwargs={"stop_strings": ["w3"]})


def test_a_loss_or_model_without_gradient_says_where_it_was_lost(tmp_path):
    class Detached(GRPOTrainer):
        def compute_policy_loss(self, batch, logprobs):
            output = super().compute_policy_loss(batch, logprobs)
            return output.__class__(output.loss.detach(), output.bonus_entropy, output.metrics)

    class Disabled(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            torch.set_grad_enabled(False)

    with pytest.raises(
        TrainingError, match=r"loss of step 1 has no gradient: compute_policy_loss or .* detached"
    ):
        trainer(tmp_path, kind=Detached).train()
    try:
        with pytest.raises(
            TrainingError, match=r"of step 1 .* a callback or an override left torch\.set_grad"
        ):
            trainer(tmp_path, callbacks=[Disabled()]).train()
    finally:
        torch.set_grad_enabled(True)
    frozen = trainer(tmp_path, model=policy().requires_grad_(False))
    with pytest.raises(
        ConfigError, match=r"no parameter of the LlamaForCausalLM requires a gradient, .*peft_conf"
    ):
        frozen.train()


def test_too_few_completions_name_the_method_that_returned_them(tmp_path):
    class Three(GRPOTrainer):
        def generate_rollouts(self, request):
            return super().generate_rollouts(request).select(range(3))

    with pytest.raises(ConfigError, match="generate_rollouts returned 3 completions for 4 rows"):
        trainer(tmp_path, kind=Three).train()


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


@pytest.fixture
def not_loaded(monkeypatch):
    """The policy must not be loaded: what is tested is found before."""
    monkeypatch.setattr("groupwise.trainer.prepare_policy", lambda *_: pytest.fail("the policy was loaded"))


def by_solution(completions, solution, **_):
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    "where",
    [
        {"train_dataset": prompts()},
        {"train_dataset": [{"prompt": "w1", "row": i} for i in range(8)]},
        {"train_dataset": prompts().add_column("solution", ["1"] * 8), "eval_dataset": {"hard": prompts()}},
    ],
    ids=["table", "list", "evaluation"],
)
def test_a_reward_that_requires_an_absent_column_is_refused(tmp_path, not_loaded, where):
    dataset = r"eval_dataset\['hard'\]" if "eval_dataset" in where else "train_dataset"
    message = (
        f"'by_solution' requires 'solution', which is no column of {dataset}: 'prompt', 'row'; nearest: "
    )
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, by_solution, **where)
    message = "requires 'prompt', which is no column .*nearest: 'prompts'"
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, lambda prompt, **_: [1.0])


def test_columns_that_are_not_in_the_dataset_may_come_from_elsewhere(tmp_path):
    class AddsColumns(GRPOTrainer):
        def generate_rollouts(self, request):
            return super().generate_rollouts(request)

    trainer(tmp_path, by_solution, kind=AddsColumns)
    trainer(tmp_path, by_solution, rollout_func=lambda prompts, trainer: {})
    trainer(tmp_path, by_solution, train_dataset=prompts().with_transform(lambda rows: rows))
    trainer(tmp_path, lambda completions, solution=None, **_: [1.0] * len(completions))


@pytest.mark.parametrize("kind", ["model", "reward"])
def test_a_wrong_id_is_named_before_the_policy_is_loaded(tmp_path, not_loaded, kind):
    given = {"model": "no/such-model"} if kind == "model" else {"rewards": "no/such-model"}
    message = f"^{'reward ' * (kind == 'reward')}model 'no/such-model'.* raised OSError: "
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **given)


def with_bos(**changes):
    """The tokenizer with a BOS token that it adds, as those of Llama and Gemma do."""
    from tokenizers.processors import TemplateProcessing

    made = tokenizer()
    made.add_special_tokens({"bos_token": "w0"})
    bos = made.bos_token_id
    made.backend_tokenizer.post_processor = TemplateProcessing(single="w0 $A", special_tokens=[("w0", bos)])
    return made


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("w0 w1", "train_dataset, row 1: the prompt begins with 'w0', and the tokenizer adds another one"),
        ('[{"role": "user", "content": "w1"}]', "row 1: the prompt is a string that looks like a list of"),
        ("[{'content': 'w1', 'role': 'user'}]", "row 1: the prompt is a string that looks like a list of"),
    ],
    ids=["bos", "json", "repr"],
)
def test_a_text_that_was_meant_otherwise_is_said_once(tmp_path, caplog, prompt, message):
    trainer(tmp_path, train_dataset=rows("w1", *[prompt] * 7), processing_class=with_bos())
    said = [record.getMessage() for record in caplog.records if "row 1" in record.getMessage()]
    assert len(said) == 1 and message in said[0]
    assert not [record for record in caplog.records if "row 2" in record.getMessage()]


def test_texts_that_only_look_so_are_not_mentioned(tmp_path, caplog):
    """A BOS in the middle, one that the tokenizer does not add, and lists that are no messages."""
    texts = rows("w1 w0", '["role", {"a": 1}] w1', "[{'name': 'role'}] w1", "role: user w1")
    trainer(tmp_path, train_dataset=texts, processing_class=with_bos())
    trainer(tmp_path, train_dataset=rows(*["w0 w1"] * 4))
    assert "row" not in caplog.text


def test_a_tokenizer_of_another_model_is_said(tmp_path, caplog):
    trainer(tmp_path, model=policy(vocab_size=64))  # half of the embeddings are used
    assert "another model" not in caplog.text
    trainer(tmp_path, model=policy(vocab_size=65))
    assert (
        "the tokenizer has 32 tokens and the model embeds 65: it is probably of another model" in caplog.text
    )


def test_fsdp_shards_the_layers_that_a_model_has(tmp_path):
    """A Qwen3.5 for text names the blocks of a vision tower, which accelerate would look for."""
    config = transformers.Qwen3_5TextConfig(**{**SIZES, "vocab_size": 32}, **LINEAR)
    run = trainer(tmp_path, model=transformers.Qwen3_5ForCausalLM(config))
    assert set(run.model._no_split_modules) == {"Qwen3_5DecoderLayer"}


def test_template_kwargs_that_nothing_reads_are_named(tmp_path, caplog):
    _, processor = tiny.build("gemma3")
    text = tokenizer()
    text.chat_template = processor.chat_template.replace("<assistant> ", "{{ thinks }}<assistant> ")
    others = {"continue_final_message": True, "processor_kwargs": {"do_normalize": False}, "padding": False}
    unread = {"thnks": True, "do_normalize": False}
    for processing_class in (processor, text):
        PromptCheck("rows", processing_class, config_of(chat_template_kwargs={**unread, **others}), None)
    assert "chat_template_kwargs" not in caplog.text  # user code renders
    for processing_class in (processor, text):
        given = config_of(chat_template_kwargs={**unread, **others, "thinks": True})
        PromptCheck("rows", processing_class, given, None, renders=True)
    named = re.findall(r"chat_template_kwargs\['(\w+)'\] has no effect: .*processor_kwargs", caplog.text)
    assert sorted(named) == ["do_normalize", "thinks", "thnks"]  # each once; the processor has no "thinks"


def test_a_tokenizer_that_renders_itself_may_read_any_template_kwarg(tmp_path, caplog):
    class Own(transformers.PreTrainedTokenizerFast):
        def apply_chat_template(self, conversation, **kwargs):
            return kwargs["style"]

    given = config_of(chat_template_kwargs={"style": "plain"})
    PromptCheck("rows", Own(tokenizer_object=tokenizer()._tokenizer), given, None, renders=True)
    assert "chat_template_kwargs" not in caplog.text
