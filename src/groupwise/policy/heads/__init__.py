"""Log-prob heads: log-probs and entropies from hidden states.

`dense` materializes all logits, `chunked` one tile at a time.
"""

from groupwise.policy.heads.chunked import chunked_head
from groupwise.policy.heads.dense import dense_head, logps_from_logits
from groupwise.policy.heads.weights import HeadWeights, check_head, head_weights

HEADS = {"dense": dense_head, "chunked": chunked_head}

__all__ = [
    "HEADS",
    "HeadWeights",
    "check_head",
    "chunked_head",
    "dense_head",
    "head_weights",
    "logps_from_logits",
]
