"""Prompts with images: dataset rows to chat messages, messages to tokens and model inputs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from groupwise.core.images import ImageInputs
from groupwise.errors import ConfigError
from groupwise.tokenization.prompts import Prompt, continues, is_chat

#: Dataset columns with images.
COLUMNS = ("image", "images")

_PAYLOADS = ("image", "url", "path", "base64")  # where a content block may keep its image
_THUMBNAIL = 512
_TOKEN_INPUTS = ("input_ids", "attention_mask")


def is_processor(processing_class: Any) -> bool:
    """Whether it turns images into model inputs, as a tokenizer does not."""
    return getattr(processing_class, "image_processor", None) is not None


def check_columns(name: str, columns: Sequence[str]) -> None:
    """Refuse a dataset with both columns of images.

    Raises:
        ConfigError: naming the dataset.
    """
    if all(column in columns for column in COLUMNS):
        raise ConfigError(
            f"{name} has both an 'image' and an 'images' column; keep one: 'image' for one image per row, "
            "'images' for a list of them"
        )


def row_images(row: Mapping[str, Any]) -> list[Any]:
    """The images in a row's columns, in their order; None entries count for nothing."""
    given = row["images"] if "images" in row else [row.get("image")]
    return [image for image in given or () if image is not None]


def image_prompt(row: Mapping[str, Any]) -> Prompt:
    """The prompt of a row with the images of its columns in place.

    An image block without an image takes the next one of the columns. Where there is no such block, the
    images come before the text of the first user message. Rows without columns of images are left alone.

    Raises:
        ConfigError: blocks and images do not match in number.
    """
    prompt = row["prompt"]
    if not is_chat(prompt) or not any(column in row for column in COLUMNS):
        return prompt
    messages = [{**message, "content": content_blocks(message)} for message in prompt]
    images = row_images(row)
    empty = [block for message in messages for block in message["content"] if _is_empty(block)]
    filled = any(_is_image(block) for message in messages for block in message["content"]) and not empty
    if images and not empty and not filled:
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        empty = [{"type": "image"} for _ in images]
        first["content"] = [*empty, *first["content"]]
    if len(empty) != len(images):
        raise ConfigError(
            f"a row has {len(images)} image(s) in its 'image' or 'images' column, but its prompt has "
            f"{len(empty)} image block(s) without an image; give as many of the one as of the other, or no "
            f"image block at all: {_shown(prompt)}"
        )
    waiting = iter(images)
    for message in messages:
        message["content"] = [
            {**block, "image": next(waiting)} if _is_empty(block) else block for block in message["content"]
        ]
    return messages


def content_blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message's content as a list of blocks, without entries that are None.

    A dataset gives every block the keys of all blocks, with None where a block has none.
    """
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{key: value for key, value in block.items() if value is not None} for block in content or ()]


def prompt_images(prompt: Prompt) -> list[Any]:
    """The images in the content blocks of a prompt, in their order, as they were given."""
    if not is_chat(prompt):
        return []
    blocks = [block for message in prompt for block in _blocks(message)]
    return [_payload(block) for block in blocks if _has_payload(block)]


def unreadable(what: str, tokenizer: Any) -> ConfigError:
    """What to raise where there are images and nothing that reads them."""
    return ConfigError(
        f"{what}, but processing_class is a {type(tokenizer).__name__}, which reads text only; pass the "
        "processor of a vision-language model (AutoProcessor.from_pretrained), or drop the images"
    )


def refuse_images(row: Mapping[str, Any], prompt: Prompt, tokenizer: Any) -> None:
    """Raise where a row has images that a tokenizer cannot read.

    Raises:
        ConfigError: naming what was given.
    """
    count = len(prompt_images(prompt)) or len(row_images(row))
    if count:
        raise unreadable(f"a row has {count} image(s)", tokenizer)


def check_rollout(
    given: Sequence[Sequence[int]], own: Sequence[Sequence[int]], images: Sequence[ImageInputs] | None
) -> None:
    """Refuse prompt tokens of a rollout function that would not fit the images of the prompts.

    Raises:
        ConfigError: the tokens of a prompt with images are not those of the processor.
    """
    for row, (theirs, ours, inputs) in enumerate(zip(given, own, images or (), strict=True)):
        if inputs.arrays and list(theirs) != list(ours):
            raise ConfigError(
                f"rollout_func returned {len(theirs)} tokens for prompt {row}, which has images, and they "
                f"are not the {len(ours)} tokens that the processor makes of it (apply_chat_template with "
                "the chat_template_kwargs of the configuration); return those"
            )


def read_prompt(
    processor: Any,
    prompt: Prompt,
    images: Sequence[Any] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> tuple[list[int], ImageInputs]:
    """Tokens of a prompt, those of its images included, and what the model takes beside them.

    Args:
        prompt: chat messages with their images in content blocks, or a text with the processor's image token
            where each of ``images`` stands.
        images: of a text only.
        max_length: longer prompts lose tokens on the left, but none of an image.

    Raises:
        ConfigError: image tokens and images do not match, or the limit would cut an image.
    """
    if is_chat(prompt):
        unfinished = continues(prompt)
        messages = [{**message, "content": _loaded(content_blocks(message))} for message in prompt]
        if any(_is_empty(block) for message in messages for block in message["content"]):
            raise ConfigError(f"an image block of a prompt has no image: {_shown(prompt)}")
        inputs = processor.apply_chat_template(
            messages,
            add_generation_prompt=not unfinished,
            continue_final_message=unfinished,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **(template_kwargs or {}),
        )
        ids, read = _separated(processor, inputs, len(prompt_images(messages)))
    else:
        ids, read = read_text(processor, prompt, images)
    excess = 0 if max_length is None else max(len(ids) - max_length, 0)
    if excess:
        _check_cut(ids[:excess], processor, max_length, len(ids))
    cut = {name: numbers[excess:] for name, numbers in read.token_types.items()}
    return ids[excess:], ImageInputs(read.arrays, cut)


def read_text(
    processor: Any, text: str, images: Sequence[Any], **options: Any
) -> tuple[list[int], ImageInputs]:
    """Tokens of a text that names its images by the processor's image token, and the model's other inputs.

    Args:
        options: of the processor's call.

    Raises:
        ConfigError: image tokens and images do not match.
    """
    count = _count_tokens(processor, text, images)
    loaded = [load_image(image) for image in images]
    inputs = processor(text=[text], images=[loaded] if loaded else None, return_tensors="pt", **options)
    return _separated(processor, inputs, count)


def _separated(processor: Any, inputs: Mapping[str, Any], count: int) -> tuple[list[int], ImageInputs]:
    """What a processor returned for one sequence with ``count`` images: its tokens, and everything else."""
    arrays, types = {}, {}
    for name, value in inputs.items():
        if name.endswith("token_type_ids"):
            types[name] = value[0].tolist()
        elif name not in _TOKEN_INPUTS and isinstance(value, torch.Tensor):
            arrays[name] = value
    if count and "pixel_values" not in arrays:
        raise ConfigError(
            f"{type(processor).__name__} made no tensor of pixel values from {count} image(s), only "
            f"{', '.join(inputs)}; this kind of model cannot be trained on images"
        )
    return inputs["input_ids"][0].tolist(), ImageInputs(arrays, types)


def load_image(image: Any) -> Any:
    """An image as processors take it: files and the undecoded images of a dataset are opened.

    Raises:
        ConfigError: it cannot be opened.
    """
    if isinstance(image, Mapping) and {"bytes", "path"} & image.keys():
        image = io.BytesIO(image["bytes"]) if image.get("bytes") is not None else image["path"]
    if not isinstance(image, (str, io.BytesIO)):
        return image
    try:
        if isinstance(image, io.BytesIO):
            from PIL import Image

            return Image.open(image)
        from transformers.image_utils import load_image as load

        return load(image)
    except Exception as error:
        shown = image if isinstance(image, str) else "the bytes of a dataset row"
        raise ConfigError(f"an image cannot be opened: {str(shown)[:200]!r}: {error}") from error


def thumbnail(image: Any) -> bytes:
    """A copy for people to look at, at most ``_THUMBNAIL`` pixels high and wide: the bytes of a PNG file."""
    from PIL import Image

    opened = load_image(image)
    small = opened.copy() if isinstance(opened, Image.Image) else Image.fromarray(_pixels(opened))
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    file = io.BytesIO()
    (small if small.mode in ("RGB", "RGBA", "L") else small.convert("RGB")).save(file, "PNG")
    return file.getvalue()


def _pixels(image: Any) -> Any:
    """An array or tensor as height, width and channels of bytes."""
    array = torch.tensor(image) if not isinstance(image, torch.Tensor) else image.cpu()
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.movedim(0, -1)
    scaled = array * 255 if array.is_floating_point() and array.max() <= 1 else array
    return scaled.clamp(0, 255).to(torch.uint8).squeeze(-1).numpy()


def image_token(config: Any) -> int | None:
    """The token that stands for a piece of an image in a model's prompts."""
    token = getattr(config, "image_token_id", None)
    return token if token is not None else getattr(config, "image_token_index", None)


def sampled_never(policy: Any, processing_class: Any) -> list[int]:
    """Tokens that a completion may not have: an image token in it would have no image."""
    token = image_token(policy.config) if is_processor(processing_class) else None
    return [] if token is None else [token]


def _count_tokens(processor: Any, text: str, images: Sequence[Any]) -> int:
    token = getattr(processor, "image_token", None)
    found = text.count(token) if token else 0
    if found != len(images):
        raise ConfigError(
            f"a row has {len(images)} image(s), but the text of its prompt has {found} image token(s) "
            f"({token!r}); write one for each, or make the prompt a list of chat messages, where images need "
            f"no token: {text[:200]!r}"
        )
    return len(images)


def _check_cut(cut: list[int], processor: Any, max_length: int | None, length: int) -> None:
    tokenizer = processor.tokenizer
    names = {getattr(processor, "image_token", None), getattr(tokenizer, "image_token", None)} - {None}
    tokens = {tokenizer.convert_tokens_to_ids(name) for name in names}
    if tokens & set(cut):
        raise ConfigError(
            f"a prompt of {length} tokens is longer than max_prompt_length={max_length}, and cutting it "
            f"would cut an image; set max_prompt_length to at least {length} or None, or let the processor "
            "make fewer tokens of an image (a smaller size, or max_pixels)"
        )


def _loaded(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks with every image opened."""
    return [
        {"type": "image", "image": load_image(_payload(block))} if _has_payload(block) else block
        for block in blocks
    ]


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [] if content is None or isinstance(content, str) else list(content)


def _is_image(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "image"


def _has_payload(block: Mapping[str, Any]) -> bool:
    return _is_image(block) and any(block.get(key) is not None for key in _PAYLOADS)


def _payload(block: Mapping[str, Any]) -> Any:
    return next(block[key] for key in _PAYLOADS if block.get(key) is not None)


def _is_empty(block: Mapping[str, Any]) -> bool:
    return _is_image(block) and not _has_payload(block)


def _shown(prompt: Prompt) -> str:
    return repr(prompt)[:200]
