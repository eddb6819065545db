"""How sequences become model inputs and log-probs come back."""

from groupwise.policy.layouts.forward import HeadSettings, score_forward
from groupwise.policy.layouts.packed_forward import compute_packed_logprobs, pack_sequences, unsupported
from groupwise.policy.layouts.padded import compute_padded_logprobs

__all__ = [
    "HeadSettings",
    "compute_packed_logprobs",
    "compute_padded_logprobs",
    "pack_sequences",
    "score_forward",
    "unsupported",
]
