"""The trainer for subclasses written for TRL: refusals, schedule, evaluation, agents, checkpoints.

Files: ``trl_hooks/attributes.py``, ``trl_hooks/checks.py``, ``trl_hooks/trainer.py``.
"""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from support import agent_runs
from support.runs import count_reward, policy, prompts, tokenizer, trainer
from transformers import GenerationConfig, TrainerCallback

from groupwise import ConfigError, GRPOCallback, RewardError
from groupwise import GRPOTrainer as PlainTrainer
from groupwise.compat.trl import UNREAD_ATTRIBUTES
from groupwise.policy.logprobs import LogprobComputer
from groupwise.records import Row
from groupwise.reporting.rollout_files import FOLDER, Recording
from groupwise.trl_hooks import GRPOTrainer, checks


def run(directory, kind=GRPOTrainer, rewards=count_reward, **given):
    return trainer(directory, rewards, kind, **given)


@pytest.mark.parametrize("name", checks.REFUSED_METHODS)
def test_an_override_that_would_not_be_called_is_refused(tmp_path, name):
    subclass = type("Theirs", (GRPOTrainer,), {name: lambda self, *given: None})
    counterpart = checks.REFUSED_METHODS[name].split(",")[0]
    with pytest.raises(ConfigError, match=f"Theirs defines {name} .here: {counterpart}"):
        run(tmp_path, subclass)
    patched = run(tmp_path)
    setattr(patched, name, lambda *given: None)
    with pytest.raises(ConfigError, match=f"defines {name} .here"):
        patched.train()


@pytest.mark.parametrize("name", checks.REFUSED_SETTINGS)
def test_settings_that_the_hooks_cannot_express_are_refused(tmp_path, name):
    args = run(tmp_path).args
    default, reason, counterpart = checks.REFUSED_SETTINGS[name]
    assert getattr(args, name, None) == default
    other: dict[str, object] = {"dynamic_sampling": True, "rollout_staleness": 2, "rollout_on_error": "retry"}
    other |= {"prompt_filter": {"max": 0.9}, "curriculum": max}
    value = {**other, "router_aux_loss_scope": "global_batch", "router_replay": "R2"}[name]
    setattr(args, name, value)
    with pytest.raises(ConfigError) as error:
        checks.check_settings(args, tokenizer())
    assert str(error.value).startswith(f"{name}={value!r} {reason}")
    assert f"set {name}={default!r}, or {counterpart}" in str(error.value)


def test_a_curriculum_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"curriculum=.* chooses prompts by earlier rewards, and TRL reads"):
        run(tmp_path, curriculum=lambda rates, step: [1.0] * 8)


def test_a_callback_gets_the_generations_and_is_told_what_it_does_not_get(tmp_path, caplog):
    seen: list[int] = []

    class Rollouts(GRPOCallback):
        def on_generation_end(self, args, state, control, rollouts, rewards):
            seen.append(len(rollouts))

    class Losses(GRPOCallback):
        def on_loss(self, args, state, control, batch, logps_BT, loss):
            raise AssertionError("TRL's step has no micro-batch of this kind")

    made = run(tmp_path, callbacks=[Rollouts(), Losses()], save_rollouts=True, eval_dataset=prompts(4))
    made.train()
    made.evaluate()  # calls no event
    assert seen == [4, 4]
    told = {name for name in ("Rollouts:", "Losses:", "RolloutFiles:") if name in caplog.text}
    assert told == {"Losses:", "RolloutFiles:"} and "neither on_window_begin nor on_loss" in caplog.text
    found = Recording(tmp_path / FOLDER).generation(2, 0)
    assert len(found.rollouts) == 4 and found.rewards.rewards_NF.shape == (4, 1)


def test_a_refused_setting_ends_the_construction(tmp_path):
    with pytest.raises(ConfigError, match="dynamic_sampling=True calls the hooks of generation and rewards"):
        run(tmp_path, dynamic_sampling=True)


def test_with_liger_the_loss_is_that_of_the_hook(tmp_path, caplog):
    """As in TRL 1.16: Liger's layers on a GPU, and the loss from log-probs."""
    pytest.importorskip("liger_kernel")

    class Theirs(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            self.losses = getattr(self, "losses", 0) + 1
            return 3 * super()._compute_loss(model, inputs)

    plain = run(tmp_path, Theirs, sequence_layout="padded")
    plain.train()
    with caplog.at_level(logging.WARNING):
        liger = run(tmp_path, Theirs, use_liger_kernel=True)
    assert "use_liger_kernel=True has no effect: as in TRL, the loss is that of _compute_loss" in caplog.text
    liger.train()
    assert liger.losses == plain.losses == 2
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, liger.model.state_dict()[name])


def test_objectives_over_whole_groups_are_refused_also_later(tmp_path):
    with pytest.raises(ConfigError, match="loss_type='scalerl' counts the tokens of whole groups"):
        run(tmp_path, loss_type="scalerl")
    made = run(tmp_path)
    made.loss_type = "scalerl"
    with pytest.raises(ConfigError, match="loss_type='scalerl' counts the tokens of whole groups"):
        made.train()


def test_an_overridden_tokenization_is_refused_with_tools_which_would_not_call_it(tmp_path):
    class Theirs(GRPOTrainer):
        def _tokenize_prompts(self, prompts):
            return super()._tokenize_prompts(prompts)

    with pytest.raises(ConfigError, match=r"Theirs defines _tokenize_prompts .here: with tools"):
        agent_runs.trainer(tmp_path, Theirs, tools=[agent_runs.measure])


def loader_of_the_run(trainer):
    return getattr(trainer.callback_handler, "train_" + "dataloader")


class AtTheBeginning(TrainerCallback):
    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        self.rows = list(train_dataloader)


@pytest.mark.parametrize("place", ["hook", "reward", "callback"])
def test_the_loader_of_the_run_refuses_to_be_iterated_wherever_that_happens(tmp_path, place):
    class Theirs(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            if place == "hook":
                self.more = next(iter(loader_of_the_run(self)))
            return super()._generate_and_score_completions(inputs)

    def reward(completions, **kwargs):
        return [float(len(row)) for row in loader_of_the_run(made)]

    callbacks = [AtTheBeginning()] if place == "callback" else []
    rewards = reward if place == "reward" else count_reward
    made = run(tmp_path, Theirs, rewards, callbacks=callbacks)
    with pytest.raises(Exception, match=r"callback_handler.train_dataloader was iterated.*of your own"):
        made.train()


def test_the_length_of_the_loader_of_the_run_and_a_loader_of_their_own_are_read(tmp_path):
    class Theirs(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            self.lengths = [len(self.callback_handler.train_dataloader) for _ in range(2)]
            self.own = getattr(self, "own", None) or iter(self.get_train_dataloader())
            self.more = next(self.own)
            return super()._generate_and_score_completions(inputs)

    made = run(tmp_path, Theirs)
    made.train()
    assert made.lengths[0] == made.lengths[1] > 0 and "prompt" in made.more[0]


def test_images_of_a_hook_are_refused(tmp_path):
    class Theirs(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return {**output, "pixel_values": torch.zeros(len(inputs), 3, 2, 2)}

    with pytest.raises(ConfigError, match=r"pixel_values: groupwise.trl_hooks does not support images"):
        run(tmp_path, Theirs).train()


def test_images_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="trl_hooks does not support images"):
        checks.check_settings(run(tmp_path).args, SimpleNamespace(image_processor=object()))
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"pixel_values: groupwise.trl_hooks does not support images"):
        run(tmp_path)._get_per_token_logps_and_entropies(policy(), ids, ids, 2, pixel_values=ids)


def test_the_engine_of_trl_names_its_counterpart(tmp_path):
    made = run(tmp_path)
    with pytest.raises(AttributeError, match=r"does not exist; use trainer.backend, whose generate"):
        made.vllm_generation.sync_weights()


def test_outputs_are_refused_as_in_trl(tmp_path):
    made = run(tmp_path)
    with pytest.raises(ValueError, match="return_outputs=True"):
        made.compute_loss(made.model, {}, return_outputs=True)


def test_a_micro_batch_that_does_not_fit_in_memory_is_an_error(tmp_path):
    class Theirs(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super()._compute_loss(model, inputs)

    made = run(tmp_path, Theirs, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    made.splitter._free_activations = lambda: True  # the window could be repeated with fewer activations
    with pytest.raises(torch.OutOfMemoryError):
        made.train()


def test_the_layout_of_a_hook_with_log_probs_of_its_own_is_not_checked(tmp_path, monkeypatch):
    """As of a diffusion model: the forward of its model is no causal one, which the check would refuse."""

    class Theirs(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, ids, mask, logits_to_keep, *given, **options):
            logits = model(ids.flip(1)).logits[:, :logits_to_keep]  # of the tokens after it
            logps = logits.log_softmax(-1).gather(-1, ids[:, -logits_to_keep:].unsqueeze(-1)).squeeze(-1)
            return logps, torch.zeros_like(logps), None

    checked: list[bool] = []
    monkeypatch.setattr(LogprobComputer, "check", lambda *given: checked.append(True))
    run(tmp_path, Theirs, beta=0.1).train()
    assert not checked
    run(tmp_path).train()
    assert checked


def test_rewards_must_be_those_of_all_ranks_by_all_functions(tmp_path):
    class Theirs(GRPOTrainer):
        def _calculate_rewards(self, *given):
            return super()._calculate_rewards(*given)[:2]

    with pytest.raises(
        RewardError, match=r"shape \(2, 1\); it must have shape \(4, 1\): the completions of all"
    ):
        run(tmp_path, Theirs).train()


def test_completions_must_be_one_per_row(tmp_path):
    class Theirs(GRPOTrainer):
        def _generate(self, prompts):
            prompt_ids, completion_ids, *others = super()._generate(prompts)
            return prompt_ids, completion_ids[:3], *others

    class TheirTurn(GRPOTrainer):
        def _generate_single_turn(self, *given, **options):
            completion_ids, logps = super()._generate_single_turn(*given, **options)
            return completion_ids[:3], logps

    for subclass, said in (
        (Theirs, "_generate returned 4 prompts, 3 completions, 4 texts for 4 rows"),
        (TheirTurn, "_generate_single_turn returned 3 completions for 4 rows"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(tmp_path, subclass).train()


class Watching(GRPOTrainer):
    """Records what the hooks see."""

    def __init__(self, *args, **kwargs):
        self.seen: list[tuple[str, int, str]] = []
        super().__init__(*args, **kwargs)

    def _see(self, hook):
        self.seen.append((hook, self._step, "train" if self.model.training else "eval"))

    def _generate_and_score_completions(self, inputs: list[Row]):
        self._see("generate")
        return super()._generate_and_score_completions(inputs)

    def _compute_loss(self, model, inputs):
        self._see("loss")
        return super()._compute_loss(model, inputs)


@pytest.mark.slow
def test_steps_count_micro_batches_also_while_a_window_is_filled(tmp_path):
    """Windows of three micro-batches, generations of two: the third begins in the second window."""
    made = run(
        tmp_path,
        Watching,
        steps_per_generation=2,
        gradient_accumulation_steps=3,
        per_device_train_batch_size=2,
        max_steps=2,
        train_dataset=prompts(12),
    )
    made.train()
    assert [step for hook, step, _ in made.seen if hook == "generate"] == [0, 2, 4]
    assert [step for hook, step, _ in made.seen if hook == "loss"] == [0, 1, 2, 3, 4, 5]
    assert made._step == 6 and made.buffer.num_left == 0
    made.train()  # from the beginning
    assert made._step == 6


def test_hooks_see_the_mode_also_after_an_evaluation(tmp_path):
    made = run(
        tmp_path,
        Watching,
        eval_dataset=prompts(2),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    made.train()
    generated = [(step, mode) for hook, step, mode in made.seen if hook == "generate"]
    assert generated == [(0, "train"), (1, "eval"), (1, "eval"), (1, "train"), (2, "eval"), (2, "eval")]
    evaluations = [line for line in made.state.log_history if "eval_reward" in line]
    assert len(evaluations) == 2 and all(line["eval_loss"] == pytest.approx(0, abs=1) for line in evaluations)


def test_loss_and_pass_at_k_of_an_evaluation_are_those_of_the_plain_trainer(tmp_path):
    """Three prompts with two completions in batches of four: the last batch has one prompt.

    Other metrics are means of the batches here, as in TRL.
    """

    def scripted(texts, trainer):
        ids = tokenizer()(list(texts))["input_ids"]
        return {
            "prompt_ids": ids,
            "completion_ids": [[4 + (3 * i) % 5] * (i % 3) + [1] for i in range(len(ids))],
        }

    given = {
        "rollout_func": scripted,
        "eval_dataset": prompts(3),
        "num_generations_eval": 2,
        "per_device_eval_batch_size": 4,
        "eval_pass_at_k": [1, 2],
        "loss_type": "dr_grpo",
        "beta": 0.1,
    }
    ours = run(tmp_path, **given).evaluate()
    plain = trainer(tmp_path, count_reward, **given).evaluate()
    assert {"eval_reward", "eval_kl"} <= ours.keys()
    names = [name for name in plain if name in ("eval_loss", "eval_num_tokens") or "@" in name]
    assert {"eval_loss", "eval_num_tokens", "eval_pass@2"} <= set(names)
    # The hooks evaluate in TRL's order: sums are rounded otherwise.
    assert {n: ours[n] for n in names} == pytest.approx({n: plain[n] for n in names}, rel=1e-5)


class WithKeys(GRPOTrainer):
    """Keys of its own, and metrics of its own, in a run that is broken off inside a generation."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self._metrics["train"]["generated_at"].append(self._step)
        return {**output, "weights": torch.arange(4.0), "texts": [row["prompt"] for row in inputs]}

    def _compute_loss(self, model, inputs):
        assert (
            self.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
            == [text.strip() for text in inputs["texts"]]
            or len(inputs["texts"]) == 1
        )
        self._metrics["train"]["step_seen"].append(self._step)
        scaled = inputs["advantages"] * inputs["weights"]
        return super()._compute_loss(model, {**inputs, "advantages": scaled})


@pytest.mark.slow
def test_a_resumed_run_continues_inside_a_generation(tmp_path):
    given = {
        "per_device_train_batch_size": 1,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "max_steps": 12,
        "logging_steps": 5,  # metrics of steps before the checkpoint are logged after it
        "save_strategy": "steps",
        "save_steps": 6,
        "train_dataset": prompts(8),
    }
    whole = run(tmp_path / "whole", WithKeys, **given)
    whole.train()
    resumed = run(tmp_path / "resumed", WithKeys, **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert resumed._step == whole._step == 12
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])
    logs = [
        [
            {name: v for name, v in line.items() if not re.search("time|per_second|memory", name)}
            for line in made.state.log_history
            if line["step"] == 10 and "loss" in line
        ]
        for made in (whole, resumed)
    ]
    assert logs[0] == logs[1] and logs[0][0]["step_seen"] == 7.0 and logs[0][0]["generated_at"] == 8.0


def test_a_resume_with_a_reference_inside_a_generation_is_refused(tmp_path):
    """Nothing is added to a dictionary that a hook returned: an error, where TRL has a KeyError."""
    reuse = {"num_iterations": 2, "save_steps": 1, "save_strategy": "steps"}
    run(tmp_path, **reuse, max_steps=1).train()
    resumed = run(tmp_path, **reuse, max_steps=2, beta=0.1)
    with pytest.raises(ConfigError, match=r"beta=0\.1 needs 'ref_per_token_logps'.* resume with beta=0"):
        resumed.train(resume_from_checkpoint=True)
    run(tmp_path, **reuse, max_steps=2, beta=0.1, kl_in_reward=True).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_every_turn_of_a_tool_rollout_is_sampled_by_the_hook(tmp_path):
    calls = []

    class Theirs(GRPOTrainer):
        def loader_generator(self):
            return torch.Generator()  # so that both trainers sample from the same state

        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations):
            sampled = super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations)
            calls.append((len(prompt_ids), num_generations))
            return sampled

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            self.masks = output["completion_mask"], output["tool_mask"]
            return output

    # The decoding loop of the plain trainer.
    same = {"tools": [agent_runs.measure], "max_steps": 1}
    made = agent_runs.trainer(tmp_path, Theirs, **same, cache_implementation="auto")
    made.train()
    plain = agent_runs.trainer(tmp_path, **same)  # from the same seed
    plain.train()
    assert calls[0] == (4, 4) and len(calls) > 1  # the first turn of all, then those with a tool result
    # As in TRL: rollouts have different histories, which a hook must not take for copies of one prompt.
    assert {num_generations for _, num_generations in calls[1:]} == {1}
    completion_mask, tool_mask = made.masks
    assert 0 < int((completion_mask * tool_mask).sum()) < int(completion_mask.sum())
    lines = [made.state.log_history[0], plain.state.log_history[0]]
    for name in ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length", "reward"):
        assert lines[0][name] == lines[1][name]


def test_tokenization_is_a_hook(tmp_path):
    class Theirs(GRPOTrainer):
        def _tokenize_prompts(self, prompts):
            ids, images, fields = super()._tokenize_prompts(prompts)
            return [[5, *prompt] for prompt in ids], images, fields

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            first = output["prompt_mask"].argmax(-1)
            assert output["prompt_ids"].gather(1, first.unsqueeze(1)).eq(5).all()
            return output

    run(tmp_path, Theirs, max_steps=1).train()


def test_the_completions_table_is_made_from_the_logs(tmp_path):
    def logging_reward(completion_ids, log_extra, log_metric, **_):
        log_extra("length", [len(ids) for ids in completion_ids])
        log_metric("calls", 1.0)
        return [float(len(ids) % 3) for ids in completion_ids]

    class Theirs(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            self._logs["extra"]["mine"].extend(range(len(inputs)))
            self._log_completion_extra("other", ["x"] * len(inputs))
            self._log_metric("of_a_hook", 2.0)
            return output

    made = run(tmp_path, Theirs, logging_reward, log_completions=True, max_steps=1)
    made.train()
    (path,) = Path(tmp_path, "completions").glob("*.parquet")
    table = pq.read_table(path).to_pydict()
    assert table["mine"] == [0, 1, 2, 3] and table["other"] == ["x"] * 4
    assert table["logging_reward"] == [float(length % 3) for length in table["length"]]
    assert table["advantage"] == pytest.approx(list(made._logs["advantages"]))
    assert made.state.log_history[0]["of_a_hook"] == 2.0 and made.state.log_history[0]["calls"] == 1.0


def test_a_hook_may_sample_with_the_model_itself(tmp_path):
    class Theirs(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations):
            config = self.generation_config
            assert config.max_new_tokens == 6 and config.do_sample and config.top_k == 0
            sampled = []
            for prompt in prompt_ids:
                given = torch.tensor([prompt])
                with torch.no_grad():
                    ids = self.model.generate(given, generation_config=config)[0, len(prompt) :].tolist()
                ends = [i for i, token in enumerate(ids) if token in self.eos_token_ids]
                sampled.append(ids[: ends[0] + 1] if ends else ids)
            return sampled, None

    made = run(tmp_path, Theirs)
    made.train()
    assert made.eos_token_ids == (1,) and made._tokenizer is made.processing_class
    assert len(made._buffered_inputs) == 1 and made.state.global_step == 2


def test_settings_of_the_sampler_that_hooks_read_do_not_change_in_silence(tmp_path):
    made = run(tmp_path, top_p=0.9, generation_kwargs={"top_k": -1, "no_repeat_ngram_size": 3})
    config = made.generation_config
    assert (config.top_p, config.top_k, config.no_repeat_ngram_size) == (0.9, 0, 3)
    way = r"is not read by the sampler: use trainer\.temperature, .* change a copy"
    with pytest.raises(ConfigError, match=rf"trainer\.generation_config\.temperature=0\.5 {way}"):
        made.generation_config.temperature = 0.5
    with pytest.raises(ConfigError, match=way):
        made.generation_config.update(min_p=0.1)
    with pytest.raises(TypeError, match="does not support item assignment"):
        made.generation_kwargs["min_p"] = 0.1
    assert {**made.generation_kwargs, "min_p": 0.1}["min_p"] == 0.1
    for changed in (copy.copy(config), copy.deepcopy(config)):
        changed.temperature = 0.5
        assert type(changed) is GenerationConfig and changed.to_dict() == {
            **config.to_dict(),
            "temperature": 0.5,
        }
    made.temperature = 0.5
    made.refresh_settings()
    assert made.generation_config.temperature == made.generation_kwargs["temperature"] == 0.5


@pytest.mark.parametrize("kind", [GRPOTrainer, PlainTrainer])
def test_assigned_attributes_that_nothing_reads_are_errors(tmp_path, kind):
    made = run(tmp_path, kind)
    for name in UNREAD_ATTRIBUTES.keys() - {"vllm_generation"}:
        with pytest.raises(ConfigError, match=f"trainer.{name} is not read: use"):
            setattr(made, name, None)
        assert hasattr(made, name) is (kind is GRPOTrainer)


def test_arguments_that_scripts_unpack_and_compare_are_never_none(tmp_path):
    for kind in (GRPOTrainer, PlainTrainer):
        made = run(tmp_path, kind)
        assert dict(**made.chat_template_kwargs) == {} and made.max_tool_calling_iterations > 10**9
        with pytest.raises(TypeError):
            made.chat_template_kwargs["enable_thinking"] = False
    assert run(tmp_path, chat_template_kwargs={"a": 1}).chat_template_kwargs == {"a": 1}


class CopiedTurn(GRPOTrainer):
    """The body of TRL's hook, without its branches for engines."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations):
        assert self.continuous_batching_config is None and self.environment_factories is None
        width = max(map(len, prompt_ids))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompt_ids])
        with torch.no_grad(), self._dist.summon_full_params(self.model_wrapped, recurse=False):
            mask = (ids != 0).long()
            sampled = self.model.generate(
                input_ids=ids, attention_mask=mask, generation_config=self.generation_config
            )
        new = sampled[:, width:]
        ends = torch.isin(new, torch.tensor(self.eos_token_ids))
        lengths = [row.index(True) + 1 if any(row) else len(row) for row in ends.tolist()]
        return [row[:length] for row, length in zip(new.tolist(), lengths, strict=True)], None

    def _calculate_rewards(self, *given):
        self._pending_metrics["pending"] += [1.0, 2.0]
        self._pending_extra_logs["row"] += range(4)
        return super()._calculate_rewards(*given)

    def log(self, logs, start_time=None):
        self._metrics["train" if self.model.training else "eval"]["late"].append(
            float(self.state.global_step)
        )
        super().log(logs, start_time)


def test_private_state_that_copied_bodies_use(tmp_path):
    made = run(tmp_path, CopiedTurn, max_steps=1, log_completions=True, eval_dataset=prompts(2))
    made.train()
    assert made.state.log_history[0]["pending"] == 1.5 and made.state.log_history[0]["late"] == 1.0
    assert list(made._logs["extra"]["row"]) == [0, 1, 2, 3]
    made.evaluate()
    assert made.state.log_history[-1]["eval_late"] == 1.0
    with pytest.raises(TypeError):
        made._metrics["train"] = {}
    made._metrics = {"train": {"mine": [2.0]}, "eval": {}}
    assert made._metrics["train"]["mine"] == [2.0] and made._metrics["train"]["other"] == []


def test_a_generation_of_a_hook_is_logged_as_that_of_the_step_is(tmp_path):
    """A body copied from TRL calls ``_generate`` itself; the step's own generation is recorded once."""

    class Twice(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            self._generate([row["prompt"] for row in inputs])
            return super()._generate_and_score_completions(inputs)

    def rollout(prompts_given, run):
        ids = tokenizer()(list(prompts_given))["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [[4 + row] * row + [1] for row in range(len(ids))]}

    logs = []
    for kind in (GRPOTrainer, Twice):
        made = run(tmp_path, kind, max_steps=1, rollout_func=rollout)
        made.train()
        logs.append(made.state.log_history[0])
    once, twice = logs
    assert once["num_tokens"] > 10 and twice["num_tokens"] == 2 * once["num_tokens"]
    for name in ("completions/mean_length", "completions/max_length", "completions/clipped_ratio"):
        assert twice[name] == once[name], name
    assert once["completions/mean_length"] == 2.5


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_log_probs_of_a_rollout_func_are_compared_where_the_step_computes_old_ones(tmp_path, num_iterations):
    def rollout(prompts_given, run):
        ids = tokenizer()(list(prompts_given))["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [[4, 1]] * len(ids), "logprobs": [[0.0, 0.0]] * len(ids)}

    made = run(tmp_path, max_steps=1, rollout_func=rollout, num_iterations=num_iterations)
    made.train()
    logged = {n: value for n, value in made.state.log_history[0].items() if "sampling_logp_difference" in n}
    assert bool(logged) is (num_iterations == 2)  # in the first case the difference was logged as 0
    assert all(value > 0.5 for value in logged.values())
