"""The public names, signatures and defaults are frozen in ``public_surface.json``.

After an intended change: ``python tests/architecture/test_public_surface.py`` writes the file anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path

import groupwise

SURFACE = Path(__file__).with_name("public_surface.json")
VERBS = ("generate_rollouts", "compute_rewards", "compute_advantages", "compute_policy_loss")

#: Hooks of ``groupwise.trl_hooks.GRPOTrainer``, with the parameters of TRL 1.16.
HOOKS = (
    *("_generate", "_tokenize_prompts", "_generate_single_turn", "_calculate_rewards"),
    *("_generate_and_score_completions", "_get_per_token_logps_and_entropies", "get_high_entropy_mask"),
    *("compute_loss", "_compute_loss", "get_off_policy_mask", "get_gamma_weights"),
)


def signature(function: Callable) -> str:
    """Names, defaults and kinds of the parameters; annotations are the type checker's business."""
    shown = inspect.signature(function)
    bare = [part.replace(annotation=inspect.Parameter.empty) for part in shown.parameters.values()]
    return str(shown.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def current_surface() -> dict:
    """Signatures of the public callables, fields of the records, and the configuration's own defaults."""
    from transformers import TrainingArguments

    from groupwise import trl_hooks

    inherited = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    signatures, records = {}, {}
    for name in groupwise.__all__:
        value = getattr(groupwise, name)
        if name == "GRPOConfig":
            continue
        if dataclasses.is_dataclass(value):
            records[name] = signature(value)
        elif inspect.isclass(value) and issubclass(value, Exception):
            signatures[name] = [base.__name__ for base in value.__mro__[1:-1]]
        else:
            signatures[name] = signature(value)
    for verb in VERBS:
        signatures[f"GRPOTrainer.{verb}"] = signature(getattr(groupwise.GRPOTrainer, verb))
    for hook in HOOKS:
        signatures[f"trl_hooks.GRPOTrainer.{hook}"] = signature(getattr(trl_hooks.GRPOTrainer, hook))
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


def test_a_changed_default_of_the_configuration_is_seen(monkeypatch):
    monkeypatch.setattr(groupwise.GRPOConfig.__dataclass_fields__["epsilon"], "default", 0.3)
    assert current_surface() != json.loads(SURFACE.read_text())


def test_a_changed_default_of_a_verb_is_seen(monkeypatch):
    def compute_rewards(self, rollout, num_generations, num_rows=1): ...

    monkeypatch.setattr(groupwise.GRPOTrainer, "compute_rewards", compute_rewards)
    assert current_surface() != json.loads(SURFACE.read_text())


def test_a_signature_shows_names_kinds_and_defaults():
    def one(a: int, *, b: str = "x") -> None: ...

    assert signature(one) == "(a, *, b='x')"


if __name__ == "__main__":
    SURFACE.write_text(json.dumps(current_surface(), indent=1, sort_keys=True) + "\n")
