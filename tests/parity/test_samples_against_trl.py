"""The same seed in both libraries: the same adapters, heads and completions, sampled and not given."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.parity_runs import COMMON, Policy, Setting, mixed_reward, prompt_text, train_groupwise, train_trl
from transformers import LlamaForCausalLM, LogitsProcessorList, TrainerCallback

import groupwise
from groupwise import trl_hooks
from groupwise.compat.torch import has_onednn_linear
from groupwise.cpu.linear import OneDNNLinear
from groupwise.errors import warn_once

trl = pytest.importorskip("trl", minversion="1.16.0")
pytestmark = pytest.mark.parity

#: Six steps of sampled completions; the policy moves.
SAMPLED: dict[str, Any] = {"max_steps": 6, "learning_rate": 0.03}


class Recorded:
    """A reward that keeps the completions, with their prompts, in the order in which they are sampled."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int]]] = []
        self.__name__ = "recorded"

    def __call__(self, prompts: list[str], completion_ids: list[Any], **given: Any) -> list[float]:
        self.seen += [
            (prompt, list(map(int, ids))) for prompt, ids in zip(prompts, completion_ids, strict=True)
        ]
        return mixed_reward(prompts=prompts, completion_ids=completion_ids, **given)


class EvaluatesSometimes(TrainerCallback):
    """Evaluate after the second step; the last batch is not full."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            self.trainer.evaluate(Dataset.from_dict({"prompt": [prompt_text(i) for i in range(5)]}))


def sampled(
    train: Any, policy: Policy, directory: Path, resume: str | None = None, **options: Any
) -> list[tuple[str, list[int]]]:
    recorded, evaluates = Recorded(), options.pop("evaluates", False)
    setting = Setting({**SAMPLED, **options}, rewards=(recorded,), scripted=False)

    def prepare(trainer: Any) -> None:
        if resume is not None:
            begin = trainer.train
            trainer.train = lambda: begin(resume_from_checkpoint=resume)
        if evaluates:
            trainer.add_callback(EvaluatesSometimes(trainer))

    base = {"base": trl_hooks.GRPOTrainer} if train is train_groupwise else {}
    train(policy, setting, directory, prepare=prepare, **base)
    return recorded.seen


def widened(policy: Policy, path: Path) -> Policy:
    """A policy of 128 features, whose linear layers groupwise computes with oneDNN."""
    config = policy.load().config
    config.update({"hidden_size": 128, "intermediate_size": 128, "vocab_size": 128})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    return Policy(path, policy.tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2},
        {"evaluates": True, "per_device_eval_batch_size": 8},
    ],
    ids=["plain", "reuse", "truncated", "evaluated"],
)
def test_completions_of_a_run(options: dict[str, Any], policy: Policy, tmp_path: Path) -> None:
    theirs = sampled(train_trl, policy, tmp_path / "theirs", **options)
    assert sampled(train_groupwise, policy, tmp_path / "ours", **options) == theirs
    assert len(set(map(str, theirs))) > len(theirs) / 2
    if not options:  # groupwise's decoding loop draws other tokens
        other = sampled(train_groupwise, policy, tmp_path / "auto", cache_implementation="auto")
        assert len(other) == len(theirs) and other != theirs


@pytest.mark.slow
def test_completions_of_two_epochs_and_of_a_resumed_run(policy: Policy, tmp_path: Path) -> None:
    options = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 5}
    theirs = sampled(train_trl, policy, tmp_path / "theirs", **options)
    ours = sampled(train_groupwise, policy, tmp_path / "ours", **options)
    assert ours == theirs
    step = 10  # in the second epoch; eight completions per step
    for name, train in (("ours", train_groupwise), ("theirs", train_trl)):
        checkpoint = str(tmp_path / name / f"checkpoint-{step}")
        rest = sampled(train, policy, tmp_path / f"{name}-rest", checkpoint, **options)
        assert rest == theirs[8 * step :], name


def test_sampling_computes_with_the_linear_layers_of_torch(policy: Policy, tmp_path: Path) -> None:
    """Scores of the first generation, bit for bit; training keeps the layers of groupwise."""
    wide = widened(policy, tmp_path / "wide")

    replaced: dict[bool, set[bool]] = {False: set(), True: set()}  # by whether gradients are computed

    def scores(train: Any, **options: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def prepare(trainer: Any) -> None:
            forward, model = trainer.model.forward, trainer.model
            if train is train_groupwise:  # the forwards of its checks are of single rows
                trainer.logprob_computer.checked, trainer.backend.compares = True, False

            def recorded(*given: Any, **kwargs: Any) -> Any:
                output = forward(*given, **kwargs)
                if train is train_groupwise:
                    layers = [isinstance(module, OneDNNLinear) for module in model.modules()]
                    replaced[torch.is_grad_enabled()].add(any(layers))
                if not torch.is_grad_enabled():
                    found.append(output.logits[:, -1].clone())
                return output

            model.forward = recorded

        setting = Setting({**SAMPLED, "max_steps": 1, **options}, scripted=False)
        base = {"base": trl_hooks.GRPOTrainer} if train is train_groupwise else {}
        train(wide, setting, tmp_path / train.__name__, prepare=prepare, **base)
        return found

    ours, theirs = scores(train_groupwise), scores(train_trl)
    assert replaced == {False: {False}, True: {has_onednn_linear()}}
    assert len(theirs) > 1
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("base", [groupwise.GRPOTrainer, trl_hooks.GRPOTrainer])
def test_an_adapter_and_a_new_head_are_those_of_trl(base: Any, policy: Policy, tmp_path: Path) -> None:
    """The policy's adapter and the head of a reward model, given by id, whose checkpoint has none."""

    def made(trainer_class: Any, config_class: Any, seed: int, before: int) -> dict[str, torch.Tensor]:
        args = config_class(str(tmp_path), **{**COMMON, "seed": seed})
        torch.manual_seed(before)
        trainer = trainer_class(
            str(policy.path),
            [str(policy.path)],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [prompt_text(i) for i in range(4)]}),
            processing_class=policy.tokenizer,
            peft_config=LoraConfig(target_modules=["q_proj"], r=2),
        )
        adapter = {name: p for name, p in trainer.model.named_parameters() if "lora_A" in name}
        return {**adapter, "score": trainer.reward_funcs[0].score.weight.float()}

    ours = [made(base, groupwise.GRPOConfig, 42, before) for before in (0, 1)]
    theirs = made(trl.GRPOTrainer, trl.GRPOConfig, 42, 2)
    other = made(base, groupwise.GRPOConfig, 43, 0)
    assert len(theirs) == 3  # two layers and the head
    for mine in ours:
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert not any(torch.equal(other[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_foreign_processor_gets_all_rows_in_order(
    policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """State per row, given to ``generate`` by a script: finished rows stay, and the log has one line."""

    class OncePerRow:
        """Forbid every token that its row has had; the state is that of a row."""

        def __init__(self, rows: int) -> None:
            self.used: list[set[int]] = [set() for _ in range(rows)]

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert len(input_ids) == len(self.used)
            scores = scores.clone()
            for row, (last, used) in enumerate(zip(input_ids[:, -1].tolist(), self.used, strict=True)):
                used.add(last)
                scores[row, list(used - {policy.tokenizer.eos_token_id})] = -torch.inf
            return scores

    def replaced(trainer: Any) -> None:
        generate = trainer.model.generate
        trainer.model.generate = lambda input_ids, **given: generate(
            input_ids=input_ids, logits_processor=LogitsProcessorList([OncePerRow(len(input_ids))]), **given
        )

    def overridden(trainer: Any) -> None:
        base = trainer.model.get_base_model()
        create = base._get_logits_processor
        base._get_logits_processor = lambda *given, **kwargs: LogitsProcessorList(
            [*create(*given, **kwargs), OncePerRow(8)]
        )

    for install in (replaced, overridden):
        for fast in (True, False):
            recorded = Recorded()
            args = groupwise.GRPOConfig(
                str(tmp_path),
                **{**COMMON, "max_steps": 2, "beta": 0.0},
                cache_implementation=None if fast else "dynamic",
            )
            trainer = groupwise.GRPOTrainer(
                str(policy.path),
                recorded,
                args=args,
                train_dataset=Dataset.from_dict({"prompt": [prompt_text(i) for i in range(8)]}),
                processing_class=policy.tokenizer,
                peft_config=LoraConfig(target_modules=["q_proj"], r=2),
            )
            install(trainer)
            caplog.clear()
            warn_once.cache_clear()
            with caplog.at_level(logging.WARNING):
                trainer.train()
            assert all(len(set(ids)) == len(ids) for _, ids in recorded.seen)
            lengths = {len(ids) for _, ids in recorded.seen}
            assert len(lengths) > 2
            messages = [record.getMessage() for record in caplog.records]
            lines = [text for text in messages if "LlamaForCausalLM has " in text and " of its own)" in text]
            assert len(lines) == int(fast), messages
            if fast:
                found = recorded.seen
        assert found == recorded.seen
