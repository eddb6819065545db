"""Datasets and models that cannot be used with images are refused before anything is generated.

Files: ``policy/loading.py``.
"""

from __future__ import annotations

import pytest
from datasets import Dataset
from support import tiny_vlm as tiny

from groupwise.errors import ConfigError


def test_an_image_column_needs_a_processor_before_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.trainer.prepare_policy", lambda *_: pytest.fail("the policy was loaded"))
    with pytest.raises(ConfigError, match=r"train_dataset has a column 'images'.*reads text only"):
        tiny.trainer(tmp_path, processing_class=tiny.tokenizer())


def test_images_in_content_blocks_need_a_processor(tmp_path):
    rows = [
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [{"type": "image", "path": "x.png"}, {"type": "text", "text": "w1"}],
                }
            ]
        }
    ] * 4
    trainer = tiny.trainer(tmp_path, processing_class=tiny.tokenizer(), train_dataset=Dataset.from_list(rows))
    with pytest.raises(ConfigError, match=r"1 image\(s\).*reads text only"):
        trainer.train()


def test_two_image_columns_are_refused(tmp_path):
    dataset = Dataset.from_list([{**row, "image": None} for row in tiny.rows()])
    with pytest.raises(ConfigError, match="both an 'image' and an 'images' column"):
        tiny.trainer(tmp_path, train_dataset=dataset)


def test_models_without_image_tokens_are_refused(tmp_path):
    model, processor = tiny.build("gemma3")
    model.config.model_type = "mllama"
    with pytest.raises(ConfigError, match="cross-attention layers"):
        tiny.trainer(tmp_path, model=model, processing_class=processor)


def test_image_columns_of_a_dataset_given_to_evaluate_are_checked(tmp_path):
    texts = Dataset.from_list([{"prompt": "w1 w2"}] * 4)
    trainer = tiny.trainer(tmp_path, processing_class=tiny.tokenizer(), train_dataset=texts)
    with pytest.raises(ConfigError, match=r"eval_dataset has a column 'images'.*reads text only"):
        trainer.evaluate(Dataset.from_list(tiny.rows()))
