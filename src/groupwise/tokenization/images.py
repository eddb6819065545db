"""Prompts with images: dataset rows to chat messages, messages to token ids and model inputs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import torch
from numpy import ndarray
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from groupwise.errors import ConfigError
from groupwise.records.images import ExpandedSpan, ImageInputs
from groupwise.tokenization.prompts import (
    Message,
    Prompt,
    generation_options,
    is_conversational,
    tokenize_prompt,
    with_text_content,
    without_added_keys,
)
from groupwise.tokenization.text import ProcessingClass, content_blocks

if TYPE_CHECKING:
    import PIL.Image

#: Dataset columns with images.
IMAGE_COLUMNS = ("image", "images")

#: An image as users give it: PIL image, array, file name or URL, or the dict that ``datasets.Image`` stores.
Image: TypeAlias = "PIL.Image.Image | ndarray | torch.Tensor | str | Mapping[str, Any]"

_IMAGE_KEYS = ("image", "url", "path", "base64")  # keys of a content block that may hold its image
_THUMBNAIL_SIZE = 512
_TOKEN_INPUTS = ("input_ids", "attention_mask")


def is_processor(processing_class: object) -> TypeGuard[ProcessorMixin]:
    """Return True if ``processing_class`` is a processor with an image processor, False for a tokenizer."""
    return getattr(processing_class, "image_processor", None) is not None


def row_images(row: Mapping[str, Any]) -> list[Image]:
    """Return the images in a row's ``image`` or ``images`` column, without None entries."""
    given = row["images"] if "images" in row else [row.get("image")]
    return [image for image in given or () if image is not None]


def insert_images(row: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a row with the images of its columns in content blocks.

    The k-th image block without an image gets the k-th image of the column. If the prompt has no image block,
    the images come before the text of the first user message. Keys that Arrow added are removed
    (:func:`without_added_keys`).

    Raises:
        ConfigError: the numbers of empty image blocks and of images differ.
    """
    prompt = without_added_keys(row["prompt"])
    if not is_conversational(prompt) or not any(column in row for column in IMAGE_COLUMNS):
        return prompt
    messages = [{**message, "content": content_blocks(message)} for message in prompt]
    images = row_images(row)
    empty = [block for message in messages for block in message["content"] if _is_empty(block)]
    if images and not any(block.get("type") == "image" for m in messages for block in m["content"]):
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        empty = [{"type": "image"} for _ in images]
        first["content"] = [*empty, *first["content"]]
    if len(empty) != len(images):
        raise ConfigError(
            f"a row has {len(images)} image(s) in its 'image' or 'images' column, but its prompt has "
            f"{len(empty)} image block(s) without an image; give as many of the one as of the other, or no "
            f"image block at all: {prompt!r:.200}"
        )
    remaining = iter(images)
    for message in messages:
        message["content"] = [
            {**block, "image": next(remaining)} if _is_empty(block) else block for block in message["content"]
        ]
    return messages


def prompt_images(prompt: Prompt) -> list[Image]:
    """Return the images in the content blocks of a prompt, in order."""
    if not is_conversational(prompt):
        return []
    images = [_image_of(block) for message in prompt for block in content_blocks(message)]
    return [image for image in images if image is not None]


def processor_required(problem: str, processing_class: ProcessingClass) -> ConfigError:
    """Return the error for images that a tokenizer cannot process."""
    return ConfigError(
        f"{problem}, but processing_class is a {type(processing_class).__name__}, which reads text only; "
        "pass the processor of a vision-language model (AutoProcessor.from_pretrained), or drop the images"
    )


def encode_prompt(
    processing_class: ProcessingClass,
    prompt: Prompt,
    images: Sequence[Image] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> tuple[list[int], ImageInputs | None]:
    """Tokenize a prompt with a tokenizer, or with a processor together with its images.

    Args:
        prompt: chat messages with their images in content blocks, or a text; for a processor, it has the
            image token at the position of each of ``images``.
        images: images of the row, for a text prompt.
        max_length: longer prompts are truncated on the left, but never within an image.

    Returns:
        Token ids including those of the images, and the model's other inputs; None with a tokenizer.

    Raises:
        ConfigError: there are images, but no processor; image tokens and images do not match, or truncation
            would remove image tokens.
    """
    if not is_processor(processing_class):
        count = len(prompt_images(prompt)) or len(images)
        if count:
            raise processor_required(f"a row has {count} image(s)", processing_class)
        tokenizer = cast(PreTrainedTokenizerBase, processing_class)
        return tokenize_prompt(tokenizer, with_text_content(prompt), template_kwargs, max_length), None
    if is_conversational(prompt):
        ids, inputs = _process_chat(processing_class, prompt, template_kwargs)
    else:
        ids, inputs = process_text(processing_class, cast(str, prompt), images)
    excess = 0 if max_length is None else max(len(ids) - max_length, 0)
    if not _image_tokens(processing_class).isdisjoint(ids[:excess]):
        raise ConfigError(
            f"a prompt of {len(ids)} tokens is longer than max_prompt_length={max_length}, and truncating it "
            f"would remove tokens of an image; set max_prompt_length to at least {len(ids)} or None, or let "
            "the processor produce fewer tokens per image (a smaller size, or max_pixels)"
        )
    return ids[excess:], inputs.without_first(excess)


def _image_tokens(processor: ProcessorMixin) -> set[int]:
    """Return the ids of the tokens that stand for a piece of an image."""
    tokenizer = processor.tokenizer
    names = {getattr(owner, "image_token", None) for owner in (processor, tokenizer)} - {None}
    return {tokenizer.convert_tokens_to_ids(name) for name in names}


def check_prompt_ids(
    prompt_ids: Sequence[Sequence[int]],
    expected_ids: Sequence[Sequence[int]],
    images: Sequence[ImageInputs] | None,
) -> None:
    """Refuse prompt tokens of a ``rollout_func`` that do not match the images of the prompts.

    Raises:
        ConfigError: the tokens of a prompt with images differ from those of the processor.
    """
    for row, (ids, expected, inputs) in enumerate(zip(prompt_ids, expected_ids, images or (), strict=True)):
        if inputs.arrays and list(ids) != list(expected):
            raise ConfigError(
                f"rollout_func returned {len(ids)} tokens for prompt {row}, which has images, and they are "
                f"not the {len(expected)} tokens that the processor returns for it (apply_chat_template with "
                "the chat_template_kwargs of the configuration); return those"
            )


def _process_chat(
    processor: ProcessorMixin, prompt: list[Message], template_kwargs: Mapping[str, Any] | None
) -> tuple[list[int], ImageInputs]:
    messages = [{**message, "content": load_blocks(content_blocks(message))} for message in prompt]
    if any(_is_empty(block) for message in messages for block in message["content"]):
        raise ConfigError(f"an image block of a prompt has no image: {prompt!r:.200}")
    options = generation_options(prompt, template_kwargs)
    of_call = dict(options.pop("processor_kwargs", None) or {})
    text = processor.apply_chat_template(messages, **options)
    # As that method tokenizes it, too: the template may begin with BOS.
    bos = processor.tokenizer.bos_token
    if bos is not None and text.startswith(bos):
        of_call["add_special_tokens"] = False
    return _process(processor, text, prompt_images(messages), **of_call)


def process_text(
    processor: ProcessorMixin, text: str, images: Sequence[Image], **options: object
) -> tuple[list[int], ImageInputs]:
    """Tokenize a text that has the processor's image token at the position of each image.

    Args:
        options: further arguments of the processor's call.

    Returns:
        Token ids including those of the images, and the model's other inputs.

    Raises:
        ConfigError: image tokens and images do not match in number.
    """
    token = getattr(processor, "image_token", None)
    found = text.count(token) if token else 0
    if found != len(images):
        raise ConfigError(
            f"a row has {len(images)} image(s), but the text of its prompt has {found} image token(s) "
            f"({token!r}); write one for each, or make the prompt a list of chat messages, where images need "
            f"no token: {text[:200]!r}"
        )
    return _process(processor, text, [load_image(image) for image in images], **options)


def _process(
    processor: ProcessorMixin, text: str, images: list[Image], **options: object
) -> tuple[list[int], ImageInputs]:
    """Tokenize a text with its opened images; see :func:`process_text`."""
    call = cast(Any, processor)  # subclasses have keyword arguments of their own
    inputs = call(text=[text], images=[images] if images else None, return_tensors="pt", **options)
    ids = inputs["input_ids"][0].tolist()
    types = {name: value[0].tolist() for name, value in inputs.items() if name.endswith("token_type_ids")}
    arrays = {
        name: value
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and name not in (*_TOKEN_INPUTS, *types)
    }
    if not images:
        return ids, ImageInputs(arrays, types)
    if "pixel_values" not in arrays:
        raise ConfigError(
            f"{type(processor).__name__} returned no tensor of pixel values for {len(images)} image(s), only "
            f"{', '.join(inputs)}; this kind of model cannot be trained on images"
        )
    tokens = _image_tokens(processor)
    last = max((index for index, token in enumerate(ids) if token in tokens), default=len(ids) - 1)
    with_special = options.get("add_special_tokens", True)
    unexpanded = processor.tokenizer(text, add_special_tokens=with_special)["input_ids"]  # one per image
    return ids, ImageInputs(arrays, types, images, [ExpandedSpan(0, len(ids), unexpanded)], last + 1)


def load_image(image: Image) -> Image:
    """Open files, URLs and undecoded images of a dataset; other images are returned as they are.

    Raises:
        ConfigError: the image cannot be opened.
    """
    source: Image | io.BytesIO = image
    if isinstance(image, Mapping) and {"bytes", "path"} & image.keys():
        source = io.BytesIO(image["bytes"]) if image.get("bytes") is not None else image["path"]
    if not isinstance(source, (str, io.BytesIO)):
        return source
    try:
        from PIL import Image as PILImage
        from transformers.image_utils import load_image as load

        return load(source) if isinstance(source, str) else PILImage.open(source)
    except Exception as error:
        shown = source if isinstance(source, str) else "the bytes of a dataset row"
        raise ConfigError(f"an image cannot be opened: {str(shown)[:200]!r}: {error}") from error


def as_rgb(image: Image) -> PIL.Image.Image:
    """Convert an opened image to a PIL image in RGB, as image processors do.

    Raises:
        ConfigError: an array or tensor of other values than 8-bit pixels, which PIL cannot represent exactly.
    """
    dtype = getattr(image, "dtype", None)  # None for a PIL image
    if dtype is not None and str(dtype).removeprefix("torch.") != "uint8":
        raise ConfigError(
            f"an image is an array of {dtype}, and vLLM gets images of 8-bit pixels; convert it to "
            "uint8 (0 to 255) or to a PIL image, or set use_vllm=False"
        )
    opened = _as_pil(image)
    return opened if opened.mode == "RGB" else opened.convert("RGB")


def thumbnail(image: Image) -> bytes:
    """Return a PNG file of the image with at most 512 x 512 pixels, for tables of completions."""
    small = _as_pil(load_image(image)).copy()  # thumbnail() changes it in place
    small.thumbnail((_THUMBNAIL_SIZE, _THUMBNAIL_SIZE))
    file = io.BytesIO()
    (small if small.mode in ("RGB", "RGBA", "L") else small.convert("RGB")).save(file, "PNG")
    return file.getvalue()


def _as_pil(image: Image) -> PIL.Image.Image:
    """Convert an opened image to PIL; an array has shape (height, width), with channels first or last."""
    from PIL import Image as PILImage

    if isinstance(image, PILImage.Image):
        return image
    array = image.cpu() if isinstance(image, torch.Tensor) else torch.tensor(image)
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.movedim(0, -1)
    scaled = array * 255 if array.is_floating_point() and array.max() <= 1 else array
    return PILImage.fromarray(scaled.clamp(0, 255).to(torch.uint8).squeeze(-1).numpy())


def image_token_id(config: PreTrainedConfig) -> int | None:
    """Return the token id that stands for a piece of an image in the model's prompts, or None."""
    token = getattr(config, "image_token_id", None)
    return token if token is not None else getattr(config, "image_token_index", None)


def image_suppress_tokens(policy: PreTrainedModel, processing_class: ProcessingClass) -> list[int]:
    """Return the token ids to suppress in sampling: an image token in a completion would have no image."""
    token = image_token_id(policy.config) if is_processor(processing_class) else None
    return [] if token is None else [token]


def load_blocks(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks with every image opened.

    Raises:
        ConfigError: an image cannot be opened.
    """
    images = [_image_of(block) for block in blocks]
    return [
        block if image is None else {"type": "image", "image": load_image(image)}
        for block, image in zip(blocks, images, strict=True)
    ]


def _image_of(block: Mapping[str, Any]) -> Image | None:
    """Return the image in a content block; None for text, and for an image block that is still empty."""
    given = [block[key] for key in _IMAGE_KEYS if block.get(key) is not None]
    return given[0] if block.get("type") == "image" and given else None


def _is_empty(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "image" and _image_of(block) is None


def is_image_object(block: Mapping[str, Any]) -> bool:
    """Return True for a block of text, and for an image that is not a path or a URL, so not from JSON."""
    image = _image_of(block)
    if block.get("type") != "image" or (isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes)):
        return True
    return not isinstance(image, Mapping | str | list | tuple | int | float | None)
