"""Pure maths on tensors: torch and the standard library, no models, no configuration objects.

Axis suffixes used throughout: N sequences of the global batch, B sequences at hand, P groups, G sequences of
a group, F reward functions, T completion tokens, X an axis of size T or 1 (a value per token or one per
sequence).
"""
