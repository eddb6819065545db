"""How sequences become model inputs and log-probs come back."""

from __future__ import annotations

from groupwise.layout.padded import score_padded
from groupwise.protocols import Layout

LAYOUTS: dict[str, Layout] = {"padded": score_padded}

#: What ``sequence_layout="auto"`` stands for.
DEFAULT_LAYOUT = "padded"

__all__ = ["DEFAULT_LAYOUT", "LAYOUTS", "score_padded"]
