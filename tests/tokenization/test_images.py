"""Images of prompts: columns, content blocks, files, the ``Image`` feature, and errors."""

from __future__ import annotations

import io

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from support import tiny_vlm as tiny

from groupwise.errors import ConfigError
from groupwise.tokenization.images import encode_prompt, insert_images, load_image, prompt_images, thumbnail

RED, BLUE = tiny.image("red"), tiny.image("blue")
ASK = {"type": "text", "text": "w1"}


def chat(*content: object) -> list[dict]:
    return [{"role": "user", "content": list(content)}]


def png(picture) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def test_images_of_a_column_come_before_the_text_of_the_first_user_message():
    prompt = [{"role": "system", "content": "w0"}, {"role": "user", "content": "w1"}]
    given = insert_images({"prompt": prompt, "images": [RED, BLUE]})
    assert given[0]["content"] == [{"type": "text", "text": "w0"}]
    assert given[1]["content"] == [{"type": "image", "image": RED}, {"type": "image", "image": BLUE}, ASK]
    assert prompt[1]["content"] == "w1"  # the row is not changed


def test_image_blocks_get_the_images_in_order():
    blocks = [{"type": "image"}, ASK, {"type": "image", "text": None, "image": None}]
    given = insert_images({"prompt": chat(*blocks), "images": [RED, BLUE]})
    assert given[0]["content"] == [{"type": "image", "image": RED}, ASK, {"type": "image", "image": BLUE}]
    assert prompt_images(given) == [RED, BLUE]


def test_an_image_in_its_block_stays_there():
    block = {"type": "image", "image": RED}
    assert insert_images({"prompt": chat(block, ASK), "image": None})[0]["content"] == [block, ASK]
    mixed = insert_images({"prompt": chat(block, {"type": "image"}), "image": BLUE})
    assert prompt_images(mixed) == [RED, BLUE]


@pytest.mark.parametrize("column", [{"image": None}, {"images": None}, {"images": []}])
def test_a_row_without_images_is_text(column):
    given = insert_images({"prompt": chat(ASK), **column})
    assert given == chat(ASK)


def test_rows_without_an_image_column_are_returned_as_they_are():
    for prompt in ("w1", chat(ASK), [{"role": "user", "content": "w1"}]):
        assert insert_images({"prompt": prompt}) == prompt


@pytest.mark.parametrize(
    ("content", "images", "counts"),
    [
        ([{"type": "image"}, ASK], [RED, BLUE], ("2 image(s)", "1 image block")),
        ([{"type": "image"}, ASK], [], ("0 image(s)", "1 image block")),
        ([{"type": "image", "image": RED}, ASK], [BLUE], ("1 image(s)", "0 image block")),
    ],
)
def test_image_blocks_and_images_must_match_in_number(content, images, counts):
    with pytest.raises(ConfigError) as error:
        insert_images({"prompt": chat(*content), "images": images})
    assert all(count in str(error.value) for count in counts)


def test_images_are_opened_from_files_bytes_and_arrays(tmp_path):
    RED.save(tmp_path / "red.png")
    stored = {"bytes": png(RED), "path": None}
    for given in (str(tmp_path / "red.png"), stored, {"bytes": None, "path": str(tmp_path / "red.png")}):
        assert np.array_equal(np.asarray(load_image(given)), np.asarray(RED))
    array = np.asarray(RED)
    assert load_image(array) is array
    with pytest.raises(ConfigError, match=r"no_such_file\.png"):
        load_image(str(tmp_path / "no_such_file.png"))


@pytest.mark.parametrize("given", ["block", "path", "stored"])
def test_every_source_gives_the_same_inputs(given, tmp_path):
    _, processor = tiny.build("gemma3")
    RED.save(tmp_path / "red.png")
    block = {
        "block": {"type": "image", "image": RED},
        "path": {"type": "image", "path": str(tmp_path / "red.png")},
        "stored": {"type": "image", "image": {"bytes": png(RED), "path": None}, "text": None},
    }[given]
    expected, inputs = encode_prompt(processor, insert_images({"prompt": chat(ASK), "image": RED}))
    ids, own = encode_prompt(processor, chat(block, ASK))
    assert ids == expected
    assert (own.arrays["pixel_values"] == inputs.arrays["pixel_values"]).all()
    # boi, four image tokens, eoi: token types mark the image tokens
    assert own.token_types["token_type_ids"] == [int(token == tiny.IMAGE_TOKEN) for token in ids]


def test_processor_kwargs_of_the_chat_template_reach_the_processor():
    _, processor = tiny.build("gemma3")
    prompt = chat({"type": "image", "image": RED}, ASK)
    ids, given = encode_prompt(processor, prompt, (), {"processor_kwargs": {"do_normalize": False}})
    expected = processor.apply_chat_template(
        prompt,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"do_normalize": False},
    )
    assert ids == expected["input_ids"][0].tolist()
    assert given.arrays["pixel_values"].equal(expected["pixel_values"])
    _, plain = encode_prompt(processor, prompt)
    assert not given.arrays["pixel_values"].equal(plain.arrays["pixel_values"])


def test_the_image_feature_of_datasets_works_in_columns_and_blocks():
    block = {"type": Value("string"), "text": Value("string"), "image": ImageFeature()}
    features = Features(
        {"prompt": List({"role": Value("string"), "content": List(block)}), "image": ImageFeature()}
    )
    rows = [
        {
            "prompt": chat({"type": "image", "image": RED, "text": None}, {**ASK, "image": None}),
            "image": None,
        },
        {"prompt": chat({**ASK, "image": None}), "image": RED},
        {"prompt": chat({**ASK, "image": None}), "image": None},
    ]
    dataset = Dataset.from_list(rows, features=features)
    _, processor = tiny.build("gemma3")
    read = [encode_prompt(processor, insert_images(row)) for row in dataset]
    assert read[0][0] == read[1][0]
    assert (read[0][1].arrays["pixel_values"] == read[1][1].arrays["pixel_values"]).all()
    assert not read[2][1].arrays


def test_a_text_prompt_has_image_tokens():
    _, processor = tiny.build("llava_next")
    ids, inputs = encode_prompt(processor, "<image> w1 <image>", [RED, BLUE])
    assert ids[0] == ids[-1] == tiny.IMAGE_TOKEN
    assert len(inputs.arrays["image_sizes"]) == 2
    with pytest.raises(ConfigError, match=r"1 image\(s\).*2 image token"):
        encode_prompt(processor, "<image> w1 <image>", [RED])


def test_a_block_without_an_image_is_refused():
    _, processor = tiny.build("gemma3")
    with pytest.raises(ConfigError, match="has no image"):
        encode_prompt(processor, chat({"type": "image"}, ASK))


def test_truncation_removes_text_but_no_image():
    _, processor = tiny.build("gemma3")
    prompt = chat({"type": "text", "text": "w1 w2 w3"}, {"type": "image", "image": RED}, ASK)
    whole, inputs = encode_prompt(processor, prompt)
    first = whole.index(tiny.SPECIAL.index("<boi>"))
    cut, cut_inputs = encode_prompt(processor, prompt, max_length=len(whole) - first)
    assert cut == whole[first:]
    assert cut_inputs.token_types["token_type_ids"] == inputs.token_types["token_type_ids"][first:]
    with pytest.raises(ConfigError, match=f"max_prompt_length=3.*at least {len(whole)}"):
        encode_prompt(processor, prompt, max_length=3)


def test_a_thumbnail_is_small_for_every_kind_of_image():
    large = RED.resize((2000, 1000))
    for given in (large, np.asarray(large), np.asarray(large).transpose(2, 0, 1) / 255.0):
        picture = Image.open(io.BytesIO(thumbnail(given)))
        assert picture.size == (512, 256)
        assert picture.getpixel((5, 5)) == tiny.COLORS["red"]
