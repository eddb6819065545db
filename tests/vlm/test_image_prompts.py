"""Where images come from: columns, content blocks, files, the Image feature; and what is refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from support import tiny_vlm as tiny

from groupwise import reporting
from groupwise.errors import ConfigError
from groupwise.tokenization.images import image_prompt, load_image, prompt_images, read_prompt, thumbnail

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
    given = image_prompt({"prompt": prompt, "images": [RED, BLUE]})
    assert given[0]["content"] == [{"type": "text", "text": "w0"}]
    assert given[1]["content"] == [{"type": "image", "image": RED}, {"type": "image", "image": BLUE}, ASK]
    assert prompt[1]["content"] == "w1"  # the row is left as it was


def test_image_blocks_take_the_images_in_order():
    blocks = [{"type": "image"}, ASK, {"type": "image", "text": None, "image": None}]
    given = image_prompt({"prompt": chat(*blocks), "images": [RED, BLUE]})
    assert given[0]["content"] == [{"type": "image", "image": RED}, ASK, {"type": "image", "image": BLUE}]
    assert prompt_images(given) == [RED, BLUE]


def test_an_image_in_its_block_stays_there():
    block = {"type": "image", "image": RED}
    assert image_prompt({"prompt": chat(block, ASK), "image": None})[0]["content"] == [block, ASK]
    mixed = image_prompt({"prompt": chat(block, {"type": "image"}), "image": BLUE})
    assert prompt_images(mixed) == [RED, BLUE]


@pytest.mark.parametrize("column", [{"image": None}, {"images": None}, {"images": []}])
def test_a_row_without_images_is_text(column):
    given = image_prompt({"prompt": chat(ASK), **column})
    assert given == chat(ASK)


def test_rows_without_a_column_are_left_alone():
    for prompt in ("w1", chat(ASK), [{"role": "user", "content": "w1"}]):
        assert image_prompt({"prompt": prompt}) is prompt


@pytest.mark.parametrize(
    ("content", "images", "counts"),
    [
        ([{"type": "image"}, ASK], [RED, BLUE], ("2 image(s)", "1 image block")),
        ([{"type": "image"}, ASK], [], ("0 image(s)", "1 image block")),
        ([{"type": "image", "image": RED}, ASK], [BLUE], ("1 image(s)", "0 image block")),
    ],
)
def test_blocks_and_images_must_match(content, images, counts):
    with pytest.raises(ConfigError) as error:
        image_prompt({"prompt": chat(*content), "images": images})
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
    expected, inputs = read_prompt(processor, image_prompt({"prompt": chat(ASK), "image": RED}))
    ids, own = read_prompt(processor, chat(block, ASK))
    assert ids == expected
    assert (own.arrays["pixel_values"] == inputs.arrays["pixel_values"]).all()
    # boi, four pieces, eoi: the types say which tokens are of an image
    assert own.token_types["token_type_ids"] == [int(token == tiny.IMAGE_TOKEN) for token in ids]


def test_the_image_feature_of_datasets_is_read_in_both_places():
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
    read = [read_prompt(processor, image_prompt(row)) for row in dataset]
    assert read[0][0] == read[1][0]
    assert (read[0][1].arrays["pixel_values"] == read[1][1].arrays["pixel_values"]).all()
    assert not read[2][1].arrays


def test_a_text_names_its_images_by_the_image_token():
    _, processor = tiny.build("llava_next")
    ids, inputs = read_prompt(processor, "<image> w1 <image>", [RED, BLUE])
    assert ids[0] == ids[-1] == tiny.IMAGE_TOKEN
    assert len(inputs.arrays["image_sizes"]) == 2
    with pytest.raises(ConfigError, match=r"1 image\(s\).*2 image token"):
        read_prompt(processor, "<image> w1 <image>", [RED])


def test_a_block_without_an_image_is_refused():
    _, processor = tiny.build("gemma3")
    with pytest.raises(ConfigError, match="has no image"):
        read_prompt(processor, chat({"type": "image"}, ASK))


def test_the_prompt_limit_cuts_text_but_no_image():
    _, processor = tiny.build("gemma3")
    prompt = chat({"type": "text", "text": "w1 w2 w3"}, {"type": "image", "image": RED}, ASK)
    whole, inputs = read_prompt(processor, prompt)
    first = whole.index(tiny.SPECIAL.index("<boi>"))
    cut, cut_inputs = read_prompt(processor, prompt, max_length=len(whole) - first)
    assert cut == whole[first:]
    assert cut_inputs.token_types["token_type_ids"] == inputs.token_types["token_type_ids"][first:]
    with pytest.raises(ConfigError, match=f"max_prompt_length=3.*at least {len(whole)}"):
        read_prompt(processor, prompt, max_length=3)


def test_images_need_a_processor(tmp_path):
    with pytest.raises(ConfigError, match=r"train_dataset has a column 'images'.*reads text only"):
        tiny.trainer(tmp_path, processing_class=tiny.tokenizer())


def test_images_in_blocks_need_a_processor_too(tmp_path):
    rows = [{"prompt": chat({"type": "image", "path": "x.png"}, ASK)}] * 4
    trainer = tiny.trainer(tmp_path, processing_class=tiny.tokenizer(), train_dataset=Dataset.from_list(rows))
    with pytest.raises(ConfigError, match=r"1 image\(s\).*reads text only"):
        trainer.train()


def test_one_column_of_images_is_enough(tmp_path):
    dataset = Dataset.from_list([{**row, "image": None} for row in tiny.rows()])
    with pytest.raises(ConfigError, match="both an 'image' and an 'images' column"):
        tiny.trainer(tmp_path, train_dataset=dataset)


def test_models_whose_images_are_no_tokens_are_refused(tmp_path):
    model, processor = tiny.build("gemma3")
    model.config.model_type = "mllama"
    with pytest.raises(ConfigError, match="layers of its own"):
        tiny.trainer(tmp_path, model=model, processing_class=processor)


def test_rewards_see_the_images(tmp_path):
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
    monkeypatch.setattr(reporting, "report_completions", lambda rows, *_: logged.extend(rows))
    tiny.trainer(tmp_path, log_completions=True, log_multimodal=multimodal, max_steps=1).train()
    wanted = {question(row): row["images"] for row in tiny.rows()}
    for row in logged:
        text = row["prompt"].removeprefix("user: ")
        words, count = text.replace("<image>", ""), text.count("<image>")
        assert count == len(wanted[words])
        assert len(row.get("images", ())) == count * multimodal
        assert [Image.open(io.BytesIO(one)).size for one in row.get("images", ())] == [
            picture.size for picture in wanted[words] if multimodal
        ]


def question(row: dict) -> str:
    return row["prompt"][0]["content"]


def test_a_logged_image_is_small_and_whatever_was_given():
    large = RED.resize((2000, 1000))
    for given in (large, np.asarray(large), np.asarray(large).transpose(2, 0, 1) / 255.0):
        picture = Image.open(io.BytesIO(thumbnail(given)))
        assert picture.size == (512, 256)
        assert picture.getpixel((5, 5)) == tiny.COLORS["red"]


def test_a_rollout_function_must_use_the_tokens_of_the_processor(tmp_path):
    def rollout(prompts, trainer):
        ids = [read_prompt(trainer.processing_class, prompt)[0] for prompt in prompts]
        return {"prompt_ids": [p[shift:] for p in ids], "completion_ids": [[20, 21, 1]] * len(ids)}

    shift = 0
    tiny.trainer(tmp_path, rollout_func=rollout, max_steps=1).train()
    shift = 1
    with pytest.raises(ConfigError, match="that the processor makes"):
        tiny.trainer(tmp_path, rollout_func=rollout, max_steps=1).train()
