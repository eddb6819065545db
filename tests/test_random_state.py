"""Random numbers of a run: user functions change no sample, and a seed fixes all that is initialised."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from peft import LoraConfig, PromptTuningConfig, TaskType
from support import agent_runs
from support.resume_runs import gpt2_with_dropout, llama, make_trainer, prompts, tokenizer, vowels
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

from groupwise.random_state import RandomState
from groupwise.trainer import GRPOTrainer


def sampled(directory: Path, act: Any = None, **settings: Any) -> list[list[int]]:
    """Completions of a run in which the reward function calls ``act`` first; its rewards are the same."""
    seen: list[list[int]] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        if act is not None:
            act()
        seen.extend(map(list, completion_ids))
        return [sum(letter in "aeiou" for letter in text) + len(text) % 3 for text in completions]

    trainer = make_trainer(directory, reward_funcs=reward, save_strategy="no", **settings)
    trainer.train()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "act",
    [lambda: torch.manual_seed(0), lambda: set_seed(3), lambda: torch.rand(7)],
    ids=["seed", "all", "draw"],
)
@pytest.mark.parametrize("cache_implementation", [None, "dynamic"])
def test_a_reward_that_seeds_or_draws_changes_no_sample(
    tmp_path: Path, act: Any, cache_implementation: str | None
) -> None:
    """With dropout, of which the later samples depend too."""
    options = {"model": gpt2_with_dropout(), "cache_implementation": cache_implementation}
    alone = sampled(tmp_path, **{**options, "model": gpt2_with_dropout()})
    assert sampled(tmp_path, act, **options) == alone
    assert len(set(map(tuple, alone))) == len(alone) == 24


@pytest.mark.slow
def test_tools_environments_and_their_rewards_change_no_sample(tmp_path: Path) -> None:
    def run(act: Any) -> list[list[int]]:
        class Environment:
            def reset(self, **_: Any) -> None:
                act()

            def measure(self, text: str) -> int:
                """Measure a text.

                Args:
                    text: what to measure.
                """
                act()
                called.append(text)
                return len(text)

            def get_reward(self) -> float:
                act()
                return 0.0

        called: list[str] = []
        seen: list[list[int]] = []

        def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
            seen.extend(map(list, completion_ids))
            return agent_runs.calls_reward(completions)

        agent_runs.trainer(
            tmp_path, environment_factory=Environment, reward_funcs=[reward], reward_weights=[1.0]
        ).train()
        assert called
        return seen

    assert run(lambda: torch.manual_seed(0)) == run(lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "dynamic"}, {"top_k": 5}], ids=str)
def test_threads_that_seed_while_others_are_sampled_change_no_sample(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """As a tool in a thread does, or a reward after its time limit: here during every forward."""

    def run(act: Any) -> tuple[list[list[int]], torch.Tensor]:
        model = llama()

        def beside(*_: Any) -> None:
            thread = threading.Thread(target=act)
            thread.start()
            thread.join()

        model.register_forward_pre_hook(beside)
        return sampled(tmp_path, model=model, **settings), model.lm_head.weight.detach()

    alone, weights = run(lambda: None)
    seeded, weights_seeded = run(lambda: set_seed(3))
    assert seeded == alone and torch.equal(weights_seeded, weights)
    assert len(alone) == 24 and len(set(map(tuple, alone))) > 20


@pytest.mark.slow
def test_user_functions_draw_anew_at_every_step_and_as_before_in_a_resumed_run(tmp_path: Path) -> None:
    drawn: list[float] = []

    def reward(completions: list[str], **given: Any) -> list[float]:
        drawn.append(torch.rand(()).item())
        return vowels(completions, **given)

    make_trainer(tmp_path / "whole", reward_funcs=reward, max_steps=4).train()
    whole = drawn.copy()
    assert len(set(whole)) == 4
    drawn.clear()
    resumed = make_trainer(tmp_path / "resumed", reward_funcs=reward, max_steps=4, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert drawn == whole[2:]


def test_the_streams_are_exchanged_and_a_failure_returns_to_the_mark() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4).tolist()
    torch.manual_seed(5)
    state = RandomState()
    state.seed(5)
    assert torch.rand(()).item() == expected[0]
    with state.user_code():
        first = torch.rand(()).item()
        with state.user_code(False):
            assert torch.rand(()).item() == expected[1]
            with state.user_code(False):
                assert torch.rand(()).item() == expected[2]
        with state.user_code():
            second = torch.rand(()).item()
    draw = torch.rand(2, generator=state.generator).tolist()
    assert draw == expected[:2]  # one seed, and nothing else draws from it
    mark = state.snapshot()
    later = torch.rand(2, generator=state.generator).tolist()
    with state.user_code():
        third = torch.rand(()).item()
    with pytest.raises(KeyError), state.user_code():
        torch.manual_seed(0)
        raise KeyError
    assert torch.rand(()).item() == expected[3]
    state.restore(mark)
    assert torch.rand(()).item() == expected[3]
    assert torch.rand(2, generator=state.generator).tolist() == later
    with state.user_code():
        assert torch.rand(()).item() == third
    state.seed(5)
    with state.user_code():
        assert torch.rand(2).tolist() == [first, second]
    assert not {first, second} & set(expected)


# Whatever is initialised at random is the same in every run with a seed, and on every rank.


def classifier(directory: Path) -> str:
    """A checkpoint without a head: loaded as a reward model, it gets a new one."""
    torch.manual_seed(9)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes, pad_token_id=0, eos_token_id=1))
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return str(directory)


def token_classifier(directory: Path) -> str:
    """A process reward model whose checkpoint lost its head."""
    torch.manual_seed(9)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, **sizes, pad_token_id=0, eos_token_id=1, num_labels=1)
    model = LlamaForTokenClassification(config)
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("score.")}
    model.save_pretrained(directory, state_dict=weights)
    tokenizer().save_pretrained(directory)
    return str(directory)


def headless_policy(directory: Path) -> str:
    """A checkpoint without output embeddings, which are not tied."""
    model = llama()
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(directory, state_dict=weights)
    return str(directory)


LORA = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2)
VIRTUAL = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("peft_config", [LORA, VIRTUAL, None], ids=["lora", "virtual tokens", "full"])
def test_all_that_is_initialised_depends_on_the_seed_alone(tmp_path: Path, peft_config: Any) -> None:
    names = {
        "model": headless_policy(tmp_path / "policy"),
        "reward_funcs": [classifier(tmp_path / "outcome"), token_classifier(tmp_path / "process"), vowels],
    }

    def made(seed: int, before: int = 0) -> dict[str, torch.Tensor]:
        args = make_trainer(tmp_path, seed=seed, beta=0.1).args
        torch.manual_seed(before)  # whatever a script drew before
        trainer = GRPOTrainer(
            names["model"],
            list(names["reward_funcs"]),
            args=args,
            train_dataset=prompts(4),
            processing_class=tokenizer(),
            peft_config=peft_config,
        )
        models = {
            "policy": trainer.model,
            "reference": trainer.ref_model,
            "outcome": trainer.reward_funcs[0],
            "process": trainer.reward_funcs[1],
        }
        return {
            f"{role} {name}": value
            for role, model in models.items()
            if model is not None
            for name, value in model.state_dict().items()
        } | {"next draw": torch.get_rng_state()}

    first, again, other = made(3), made(3, before=1), made(4)
    assert [name for name in first if not torch.equal(first[name], again[name])] == []
    changed = {name for name in first if not torch.equal(first[name], other[name])}
    assert {"outcome score.weight", "process score.weight", "next draw"} < changed
    assert any(name.startswith("policy") for name in changed)


def test_reward_models_given_during_a_run_are_the_same_on_every_rank(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, seed=3)
    heads = []
    for draws in (1, 2):  # as ranks, whose generators differ
        torch.manual_seed(draws)
        state = torch.get_rng_state()
        trainer.reward_funcs = [classifier(tmp_path / "reward")]
        torch.set_rng_state(state)
        trainer.refresh_settings()
        heads.append(trainer.reward_funcs[0].score.weight.clone())
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*heads)
