"""Log-prob heads: log-probs and entropies from hidden states.

`dense` materializes all logits, `chunked` one tile at a time; `capture` runs a head inside a model's forward.
"""
