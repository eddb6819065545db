"""Sequence layouts: conversion of a batch to model inputs, and of model outputs to log-probs."""

from groupwise.policy.layouts.packed import compute_packed_logprobs, pack_sequences, unsupported
from groupwise.policy.layouts.padded import compute_padded_logprobs, padded_inputs

__all__ = [
    "compute_packed_logprobs",
    "compute_padded_logprobs",
    "pack_sequences",
    "padded_inputs",
    "unsupported",
]
