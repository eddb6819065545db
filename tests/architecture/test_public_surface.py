"""The public names, signatures and defaults are frozen in ``public_surface.json``.

After an intended change: ``python tests/architecture/test_public_surface.py`` writes the file anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import groupwise

SURFACE = Path(__file__).with_name("public_surface.json")
VERBS = ("roll_out", "score", "estimate_advantages", "evaluate_objective")


def current_surface() -> dict:
    """Signatures of the public callables, fields of the records, and the configuration's own defaults."""
    from transformers import TrainingArguments

    inherited = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    signatures, records = {}, {}
    for name in groupwise.__all__:
        value = getattr(groupwise, name)
        if name == "GRPOConfig":
            continue
        if dataclasses.is_dataclass(value):
            records[name] = [field.name for field in dataclasses.fields(value)]
        elif inspect.isclass(value) and issubclass(value, Exception):
            signatures[name] = [base.__name__ for base in value.__mro__[1:-1]]
        else:
            signatures[name] = list(inspect.signature(value).parameters)
    for verb in VERBS:
        signatures[f"GRPOTrainer.{verb}"] = list(
            inspect.signature(getattr(groupwise.GRPOTrainer, verb)).parameters
        )
    config = {
        field.name: field.default
        for field in dataclasses.fields(groupwise.GRPOConfig)
        if field.name not in inherited or field.default != inherited[field.name]
    }
    return json.loads(
        json.dumps({"signatures": signatures, "records": records, "config": config}, default=str)
    )


def test_the_public_surface_is_the_frozen_one():
    assert current_surface() == json.loads(SURFACE.read_text())


def test_a_changed_default_would_be_seen():
    changed = json.loads(SURFACE.read_text())
    changed["config"]["epsilon"] = 0.3
    assert current_surface() != changed


if __name__ == "__main__":
    SURFACE.write_text(json.dumps(current_surface(), indent=1, sort_keys=True) + "\n")
