"""Equations of the algorithm: tensors in, tensors out. Depends on torch and the standard library only.

Axis suffixes: N sequences of all ranks, B sequences of this rank, P prompts, G completions per prompt,
F reward functions, L prompt tokens, T completion tokens, X is T or 1 (one value per token or per sequence).
"""

from groupwise.core import variants as variants  # registers objectives beyond TRL's
