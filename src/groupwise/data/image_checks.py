"""Check model and datasets of a run with images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.dataset_checks import named_datasets
from groupwise.errors import ConfigError
from groupwise.tokenization.images import (
    IMAGE_COLUMNS,
    image_token_id,
    is_processor,
    processor_required,
)
from groupwise.tokenization.text import ProcessingClass

#: Architectures without image tokens in the prompt, and where they put images instead.
_UNSUPPORTED = {
    "mllama": "its language model attends to images through separate cross-attention layers",
    "instructblip": "its images become queries in front of the prompt",
    "blip-2": "its images become queries in front of the prompt",
    "git": "its images become embeddings in front of the prompt",
}


def has_image_columns(
    train_dataset: Dataset | IterableDataset | None,
    eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset] | None,
) -> bool:
    """Return True if a dataset has a column of images."""
    datasets = named_datasets(train_dataset, eval_dataset).values()
    columns = {name for dataset in datasets for name in getattr(dataset, "column_names", None) or []}
    return bool(columns & set(IMAGE_COLUMNS))


def check_vision(
    policy: PreTrainedModel,
    processing_class: ProcessingClass,
    config: GRPOConfig,
    train_dataset: Dataset | IterableDataset | None,
    eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset] | None,
) -> None:
    """Refuse images that the run cannot use, before anything is generated.

    Raises:
        ConfigError: a dataset has two image columns, or images without a processor; or the model has no image
            tokens in its prompts.
    """
    for name, dataset in named_datasets(train_dataset, eval_dataset).items():
        columns = getattr(dataset, "column_names", None) or []
        given = [column for column in IMAGE_COLUMNS if column in columns]
        if len(given) == 2:
            raise ConfigError(
                f"{name} has both an 'image' and an 'images' column; keep one: 'image' for one image per "
                "row, 'images' for a list of them"
            )
        if given and not is_processor(processing_class):
            raise processor_required(f"{name} has a column {given[0]!r}", processing_class)
    if not is_processor(processing_class):
        return
    model_type, model = policy.config.model_type, type(policy).__name__
    if policy.config.is_encoder_decoder or model_type in _UNSUPPORTED:
        reason = _UNSUPPORTED.get(model_type, "it is an encoder-decoder")
        raise ConfigError(
            f"{model} cannot be trained on images: {reason}; choose a model whose images are tokens of the "
            "prompt, such as Qwen-VL, Gemma 3, SmolVLM or LLaVA"
        )
    if image_token_id(policy.config) is None:
        raise ConfigError(
            f"processing_class is a {type(processing_class).__name__}, but the config of {model} names "
            "no image token (image_token_id); pass the tokenizer alone to train on text"
        )


def allow_unused_vision_tower(accelerator: Accelerator, config: GRPOConfig) -> None:
    """Let DDP accept parameters without gradient: a micro-batch of text has none in the vision tower.

    ``ddp_find_unused_parameters`` has precedence. Reentrant checkpointing does not support such parameters.
    """
    checkpointing = config.gradient_checkpointing_kwargs
    reentrant = isinstance(checkpointing, dict) and checkpointing.get("use_reentrant")
    if config.ddp_find_unused_parameters is None and not reentrant:
        handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
        accelerator.ddp_handler = replace(handler, find_unused_parameters=True)
