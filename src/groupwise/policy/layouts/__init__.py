"""Sequence layouts: conversion of a batch to model inputs, and of model outputs to log-probs."""

from groupwise.policy.layouts.forward import HeadSettings, forward_at_head, forward_logprobs
from groupwise.policy.layouts.packed import pack_sequences
from groupwise.policy.layouts.packed_forward import compute_packed_logprobs, unsupported
from groupwise.policy.layouts.padded import compute_padded_logprobs, padded_inputs

__all__ = [
    "HeadSettings",
    "compute_packed_logprobs",
    "compute_padded_logprobs",
    "forward_at_head",
    "forward_logprobs",
    "pack_sequences",
    "padded_inputs",
    "unsupported",
]
