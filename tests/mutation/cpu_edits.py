"""Edits of ``groupwise.cpu``: products that a checkpoint keeps, and until when."""

from __future__ import annotations

from mutation import edits_of

CHECKPOINT = ("tests/cpu/test_checkpoint.py",)

CPU = edits_of(
    "cpu/checkpoint.py",
    *[
        (old, new, CHECKPOINT)
        for old, new in (
            ("weight_OI.requires_grad and ", ""),
            (" and weight_OI.grad is None", ""),
            ("output.nbytes <= weight_OI.nbytes", "output.nbytes < weight_OI.nbytes"),
            ("in_place_changes(output) == changes", "True"),
            ("self._kept = self._kept[:-1]", "pass"),
            ("self._position, self._position + 1", "self._position, self._position"),
            ("self._kept[index] = self._kept[index], None", "_ = self._kept[index], None"),
        )
    ],
)
