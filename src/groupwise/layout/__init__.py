"""How sequences become model inputs and log-probs come back."""

from groupwise.layout.forward import HeadSettings, score_forward
from groupwise.layout.padded import score_padded
from groupwise.layout.scorer import TokenScorer, choose_layout
from groupwise.layout.streamed import prepare_stream, score_stream, unsupported

__all__ = [
    "HeadSettings",
    "TokenScorer",
    "choose_layout",
    "prepare_stream",
    "score_forward",
    "score_padded",
    "score_stream",
    "unsupported",
]
