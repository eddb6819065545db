"""Training on images: log-probs and gradients equal those of plain forwards, for four model families."""

from __future__ import annotations

import io
import itertools
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from PIL import Image
from support import tiny_vlm as tiny
from support.runs import experience
from support.serialization import reloaded

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.compat.transformers import supports_cache_in_checkpoints
from groupwise.errors import ConfigError
from groupwise.policy.loading import auto_class
from groupwise.records import Experience, ImageInputs
from groupwise.reporting import completions
from groupwise.tokenization.images import encode_prompt, prompt_images

EVERY_FAMILY = pytest.mark.parametrize("family", tiny.FAMILIES)


def buffered(trainer) -> Experience:
    """The micro-batches of one generation batch, concatenated."""
    rows = [row for row in trainer.train_dataset for _ in range(trainer.num_generations)]
    return Experience.concatenate(experience(trainer, rows))


def messages(row: dict) -> list[dict]:
    """Chat messages of a dataset row, with image blocks."""
    blocks = [{"type": "image", "image": picture} for picture in row["images"]]
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": row["prompt"][0]["content"]}]}]


def plain_scores(model, processor, row: dict, completion: list[int]) -> torch.Tensor:
    """Log-probs of the vocabulary before each token of one completion: one forward without padding."""
    inputs = dict(
        processor.apply_chat_template(
            messages(row), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    )
    added = torch.tensor([completion])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], added], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.zeros_like(added)], dim=1)
    return model(**inputs, use_cache=False).logits[0, -len(completion) - 1 : -1].log_softmax(-1)


def plain_logps(model, processor, row: dict, completion: list[int]) -> torch.Tensor:
    scores_CV = plain_scores(model, processor, row, completion)
    return scores_CV.gather(1, torch.tensor(completion)[:, None])[:, 0]


def compare_rows(trainer, batch: Experience) -> None:
    """Compare the log-probs of a padded batch with one forward per row."""
    scores = trainer.logprob_computer(trainer.model, batch, with_entropy=False)
    rows = [row for row in trainer.train_dataset for _ in range(trainer.num_generations)]
    for index, row in enumerate(rows):
        length = int(batch.completion_mask_BT[index].sum())
        completion = batch.completion_ids_BT[index, :length].tolist()
        expected = plain_logps(trainer.model, trainer.processing_class, row, completion)
        # Float32 rounding; a missing or exchanged image changes log-probs by more than 0.01.
        torch.testing.assert_close(scores.logps_BT[index, :length], expected, atol=2e-5, rtol=0)


@EVERY_FAMILY
@pytest.mark.parametrize("head", ["dense", "chunked"])
def test_logprobs_equal_one_forward_per_row(family, head, tmp_path):
    trainer = tiny.trainer(tmp_path, family, logprob_head=head)
    trainer.model.eval()
    with torch.no_grad():
        compare_rows(trainer, buffered(trainer))


@EVERY_FAMILY
def test_an_image_changes_the_log_probs(family, tmp_path):
    """Otherwise the comparison with one forward per row could not detect a missing or exchanged image."""
    model, processor = tiny.build(family)
    row = {**tiny.rows()[0], "images": [tiny.image("red")]}
    other = {**row, "images": [tiny.image("green")]}
    model.eval()
    with torch.no_grad():
        one, two = (plain_logps(model, processor, given, [20, 21]) for given in (row, other))
    assert (one - two).abs().max() > 0.01


@EVERY_FAMILY
def test_generation_uses_the_images_as_training_does(family, tmp_path):
    """Greedy decoding samples the most probable token that is not an image token."""
    trainer = tiny.trainer(tmp_path, family, generation_kwargs={"do_sample": False})
    trainer.model.eval()
    batch = buffered(trainer)
    rows = [row for row in trainer.train_dataset for _ in range(trainer.num_generations)]
    with torch.no_grad():
        for index, row in enumerate(rows):
            length = int(batch.completion_mask_BT[index].sum())
            taken = batch.completion_ids_BT[index, :length].tolist()
            scores_CV = plain_scores(trainer.model, trainer.processing_class, row, taken)
            scores_CV[:, tiny.IMAGE_TOKEN] = -torch.inf
            ours = scores_CV.gather(1, torch.tensor(taken)[:, None])[:, 0]
            assert (ours >= scores_CV.amax(-1) - 1e-4).all()  # up to ties


@pytest.mark.slow
@EVERY_FAMILY
def test_two_steps_update_the_vision_tower(family, tmp_path):
    trainer = tiny.trainer(tmp_path, family)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    vision = [name for name in before if "vision" in name or "visual" in name]
    moved = [name for name in vision if not torch.equal(before[name], trainer.model.get_parameter(name))]
    assert trainer.state.global_step == 2
    assert len(moved) > len(vision) / 2  # some towers have an unused last layer or pooling


@pytest.mark.slow
@EVERY_FAMILY
def test_every_split_of_the_batch_gives_the_same_gradient(family, tmp_path):
    """Rows with and without images, alone and together, in any order."""
    trainer = tiny.trainer(tmp_path, family)
    trainer.model.train()
    batch = buffered(trainer)
    count = len(batch)
    splits = {
        "whole": [range(count)],
        "rows": [[row] for row in range(count)],
        "mixed": [[5, 0, 3], [4, 1, 7], [6, 2]],
    }
    gradients = {}
    for name, parts in splits.items():
        trainer.model.zero_grad()
        for part in parts:
            few = batch.select(part)
            scores = trainer.logprob_computer(trainer.model, few, with_entropy=False)
            (scores.logps_BT * few.completion_mask_BT).sum().backward()
        grads = [weight.grad for weight in trainer.model.parameters() if weight.grad is not None]
        gradients[name] = torch.cat([grad.flatten() for grad in grads])
    for one, two in itertools.pairwise(gradients.values()):
        assert (one - two).norm() <= 1e-4 * one.norm()


@pytest.mark.slow
def test_a_buffered_generation_is_trained_on_with_its_images(tmp_path):
    settings = {"steps_per_generation": 4, "beta": 0.1}
    dataset = Dataset.from_list(tiny.rows(8), features=tiny.FEATURES)
    trainer = tiny.trainer(tmp_path, "qwen2_5_vl", max_steps=4, train_dataset=dataset, **settings)
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.logprob_computer.layout == ("forked" if supports_cache_in_checkpoints() else "padded")


@pytest.mark.slow
def test_resuming_in_the_middle_of_a_buffer_is_exact(tmp_path):
    """With two iterations over two steps of rows, checkpoints contain a partly used buffer."""
    dataset = Dataset.from_list(tiny.rows(8), features=tiny.FEATURES)
    settings = {
        "train_dataset": dataset,
        "num_iterations": 2,
        "steps_per_generation": 4,
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    whole = tiny.trainer(tmp_path / "whole", "llava_next", **settings)
    whole.train()
    for step in (1, 3):
        again = tiny.trainer(tmp_path / f"again{step}", "llava_next", **settings)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        for (name, one), two in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
            assert torch.equal(one, two), (step, name)


def test_rows_that_share_a_prompt_share_its_images(tmp_path):
    """In memory, and in a checkpoint."""
    trainer = tiny.trainer(tmp_path)
    batch = buffered(trainer)
    assert batch.images[0] is batch.images[1]
    loaded = reloaded(batch)
    assert loaded.images[0] is loaded.images[1]
    assert torch.equal(loaded.images[0].arrays["pixel_values"], batch.images[0].arrays["pixel_values"])
    assert loaded.images[2].token_types == batch.images[2].token_types


def test_the_image_token_is_never_sampled(tmp_path):
    trainer = tiny.trainer(tmp_path, max_completion_length=40, generation_kwargs={"suppress_tokens": [20]})
    with torch.no_grad():  # all logits are equal now
        trainer.model.get_output_embeddings().weight.zero_()
    sampled = buffered(trainer).completion_ids_BT.unique().tolist()
    assert len(sampled) > 20
    assert tiny.IMAGE_TOKEN not in sampled
    assert 20 not in sampled


@pytest.mark.slow
def test_a_model_given_by_path_is_loaded_with_vision_tower_and_processor(tmp_path):
    model, processor = tiny.build("gemma3")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    dataset = Dataset.from_list(tiny.rows(), features=tiny.FEATURES)
    args = GRPOConfig(str(tmp_path / "run"), max_steps=1, **tiny.SETTINGS)
    trainer = GRPOTrainer(str(tmp_path / "model"), tiny.even_reward, args, dataset)
    assert type(trainer.model) is type(model)
    assert type(trainer.processing_class) is type(processor)
    trainer.train()
    trainer.save_model()
    again = type(model).from_pretrained(tmp_path / "run")
    for one, two in zip(trainer.model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_of_the_language_model_alone_is_a_causal_model(tmp_path):
    model, _ = tiny.build("gemma3")
    text = transformers.Gemma3ForCausalLM(model.config.text_config)
    text.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert auto_class(config) is transformers.AutoModelForCausalLM
    assert auto_class(model.config) is transformers.AutoModelForImageTextToText


@pytest.mark.slow
def test_the_best_model_is_loaded_from_checkpoints_with_other_weight_names(tmp_path):
    """Gemma 3 saves the names of its first release: Trainer alone would keep the last weights and warn."""

    def falling(completion_ids, trainer_state, **_):
        return [value - 100.0 * trainer_state.global_step for value in tiny.even_reward(completion_ids)]

    dataset = Dataset.from_list(tiny.rows(), features=tiny.FEATURES)
    settings = {
        **{"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"},
        **{"save_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "eval_reward"},
        **{"eval_dataset": dataset, "per_device_eval_batch_size": 4},
    }
    trainer = tiny.trainer(tmp_path, "gemma3", rewards=falling, **settings)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    best = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint)
    for one, two in zip(trainer.model.parameters(), best.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
def test_a_lora_trains_language_model_and_vision_tower(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = tiny.trainer(tmp_path, "gemma3", peft_config=config, beta=0.1, num_iterations=2)
    trainer.train()
    moved = {
        "vision_tower" in name: bool(weight.any())
        for name, weight in trainer.model.named_parameters()
        if "lora_B" in name
    }
    assert moved == {True: True, False: True}


def test_evaluation_uses_images(tmp_path):
    dataset = Dataset.from_list(tiny.rows(3), features=tiny.FEATURES)
    trainer = tiny.trainer(tmp_path, "qwen2_5_vl", eval_dataset=dataset, per_device_eval_batch_size=4)
    assert "eval_reward" in trainer.evaluate()


def test_reward_functions_get_the_images(tmp_path):
    seen = []

    def note(prompts, completions, images, row, **_):
        seen.extend(zip(prompts, completions, images, row, strict=True))
        return [0.0] * len(prompts)

    trainer = tiny.trainer(tmp_path, rewards=note, max_steps=1)
    trainer.train()
    for prompt, completion, images, row in seen:
        expected = tiny.rows()[row]["images"]
        assert len(images) == len(prompt_images(prompt)) == len(expected)
        assert [picture.size for picture in prompt_images(prompt)] == [picture.size for picture in expected]
        assert completion[0]["role"] == "assistant"


@pytest.mark.parametrize("multimodal", [True, False])
def test_logged_completions_have_the_images_of_their_prompts(multimodal, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(completions, "report_completions", lambda rows, *_: logged.extend(rows))
    tiny.trainer(tmp_path, log_completions=True, log_multimodal=multimodal, max_steps=1).train()
    wanted = {question(row): row["images"] for row in tiny.rows()}
    for row in logged:
        text = question(row)
        words, count = text.replace("<image>", ""), text.count("<image>")
        assert count == len(wanted[words])
        assert len(row.get("images", ())) == count * multimodal
        assert [Image.open(io.BytesIO(one)).size for one in row.get("images", ())] == [
            picture.size for picture in wanted[words] if multimodal
        ]


def question(row: dict) -> str:
    """Text of the prompt with ``<image>`` for each image block."""
    content = row["prompt"][0]["content"]
    if isinstance(content, str):
        return content
    return "".join(block["text"] if block["type"] == "text" else "<image>" for block in content)


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl"])
def test_rows_of_a_rollout_see_the_images_of_their_own_context(tmp_path, family):
    """A row that repeats the prompt has its image, a sub-agent without the prompt has none."""
    sub_agent, rows = [2, 20, 21, 3], []

    def rollout(given, run):
        prompts = [encode_prompt(run.processing_class, prompt)[0] for prompt in given]
        for i, prompt in enumerate(prompts):
            rows.extend(
                [(i, prompt, [22, 23 + i % 4]), (i, sub_agent, [24, 25]), (i, prompt, [26, 27 + i % 4])]
            )
        numbers, contexts, said = zip(*rows, strict=True)
        return {"prompt_ids": contexts, "completion_ids": said, "rollout_ids": numbers}

    run = tiny.trainer(tmp_path, family=family, rollout_func=rollout, max_steps=1)
    request = run.make_request([run.train_dataset[0]] * run.args.num_generations)
    tokens = run.collate(run.generate_rollouts(request))
    ours = run.compute_logprobs(run.model, tokens).logps_BT
    with_image = run.tokenize([run.train_dataset[0]])[1][0]
    for row, ids in enumerate(tokens.completion_ids_BT.tolist()):
        parts = [(rows[3 * row + k], ids[2 * k : 2 * k + 2]) for k in range(3)]
        for k, ((_, context, said), own) in enumerate(parts):
            assert own == said
            alone = replace(
                tokens.select([row]),
                prompt_ids_BL=torch.tensor([context]),
                prompt_mask_BL=torch.ones(1, len(context), dtype=torch.long),
                completion_ids_BT=torch.tensor([said]),
                completion_mask_BT=torch.ones(1, 2, dtype=torch.long),
                loss_mask_BT=torch.ones(1, 2, dtype=torch.long),
                old_logps_BT=torch.full((1, 2), torch.nan),
                images=(ImageInputs() if k == 1 else with_image,),
                contexts=None,
            )
            theirs = run.compute_logprobs(run.model, alone).logps_BT[0]
            torch.testing.assert_close(ours[row, 2 * k : 2 * k + 2], theirs, atol=1e-5, rtol=0)


def test_a_rollout_func_must_return_the_tokens_of_the_processor(tmp_path):
    def rollout(prompts, trainer):
        ids = [encode_prompt(trainer.processing_class, prompt)[0] for prompt in prompts]
        return {"prompt_ids": [p[shift:] for p in ids], "completion_ids": [[20, 21, 1]] * len(ids)}

    shift = 0
    tiny.trainer(tmp_path, rollout_func=rollout, max_steps=1).train()
    shift = 1
    with pytest.raises(ConfigError, match="that the processor returns"):
        tiny.trainer(tmp_path, rollout_func=rollout, max_steps=1).train()


@pytest.mark.slow
def test_the_example_learns_from_the_images(tmp_path, monkeypatch):
    """A constant answer would be right for a quarter of the squares."""
    example = Path(__file__).parents[2] / "examples" / "vlm.py"
    monkeypatch.setattr(sys, "argv", [str(example), "--max_steps", "60", "--output_dir", str(tmp_path)])
    trainer = runpy.run_path(str(example))["trainer"]
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards[-1] > 0.6
