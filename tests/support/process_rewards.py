"""A token classifier with random weights, and a tokenizer of bytes and a few merges for it."""

from __future__ import annotations

import functools

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForTokenClassification, PreTrainedTokenizerFast

#: A token of the tiny policy (``support.runs``) that ends steps.
STEP = 4

_TEXT = "one step.\n\nanother step.\nthe third 💡 step\n"


@functools.cache
def _byte_core() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<eos>"]
    merges = trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([_TEXT] * 5, merges)
    return core


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer; characters such as 💡 are several tokens without a merge."""
    return PreTrainedTokenizerFast(tokenizer_object=_byte_core(), pad_token="<pad>", eos_token="<eos>")


def step_classifier(labels: int = 2, vocab_size: int = 290) -> LlamaForTokenClassification:
    """A one-layer token classifier; its outputs differ clearly between positions."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=labels,
        initializer_range=0.5,
    )
    return LlamaForTokenClassification(config)
