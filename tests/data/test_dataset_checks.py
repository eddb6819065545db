"""Datasets and models that cannot be used with images are refused before anything is generated.

Files: ``policy/loading.py``, ``data/dataset_checks.py``.
"""

from __future__ import annotations

import functools
import re
import threading

import pytest
from datasets import Dataset
from support import tiny_vlm as tiny

from groupwise.data import dataset_checks
from groupwise.data.dataset_checks import check_ranks
from groupwise.errors import ConfigError
from groupwise.threads import start_thread


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
    with pytest.raises(ConfigError, match=r"row 0: content block {'type': 'image', .*reads text only"):
        tiny.trainer(tmp_path, processing_class=tiny.tokenizer(), train_dataset=Dataset.from_list(rows))


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


PROMPTS = [{"prompt": f"p{i}"} for i in range(5)]


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("train_dataset", PROMPTS[:2] + PROMPTS[3:] + PROMPTS[2:3], r"row 2 of rank 2 \(5 rows\)"),
        ("train_dataset", PROMPTS[:4], r"row 4 of rank 2 \(4 rows\) is not that of rank 0 \(5 rows\)"),
        ("eval_dataset['b']", [{"prompt": [{"role": "user", "content": "p0"}]}] * 5, "row 0 of rank 2"),
        ("eval_dataset", [], r"row 0 of rank 2 \(0 rows\)"),
        ("eval_dataset", PROMPTS[:3] * 2, None),  # the same as far as it is evaluated
        ("train_dataset", PROMPTS, None),
    ],
)
def test_ranks_with_other_data_are_named(monkeypatch, name, other, said):
    """Three ranks, here threads, of which the last one has other data; all raise."""
    rank, parts, barrier = threading.local(), {}, threading.Barrier(3)

    def gather(values):
        parts[rank.index] = values
        barrier.wait(30)
        everything = [value for index in range(3) for value in parts[index]]
        barrier.wait(30)
        return everything

    def check(index):
        rank.index = index
        check_ranks({name: other if index == 2 else [dict(row) for row in PROMPTS]}, 3)

    monkeypatch.setattr(dataset_checks, "gather_object", gather)
    for future in [start_thread(functools.partial(check, index)) for index in range(3)]:
        if said is None:
            future.result(60)
        else:
            with pytest.raises(
                ConfigError, match=rf"^{re.escape(name)} is not the same on all ranks: {said}"
            ):
                future.result(60)
