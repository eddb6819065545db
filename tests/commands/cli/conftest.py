"""A tiny model on disk, and run files that use it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

#: Reward functions as a user writes them, in a module beside the run.
REWARDS = """
import math

def even(completion_ids, **_):
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]

def constant(completions, **_):
    return [1.0] * len(completions)

def undecided(completions, **_):
    return [None] * len(completions)

def not_a_number(completions, **_):
    return [math.nan] * len(completions)

class Room:
    def reset(self, **row):
        return "w3"

def untyped(anything):
    return anything

def with_threshold(threshold):
    return lambda completion_ids, **_: [float(len(ids) > threshold) for ids in completion_ids]
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The two-layer policy and its tokenizer, saved."""
    from support.runs import policy, tokenizer

    directory = tmp_path_factory.mktemp("tiny")
    policy().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def run_file(tiny, tmp_path, monkeypatch):
    """Writes a run file with changes into an empty directory, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    Path("my_rewards.py").write_text(REWARDS)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "w{i} w{i + 1}", "row": {i}}}\n' for i in range(8)))
    Path("empty.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("w1", "", "w2", "w3")))
    Path("chats.jsonl").write_text('{"prompt": "w1"}\n{"prompt": [{"role": "user", "content": "w2"}]}\n')

    Path("tasks.jsonl").write_text("".join(f'{{"task": {i}}}\n' for i in range(8)))

    def write(**changes) -> str:
        settings = {
            "model": str(tiny),
            "dataset": "rows.jsonl",
            "rewards": "my_rewards:even",
            "output_dir": "out",
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 1,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "bf16": False,
            "use_cpu": True,
            "disable_tqdm": True,
            **changes,
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in settings.items() if v is not ...}))
        return str(path)

    return write
