"""Images in requests to vLLM: it expands their tokens itself, which must give the trainer's prompt tokens."""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import BackendError, ConfigError
from groupwise.generation.base import json_dict
from groupwise.tokenization.images import as_rgb

if TYPE_CHECKING:
    from groupwise.generation.vllm.sampling import Request


def has_multimodal_classes() -> bool:
    """Return True if vLLM can import its classes of vision-language models, which need torchvision."""
    return importlib.util.find_spec("torchvision") is not None


def check_engine_images(config: GRPOConfig) -> None:
    """Check that a colocated engine can process images.

    Raises:
        ConfigError: torchvision is missing, or the engine is started for text.
    """
    if not has_multimodal_classes():
        raise ConfigError(
            "a dataset has a column of images, and vLLM's vision-language models need torchvision, which "
            "is not installed; install the build that fits the installed torch, or set use_vllm=False"
        )
    if json_dict(config.vllm_engine_kwargs).get("language_model_only"):
        raise ConfigError(
            "a dataset has a column of images, but vllm_engine_kwargs['language_model_only'] starts an "
            "engine for text; leave it out, or drop the images"
        )


def engine_prompt(request: Request) -> dict[str, Any]:
    """Return the prompt of a request for ``LLM.generate``."""
    inputs = request.images
    if inputs is None or not inputs.images:
        return {"prompt_token_ids": list(request.prompt)}
    images = [as_rgb(image) for image in inputs.images]
    return {"prompt_token_ids": inputs.unexpanded(request.prompt), "multi_modal_data": {"image": images}}


def server_prompt(request: Request) -> dict[str, Any]:
    """Return the fields of a prompt in the body of ``/inference/v1/generate``; images are lossless PNG."""
    inputs = request.images
    if inputs is None or not inputs.images:
        return {"token_ids": list(request.prompt)}
    parts = [{"type": "image_url", "url": _data_url(image)} for image in inputs.images]
    return {
        "token_ids": inputs.unexpanded(request.prompt),
        "content_parts": parts,
        "return_token_ids": True,
    }


def check_expanded(request: Request, prompt_ids: Sequence[int] | None, where: str) -> None:
    """Compare the prompt that vLLM sampled from with the trainer's.

    Args:
        prompt_ids: token ids after vLLM expanded the image tokens.
        where: "the engine" or the server's address, for the message.

    Raises:
        BackendError: the prompts differ.
    """
    inputs = request.images
    if inputs is None or not inputs.images or list(prompt_ids or ()) == list(request.prompt):
        return
    raise BackendError(
        f"{where} expanded a prompt with {len(inputs.images)} image(s) to {len(prompt_ids or ())} tokens, "
        f"which are not the {len(request.prompt)} of the trainer's processor, so it sampled from another "
        "prompt; give it the trainer's processor (preprocessor_config.json and chat template of the served "
        "model, or --mm-processor-kwargs)"
    )


def _data_url(image: Any) -> str:
    file = io.BytesIO()
    as_rgb(image).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
