"""SmolLM2-135M-Instruct through the trainer: its scores are its own, and a step moves it as it should."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from support.runs import experience, generate, weighed
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.rewards import ProcessRewardModel
from groupwise.rewards.process import StepScorer

pytestmark = pytest.mark.real_model

QUESTIONS = ["What is 2+3?", "Name a colour."]


def contains_e(completions, **_):
    return [float(completion[0]["content"].count("e")) for completion in completions]


@pytest.fixture(scope="module")
def run(smollm2_path, tmp_path_factory):
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    config = GRPOConfig(
        str(tmp_path_factory.mktemp("real")),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_steps=1,
        logging_steps=1,
        learning_rate=1e-5,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(str(smollm2_path), contains_e, config, Dataset.from_dict({"prompt": prompts}))


@pytest.mark.slow
def test_prompts_are_the_models_own_chat_format(run):
    rollout = generate(run, [{"prompt": run.train_dataset[0]["prompt"]}] * 2)
    text = run.processing_class.decode(rollout.prompt_ids[0])
    assert text.endswith("<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n")
    assert all("<|im_end|>" not in answer[0]["content"] for answer in rollout.texts)


@pytest.mark.slow
def test_chunked_log_probs_are_the_models_log_softmax(run):
    rollout = generate(run, [{"prompt": row["prompt"]} for row in run.train_dataset for _ in range(2)])
    batch = run.collate(rollout)
    with torch.no_grad():
        scores = run.compute_logprobs(run.model, batch, with_entropy=True)
        for row, completion in enumerate(rollout.completions):
            ids = torch.tensor([rollout.prompt_ids[row] + completion.token_ids])
            start = len(rollout.prompt_ids[row]) - 1
            logps = torch.log_softmax(run.model(ids).logits[0, start:-1].double(), -1)
            expected = logps.gather(1, ids[0, start + 1 :, None])[:, 0]
            length = len(completion.token_ids)
            torch.testing.assert_close(scores.logps_BT[row, :length].double(), expected, atol=1e-4, rtol=0)
            entropy = -(logps.exp() * logps).sum(-1)
            torch.testing.assert_close(scores.entropy_BT[row, :length].double(), entropy, atol=1e-4, rtol=0)


@pytest.mark.representative("the real model trains")
@pytest.mark.slow
def test_a_step_makes_better_completions_likelier_and_the_model_loads_again(run, tmp_path):
    torch.manual_seed(0)
    batches = experience(run, [row for row in run.train_dataset for _ in range(4)])
    (batch,) = weighed(run, batches)
    scored = (batch.advantages_BX * batch.loss_mask_BT).abs().sum()
    assert scored > 0
    with torch.no_grad():
        before = run.compute_logprobs(run.model, batch).logps_BT
    loss = run.compute_loss(run.model, batch)
    loss.backward()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter -= 1e-2 * parameter.grad
            parameter.grad = None
        after = run.compute_logprobs(run.model, batch).logps_BT
    gain = ((after - before) * batch.advantages_BX * batch.loss_mask_BT).sum().item()
    assert gain > 0
    run.save_model(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = AutoTokenizer.from_pretrained(tmp_path)("The capital of France is", return_tensors="pt")
    for (name, weight), trained in zip(loaded.named_parameters(), run.model.parameters(), strict=True):
        assert torch.equal(weight, trained), name
    # The trained model multiplies with another library.
    torch.testing.assert_close(loaded(**prompt).logits, run.model.eval()(**prompt).logits, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_a_token_classifier_on_the_same_weights_scores_the_steps_of_a_completion(run, smollm2_path):
    """A fresh head on SmolLM2: scores of a forward pass of its own, at the last token of each line break."""
    torch.manual_seed(0)
    judge = AutoModelForTokenClassification.from_pretrained(smollm2_path, num_labels=2, dtype="float32")
    own = run.processing_class
    scorer = StepScorer(judge, ProcessRewardModel(judge, "\n\n"), own, own, 4, False)
    answers = ["2+3 is a sum.\n\nIt is 5 \U0001f389.\n\nDone", "Five"]
    completion_ids = [[*own(text)["input_ids"], own.eos_token_id] for text in answers]
    prompt = run.train_dataset[0]["prompt"]
    found = scorer([prompt] * 2, completion_ids)
    start = own.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    for text, ids, rewards in zip(answers, completion_ids, found, strict=True):
        context, expected = list(start), []
        for step in text.split("\n\n"):
            context += own(step)["input_ids"] + own("\n\n")["input_ids"]
            with torch.no_grad():
                expected.append(judge(torch.tensor([context])).logits[0, -1].double().softmax(-1)[1].item())
        assert [score for _, score in rewards] == pytest.approx(expected, abs=1e-4)
        ended = [own.decode(ids[: end + 1]) for end, _ in rewards]
        assert all(part.endswith("\n\n") for part in ended[:-1]) and ended[-1] == own.decode(ids)
