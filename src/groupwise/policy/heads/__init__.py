"""From hidden states to log-probs and entropy: `dense` holds all logits, `chunked` one tile of them."""

from groupwise.policy.heads.capture import CapturedScores, score_at_head
from groupwise.policy.heads.chunked import chunked_head
from groupwise.policy.heads.dense import dense_head, logps_from_logits
from groupwise.policy.heads.weights import HeadWeights, check_head, head_weights

HEADS = {"dense": dense_head, "chunked": chunked_head}

__all__ = [
    "HEADS",
    "CapturedScores",
    "HeadWeights",
    "check_head",
    "chunked_head",
    "dense_head",
    "head_weights",
    "logps_from_logits",
    "score_at_head",
]
