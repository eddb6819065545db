"""Page of ``docs/reading.md``: the files of the algorithm in reading order, their sentences and lengths."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "groupwise"

#: Chapters in reading order: title, sentence, files.
CHAPTERS = (
    ("The step", "One file holds the order of everything.", ("trainer.py",)),
    (
        "What travels through it",
        "The type of a record says how far the data have come.",
        ("records/rollout.py", "records/tensors.py"),
    ),
    (
        "Prompts",
        "Every rank reads the prompts of its own rows, in TRL's order.",
        ("data/prompt_source.py", "data/sampler.py", "data/buffer.py"),
    ),
    (
        "Generate",
        "A prompt is computed once per group, and finished rows leave the batch.",
        (
            "mixins/rollout.py",
            "generation/base.py",
            "generation/transformers_backend.py",
            "generation/decoding.py",
            "generation/growing_cache.py",
        ),
    ),
    (
        "Reward",
        "User code is called across one boundary.",
        ("mixins/reward.py", "rewards/runtime/calling.py"),
    ),
    (
        "Advantages",
        "Rewards of a group become one number per completion.",
        ("mixins/advantage.py", "core/advantages.py"),
    ),
    (
        "Log-probs",
        "Sequences are laid out without padding, and the head never holds all logits.",
        (
            "mixins/logprob.py",
            "policy/logprobs.py",
            "policy/reference.py",
            "policy/attention.py",
            "policy/layouts/padded.py",
            "policy/layouts/packed.py",
            "policy/heads/dense.py",
            "policy/heads/chunked.py",
            "policy/heads/tiles.py",
            "policy/heads/weights.py",
        ),
    ),
    (
        "Token weights and micro-batches",
        "Exact counts over the accumulation window; rows without a gradient are not computed.",
        (
            "core/weights.py",
            "data/window.py",
            "data/budget.py",
            "data/rebalancing.py",
        ),
    ),
    (
        "Clipped loss",
        "A table: surrogate × token weights.",
        (
            "mixins/loss.py",
            "core/objectives.py",
            "core/surrogates.py",
            "core/ratios.py",
            "core/kl.py",
            "core/entropy.py",
        ),
    ),
    (
        "Numbers and marks",
        "What is logged, and what a failed step returns to.",
        ("core/metrics.py", "hf/step_state.py"),
    ),
)
FILES = tuple(name for *_, names in CHAPTERS for name in names)


def num_lines(name: str) -> int:
    """Return the number of lines of a file of the package."""
    return (PACKAGE / name).read_text(encoding="utf-8").count("\n")


def sentence(name: str) -> str:
    """Return the first paragraph of the docstring of a file, on one line, in Markdown."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).replace("``", "`")


def reading_page(start: str, end: str) -> str:
    """Return the page; ``start`` and ``end`` mark its generated part."""
    total = sum(map(num_lines, FILES))
    lines = [
        "# Reading the code",
        "",
        f"The algorithm is {len(FILES)} files with {total:,} lines, comments and docstrings included. The",
        "first one has the order in which the others are called; [The step](step.md) is the same in prose,",
        "and the [glossary](glossary.md) has the words and the axis letters. Everything else stands around",
        "these files: what a run may need (vLLM, agents, images, DeepSpeed), and what is started around a",
        "trainer (`commands/`). A plain step runs most of them and fewer than 40 others.",
        "",
        start,
        "",
    ]
    for title, summary, names in CHAPTERS:
        lines += [f"## {title}", "", summary, "", "| file | lines | |", "|---|---:|---|"]
        lines += [
            f"| [`{name}`](../src/groupwise/{name}) | {num_lines(name)} | {sentence(name)} |"
            for name in names
        ]
        lines += [""]
    return "\n".join([*lines, end, ""])
