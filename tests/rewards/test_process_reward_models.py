"""Process reward models through a step: loss and gradient of every objective against scalar loops."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from support.oracles.oracle import (
    NORMALISER_OF,
    SURROGATE_OF,
    Batch,
    Choices,
    loss_and_gradient,
    update_weights,
)
from support.oracles.oracle_advantages import process_advantages
from support.process_rewards import STEP, byte_tokenizer, step_classifier
from support.runs import tokenizer, trainer

from groupwise.rewards import ProcessRewardModel
from groupwise.rewards.process import split_steps

G, L_MAX = 4, 9
# Two prompts of different length; completions of one to four steps, one without an end token.
PROMPTS = ["w0", "w1 w2 w3"]
COMPLETIONS = [
    *([5, 6, STEP, 7, 8, STEP, 9, 1], [10, STEP, 11, 1], [12, 13, 1], [STEP, 14, STEP, STEP, 15, 1]),
    *([6, STEP, 7, STEP, 8, STEP, 9, 16, 17], [18, 1], [19, 20, STEP, 1], [21, 22, 23, STEP, 24, 1]),
]
#: The words of each step, and the index of its last token.
STEPS = [
    *(
        [((5, 6), 2), ((7, 8), 5), ((9,), 7)],
        [((10,), 1), ((11,), 3)],
        [((12, 13), 2)],
        [((14,), 2), ((15,), 5)],
    ),
    *([((6,), 1), ((7,), 3), ((8,), 5), ((9, 16, 17), 8)], [((18,), 1)], [((19, 20), 3)]),
    [((21, 22, 23), 3), ((24,), 5)],
]


def rollouts_of(texts, trainer):
    first = 0 if texts[0] == PROMPTS[0] else G
    ids = [trainer.processing_class(text)["input_ids"] for text in texts]
    return {"prompt_ids": ids, "completion_ids": COMPLETIONS[first : first + len(texts)]}


def step_scores(prompt: str, steps) -> list[tuple[int, float]]:
    """(index of the last token, probability of label 1) from one float64 forward pass of the reward model."""
    model, judge = step_classifier().double().eval(), byte_tokenizer()
    marker = tokenizer().decode([STEP])
    ids, scored = list(judge(prompt)["input_ids"]), []
    for words, _ in steps:
        ids += judge(tokenizer().decode(list(words)))["input_ids"] + judge(marker)["input_ids"]
        scored.append(len(ids) - 1)
    with torch.no_grad():
        values = model(torch.tensor([ids])).logits[0, scored].softmax(-1)[:, 1].tolist()
    return [(end, value) for (_, end), value in zip(steps, values, strict=True)]


def expected_advantages() -> list[list[float]]:
    prompts = [prompt for prompt in PROMPTS for _ in range(G)]
    steps = [step_scores(prompt, steps) for prompt, steps in zip(prompts, STEPS, strict=True)]
    return process_advantages(steps, G, L_MAX)


def float64_logps(model: torch.nn.Module) -> list[torch.Tensor]:
    """Log-probs of each completion from its own forward pass, without padding."""
    out = []
    for row, completion in enumerate(COMPLETIONS):
        prompt = tokenizer()(PROMPTS[row // G])["input_ids"]
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        out.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    return out


def rows(values: list[torch.Tensor]) -> list[list[float]]:
    return [[*value.tolist(), *[0.0] * (L_MAX - len(value))] for value in values]


def expected(name: str, old: torch.nn.Module, new: torch.nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and its gradient by parameter, in float64."""
    logps = float64_logps(new)
    mask = [[1.0] * len(ids) + [0.0] * (L_MAX - len(ids)) for ids in COMPLETIONS]
    with torch.no_grad():
        old_rows = rows(float64_logps(old))
    batch = Batch(rows(logps), expected_advantages(), mask, old_rows)
    ((weights,),) = update_weights(NORMALISER_OF[name], [[mask]], L_MAX)
    choices = Choices(epsilon_high=1.3 if name == "cispo" else 0.28)
    loss, gradient = loss_and_gradient(name, batch, weights, choices)
    total = sum(
        (torch.tensor(row[: len(logp)], dtype=torch.float64) * logp).sum()
        for row, logp in zip(gradient, logps, strict=True)
    )
    total.backward()
    return loss, {key: value.grad for key, value in new.named_parameters()}


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
@pytest.mark.parametrize("name", sorted(SURROGATE_OF))
def test_loss_and_gradient_are_those_of_scalar_loops(tmp_path, name, layout):
    run = trainer(
        tmp_path,
        ProcessRewardModel(step_classifier(), STEP),
        reward_processing_classes=byte_tokenizer(),
        rollout_func=rollouts_of,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        per_device_train_batch_size=2 * G,
        max_completion_length=L_MAX,
        loss_type=name,
        epsilon_high=1.3 if name == "cispo" else 0.28,
        sequence_layout=layout,
        gradient_checkpointing=False,
    )
    rollouts, rewards = run.sample(run.make_request([row for row in run.train_dataset for _ in range(G)]))
    experience = run.make_experience(rollouts, rewards, 2 * G, on_policy=False)
    torch.testing.assert_close(
        experience[0].advantages_BX.double(), torch.tensor(expected_advantages()).double(), atol=1e-4, rtol=0
    )
    old = copy.deepcopy(run.model).double().eval()
    with torch.no_grad():  # so that the ratios leave 1
        torch.manual_seed(5)
        for parameter in run.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    run.model.train()
    loss, gradient = expected(name, old, copy.deepcopy(run.model).double().eval())
    (batch,) = run.make_micro_batches(experience).batches
    found = run.compute_loss(run.model, batch)
    found.backward()
    scale = max(value.abs().max().item() for value in gradient.values())
    assert found.item() == pytest.approx(loss, abs=2e-5 * max(abs(loss), 1))
    for key, parameter in run.model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(),
            gradient[key],
            atol=2e-5 * scale,
            rtol=0,
            msg=lambda m, k=key: f"{k}\n{m}",
        )


def test_a_run_learns_from_step_scores_and_logs_them(tmp_path):
    run = trainer(
        tmp_path, ProcessRewardModel(step_classifier(), STEP), reward_processing_classes=byte_tokenizer()
    )
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    run.train()
    assert any(not torch.equal(value, before[key]) for key, value in run.model.state_dict().items())
    assert run.state.log_history[0]["rewards/LlamaForTokenClassification/mean"] > 0


@pytest.mark.parametrize("separator", [STEP, "\n\n"])
def test_a_separator_that_splits_no_completion_is_reported_in_the_first_generation(
    tmp_path, caplog, separator
):
    seen = []

    def count_steps(completion_ids, **_):
        seen.append([len(split_steps(ids, tokenizer(), separator)) for ids in completion_ids])
        return [0.0] * len(completion_ids)

    run = trainer(
        tmp_path,
        [ProcessRewardModel(step_classifier(), separator), count_steps],
        reward_processing_classes=[byte_tokenizer(), None],
        per_device_train_batch_size=8,
        max_completion_length=24,
        generation_kwargs={"suppress_tokens": [1]},  # 8 x 24 random tokens: some are STEP
    )
    run.train()
    assert len(seen) == run.args.max_steps == 2
    for line, steps in zip(run.state.log_history[:-1], seen, strict=True):
        expected = sum(steps) / len(steps)
        assert line["rewards/LlamaForTokenClassification/steps"] == pytest.approx(expected)
        assert (expected > 1) is (separator == STEP)
        assert "rewards/count_steps/steps" not in line
    warnings = [record.getMessage() for record in caplog.records if "step_separator" in record.getMessage()]
    if separator == STEP:
        assert not warnings
    else:
        assert len(warnings) == 1
        assert "'LlamaForTokenClassification'" in warnings[0] and "'\\n\\n'" in warnings[0]
