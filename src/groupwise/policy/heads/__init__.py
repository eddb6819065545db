"""Log-prob heads: log-probs and entropies from hidden states.

`dense` materializes all logits, `chunked` one tile at a time; `capture` runs either inside a model's forward.
"""

from groupwise.policy.heads.capture import (
    LogprobHead,
    ModelInputs,
    forward_at_head,
    forward_logprobs,
)
from groupwise.policy.heads.chunked import chunked_head
from groupwise.policy.heads.dense import logps_from_logits
from groupwise.policy.heads.weights import HeadWeights, check_head, head_weights

__all__ = [
    "HeadWeights",
    "LogprobHead",
    "ModelInputs",
    "check_head",
    "chunked_head",
    "forward_at_head",
    "forward_logprobs",
    "head_weights",
    "logps_from_logits",
]
