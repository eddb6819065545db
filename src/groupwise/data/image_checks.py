"""What training on images needs to be true of the model, the data and the distribution over processes."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data import build as data_checks
from groupwise.errors import ConfigError
from groupwise.tokenization.images import COLUMNS, check_columns, image_token, is_processor, unreadable

#: Architectures that keep images elsewhere than among their tokens, and what they do instead.
_ELSEWHERE = {
    "mllama": "its language model attends to images through layers of its own",
    "instructblip": "its images become queries in front of the prompt",
    "blip-2": "its images become queries in front of the prompt",
    "git": "its images become embeddings in front of the prompt",
}


def check_vision(
    policy: PreTrainedModel, processing_class: Any, config: GRPOConfig, train_dataset: Any, eval_dataset: Any
) -> None:
    """Refuse images that nothing can read, before anything is generated; prepare DDP for rows without any.

    Raises:
        ConfigError: two columns of images, images without a processor, or a model that cannot be trained on
            them.
    """
    for name, dataset in data_checks.named_datasets(train_dataset, eval_dataset).items():
        columns = getattr(dataset, "column_names", None) or []
        check_columns(name, columns)
        given = [column for column in COLUMNS if column in columns]
        if given and not is_processor(processing_class):
            raise unreadable(f"{name} has a column {given[0]!r}", processing_class)
    if not is_processor(processing_class):
        return
    kind, model = policy.config.model_type, type(policy).__name__
    if policy.config.is_encoder_decoder or kind in _ELSEWHERE:
        reason = _ELSEWHERE.get(kind, "it is an encoder-decoder")
        raise ConfigError(
            f"{model} cannot be trained on images: {reason}; choose a model whose images are tokens of the "
            "prompt, such as Qwen-VL, Gemma 3, SmolVLM or LLaVA"
        )
    if image_token(policy.config) is None:
        raise ConfigError(
            f"processing_class is a {type(processing_class).__name__}, but the config of {model} names "
            "no image token (image_token_id); pass the tokenizer alone to train on text"
        )
    reentrant = (config.gradient_checkpointing_kwargs or {}).get("use_reentrant")  # type: ignore[union-attr]
    if config.ddp_find_unused_parameters is None and not reentrant:
        config.ddp_find_unused_parameters = True  # a micro-batch of text gives the vision part no gradient
