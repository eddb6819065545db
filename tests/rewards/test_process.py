"""Process reward models: where steps end, what the model reads, and how its output becomes a reward."""

from __future__ import annotations

import random

import pytest
import torch
from support.process_rewards import STEP, byte_tokenizer, step_classifier
from support.runs import chats, generate, policy, prompts, tokenizer, trainer

from groupwise import ConfigError
from groupwise.rewards import ProcessRewardModel
from groupwise.rewards.process import Step, split_steps


def steps_of(text: str, separator: str = "\n") -> list[tuple[str, str]]:
    """Steps of a text with an end token: their text, and the decoded tokens that belong to them."""
    own = byte_tokenizer()
    ids = [*own(text)["input_ids"], own.eos_token_id]
    steps = split_steps(ids, own, separator)
    starts = [0, *(step.end + 1 for step in steps)]
    return [(s.text, own.decode(ids[a : s.end + 1])) for a, s in zip(starts, steps, strict=False)]


def test_a_step_ends_with_its_separator_and_the_last_one_with_the_completion():
    assert steps_of("one\ntwo\nthree") == [("one", "one\n"), ("two", "two\n"), ("three", "three<eos>")]
    assert steps_of("one\n") == [("one", "one\n<eos>")]


def test_whitespace_alone_is_no_step_unless_there_is_no_other():
    assert steps_of("\n\na\n \nb\n\n") == [("a", "\n\na\n"), ("b", " \nb\n\n<eos>")]
    assert steps_of(" \n") == [(" \n", " \n<eos>")]
    assert steps_of("") == [("", "<eos>")]
    assert split_steps([], byte_tokenizer(), "\n") == []


def test_a_separator_of_several_tokens_ends_with_its_last_one():
    assert steps_of("a\nb\n\nc", "\n\n") == [("a\nb", "a\nb\n\n"), ("c", "c<eos>")]


def test_a_separator_whose_bytes_are_several_tokens_ends_with_the_last_of_them():
    assert len(byte_tokenizer()("é")["input_ids"]) == 2
    assert steps_of("aéb", "é") == [("a", "aé"), ("b", "b<eos>")]


def test_a_separator_within_a_token_ends_the_step_with_that_token():
    own = tokenizer()  # one token per word
    ids = own("w12 w3")["input_ids"]
    assert split_steps([*ids, 1], own, "1") == [Step(" w", 0), Step("2 w3", 2)]


def test_ends_of_random_completions_are_those_of_a_search_token_by_token():
    """Tokens drawn at random split characters of several bytes and hold several separators."""
    own, draw = byte_tokenizer(), random.Random(0)
    pool = [
        i for i in range(len(own)) if (i >= 2 and own.decode([i]).isprintable()) or own.decode([i]) == "\n"
    ]
    pool += own("💡é")["input_ids"]
    num_steps = 0
    for _ in range(60):
        ids = [draw.choice([*pool, *own("\n💡 ")["input_ids"] * 40]) for _ in range(draw.randint(1, 40))]
        text = own.decode(ids)
        expected = []
        position = 0
        for piece in text.split("\n"):
            position += len(piece) + 1
            if piece.strip():
                # the first prefix whose complete characters reach beyond the separator
                lengths = [len(own.decode(ids[: k + 1]).rstrip("\ufffd")) for k in range(len(ids))]
                expected.append((piece, next((k for k, n in enumerate(lengths) if n >= position), len(ids))))
        found = split_steps(ids, own, "\n")
        if expected:
            expected[-1] = (expected[-1][0], len(ids) - 1)
            assert [tuple(step) for step in found] == expected
            num_steps += len(expected)
    assert num_steps > 100


def test_a_token_id_ends_steps():
    own = tokenizer()
    ids = [5, 6, STEP, STEP, 7, STEP, 1]
    expected = [Step(own.decode([5, 6]), 2), Step(own.decode([7]), 6)]
    assert split_steps(ids, own, STEP) == expected


def expected_scores(model, judge, prompt: str, steps: list[str], marker: str) -> list[float]:
    """One forward pass per completion, without padding."""
    ids, scored = list(judge(prompt)["input_ids"]), []
    for step in steps:
        ids += judge(step)["input_ids"] + judge(marker)["input_ids"]
        scored.append(len(ids) - 1)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([ids])).logits[0, scored].double()
    return (logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, 1]).tolist()


COMPLETIONS = [[5, 6, STEP, 7, 1], [9, STEP, STEP, 10, 11, STEP, 1], [12], [1]]
#: Texts of the steps, and their last tokens.
STEPS = [[" w1 w2", " w3"], [" w5", " w6 w7"], [" w8"], [""]]
ENDS = [[2, 4], [1, 6], [0], [0]]


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("step_token", [None, "w9"])
def test_the_score_of_a_step_is_the_output_at_its_step_token(tmp_path, labels, step_token):
    """The model has a tokenizer of its own; rows of one batch have different lengths."""
    model, judge = step_classifier(labels), byte_tokenizer()
    reward = ProcessRewardModel(model, STEP, step_token)
    run = trainer(tmp_path, reward, reward_processing_classes=judge)
    (score,) = run.reward_callables
    found = score(prompts=["w0 w1", "w2", "w0 w1", "w3"], completion_ids=COMPLETIONS)
    marker = step_token or tokenizer().decode([STEP])
    for prompt, steps, ends, rewards in zip(["w0 w1", "w2", "w0 w1", "w3"], STEPS, ENDS, found, strict=True):
        assert [end for end, _ in rewards] == ends
        expected = expected_scores(model, judge, prompt, steps, marker)
        assert [value for _, value in rewards] == pytest.approx(expected, abs=1e-5)
    assert run.reward_func_names == [type(model).__name__]


def test_models_are_recognised_by_their_architecture(tmp_path):
    """A directory, a module and a wrapped directory give the same step rewards; their names say nothing."""
    directory = str(tmp_path / "sequence-classification")
    step_classifier().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    given = [directory, step_classifier(), ProcessRewardModel(directory), ProcessRewardModel(directory, " ")]
    run = trainer(tmp_path, given, reward_processing_classes=[None, byte_tokenizer(), None, None])
    assert given[0] == directory and given[2].model == directory
    assert run.reward_func_names[::2] == ["sequence-classification", "sequence-classification_2"]
    assert isinstance(run.reward_funcs[2], ProcessRewardModel) and run.reward_funcs[1] is given[1]
    rollouts = generate(run, [run.train_dataset[0]] * 4)
    steps = run.compute_rewards(rollouts).step_rewards
    # The policy writes no line breaks: one step each, and several where a space ends a step.
    assert [[end for end, _ in row] for row in steps[0]] == [
        [len(c.token_ids) - 1] for c in rollouts.completions
    ]
    assert steps[0] == steps[1] == steps[2] and sum(map(len, steps[3])) > sum(map(len, steps[2]))
    run.refresh_settings()
    assert run.reward_callables[0].model.config.num_labels == 2  # nothing is loaded again


def test_chats_go_through_the_template_of_the_model(tmp_path):
    model = step_classifier(vocab_size=32)
    reward = ProcessRewardModel(model, "w9")
    run = trainer(tmp_path, reward, reward_processing_classes=tokenizer(), train_dataset=chats())
    (score,) = run.reward_callables
    chat = [{"role": "user", "content": "w0"}]
    (rewards,) = score(prompts=[chat], completion_ids=[[5, 6, 1]])
    ids = tokenizer()("<user> w0 <assistant> w1 w2 w9")["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1].softmax(-1)[1].item()
    assert rewards == [(2, pytest.approx(expected, abs=1e-5))]


def judge(**options):
    return ProcessRewardModel(step_classifier(**options))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ProcessRewardModel(3), "was given int; allowed: a token-classification model"),
        (
            lambda: ProcessRewardModel("a/b", ""),
            "step_separator='' is not allowed; give a text or a token id",
        ),
        (lambda: ProcessRewardModel("a/b", True), "step_separator=True is not allowed"),
        (lambda: ProcessRewardModel("a/b", step_token=""), "step_token='' is not allowed"),
        (lambda: judge(labels=3), "has 3 labels; allowed: 1"),
        (lambda: ProcessRewardModel(step_classifier(), 99), "step_separator=99 is no token of the policy"),
        (lambda: ProcessRewardModel(step_classifier(), -1), "step_separator=-1 is no token of the policy"),
    ],
)
def test_unusable_models_are_refused(tmp_path, make, said):
    with pytest.raises(ConfigError, match=said):
        trainer(tmp_path, make(), reward_processing_classes=byte_tokenizer())


def test_tools_are_refused_before_the_model_loads(tmp_path):
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: first.
            b: second.
        """
        return a + b

    with pytest.raises(ConfigError, match="'LlamaForTokenClassification' does not support tools"):
        trainer(tmp_path, step_classifier(), model="nowhere/at-all", tools=[add], train_dataset=prompts())


def test_a_policy_that_needs_no_process_rewards_is_not_read_as_one(tmp_path):
    from groupwise.rewards.process import is_process_reward

    policy().save_pretrained(tmp_path)
    assert not is_process_reward(str(tmp_path)) and not is_process_reward(policy())
    assert not is_process_reward(lambda **_: [])
