"""Tools and environments that return images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from support import tiny_vlm as tiny
from support.agent_runs import LETTERS, RESPONSE
from support.fakes.scripted import SPECIAL, byte_tokenizer
from support.runs import generate

from groupwise import GRPOConfig, GRPOTrainer

CHAT = """\
{%- macro shown(content) %}{% for b in content %}{{ '<image>' if b.type == 'image' else b.text }}{% endfor %}\
{% endmacro -%}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + shown(message.content) }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' }}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{{- '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SQUARES = {letter: tiny.image(color) for letter, color in zip("abcd", tiny.COLORS, strict=False)}


def measure(text: str) -> Any:
    """Look at something.

    Args:
        text: what to look at.
    """
    square = SQUARES.get(text[:1], tiny.image("white", (30, 60)))
    return [{"type": "text", "text": "see "}, {"type": "image", "image": square}]


class ImageEnvironment:
    """Its observation is an image."""

    def reset(self, **_: Any) -> list[dict[str, Any]]:
        return [{"type": "image", "image": tiny.image("red")}]

    def get_reward(self) -> float:
        return 1.0


def calls(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(message["role"] == "tool" for message in messages)) for messages in completions]


def make_trainer(directory: Path, processor_of: str = "llava_next", **given: Any) -> GRPOTrainer:
    words = byte_tokenizer(CHAT, ("<image>", *SPECIAL))
    words.response_template = RESPONSE
    words.padding_side = "left"
    text = {**tiny.TEXT, "vocab_size": len(words), "max_position_embeddings": 2048}
    model, processor = tiny.llava_next_of(words, text, chat_template=CHAT)
    allowed = {*words(LETTERS)["input_ids"], words.eos_token_id}
    arguments = {
        name: given.pop(name) for name in ("tools", "environment_factory", "reward_funcs") if name in given
    }
    rows = [{"prompt": row["prompt"], "images": row["images"]} for row in tiny.rows()]
    features = {name: kind for name, kind in tiny.FEATURES.items() if name != "row"}
    settings = {
        **{**tiny.SETTINGS, "max_steps": 2, "max_completion_length": 150, "max_tool_calling_iterations": 2},
        "generation_kwargs": {
            "suppress_tokens": [i for i in range(len(words)) if i not in allowed],
        },
    }
    dataset = Dataset.from_list(rows, features=type(tiny.FEATURES)(features))
    return GRPOTrainer(
        model,
        args=GRPOConfig(str(directory), **{**settings, **given}),
        train_dataset=dataset,
        processing_class=processor,
        **{"reward_funcs": calls, **arguments},
    )


def images_of(messages: list[dict[str, Any]]) -> list[Any]:
    blocks = [block for m in messages if isinstance(m["content"], list) for block in m["content"]]
    return [block["image"] for block in blocks if block["type"] == "image"]


def sample_rollouts(trainer: GRPOTrainer) -> Any:
    rows = [row for row in trainer.train_dataset for _ in range(trainer.num_generations)]
    torch.manual_seed(1)
    return generate(trainer, rows)


def check_against_plain_forwards(trainer: GRPOTrainer, rollout: Any, **options: Any) -> list[int]:
    """Compare log-probs with plain forwards; return the number of images of each rollout.

    ``options`` are those of the image processor.
    """
    trainer.model.eval()
    batch = trainer.collate(rollout)
    counts = []
    with torch.no_grad():
        ours_BT = trainer.logprob_computer(trainer.model, batch, with_entropy=False).logps_BT
        for index, completion in enumerate(rollout.completions):
            ids = torch.tensor([[*rollout.prompt_ids[index], *completion.token_ids]])
            pictures = images_of([*rollout.prompts[index], *rollout.texts[index]])
            inputs = {}
            if pictures:
                inputs = dict(
                    trainer.processing_class.image_processor(pictures, return_tensors="pt", **options)
                )
            length = len(completion.token_ids)
            logits = trainer.model(input_ids=ids, **inputs).logits[0, -length - 1 : -1]
            plain = logits.log_softmax(-1).gather(1, ids[0, -length:, None])[:, 0]
            torch.testing.assert_close(ours_BT[index, :length], plain, atol=5e-5, rtol=0)
            counts.append(len(pictures))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"do_normalize": False}], ids=["", "processor_kwargs"])
def test_images_of_tools_are_inputs_of_the_model(options, tmp_path):
    kwargs = {"processor_kwargs": options} if options else None
    trainer = make_trainer(tmp_path, tools=[measure], chat_template_kwargs=kwargs)
    rollout = sample_rollouts(trainer)
    counts = check_against_plain_forwards(trainer, rollout, **options)
    of_tools = [len(images_of(text)) for text in rollout.texts]
    assert any(of_tools)
    assert any(
        n > tools > 0 for n, tools in zip(counts, of_tools, strict=True)
    )  # in addition to images of the prompt
    image = trainer.model.config.image_token_id
    for completion in rollout.completions:  # image tokens have no loss
        pairs = zip(completion.token_ids, completion.loss_mask, strict=True)
        assert all(mask == 0 for token, mask in pairs if token == image)


@pytest.mark.slow
def test_a_run_with_images_of_tools_trains(tmp_path):
    trainer = make_trainer(tmp_path, tools=[measure], num_iterations=2)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    vision = [name for name in before if "vision_tower.encoder.layers.0" in name]
    assert any(not torch.equal(before[name], trainer.model.get_parameter(name)) for name in vision)


def test_an_observation_may_be_an_image(tmp_path):
    trainer = make_trainer(tmp_path, environment_factory=ImageEnvironment, reward_funcs=[])
    rollout = sample_rollouts(trainer)
    counts = check_against_plain_forwards(trainer, rollout)
    assert counts == [1 + len(row["images"]) for row in tiny.rows() for _ in range(2)]


@pytest.mark.slow
def test_an_image_of_a_tool_fails_without_a_processor(tmp_path, caplog):
    from support.agent_runs import trainer as text_trainer

    trainer = text_trainer(tmp_path, tools=[measure])
    trainer.train()
    assert {log["tools/failure_frequency"] for log in trainer.state.log_history[:-1]} == {1.0}
    assert "the tool returned an image, but the model reads text only" in caplog.text
