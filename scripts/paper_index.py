"""Page of ``docs/papers.md``: the recipes of ``examples/papers``, each with its equation, source and code."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "papers"

#: Sections of the page and their recipes, in order.
SECTIONS = {
    "Ratio and clipping": (
        "grpo", "deepseek_r1", "dapo", "gspo", "gspo_token", "gmpo", "cispo", "intellect_2", "sapo", "vespo",
    ),
    "Normalization over tokens": ("dr_grpo", "luspo"),
    "Rewards and advantages": ("lite_ppo",),
    "Entropy and KL": ("high_entropy_tokens",),
}  # fmt: skip

INTRODUCTION = """\
# Papers

Recipes of papers on group-relative policy optimization: a configuration, or at most 15 lines on the
[registries](extending.md). Each is a file of `examples/papers`. A test runs the file and compares loss and
gradient, from rewards to log-probs, with the equation below as a loop over plain float64 numbers, to a
relative error of 1e-9: several groups, completions of different lengths, tool tokens, truncated
completions, two micro-batches, on-policy and off-policy.

Equations are losses, to be minimised, in the notation of [Objectives](objectives.md): $N$ completions $o_i$
of $P$ prompts, $G$ for each; $\\lvert o_i\\rvert$ loss tokens; reward $r_i$, advantage $A_i$; $\\rho_{it}$
the ratio of the current to the old policy for token $t$; sg stops the gradient. Where no advantage is given
it is GRPO's. Mean and standard deviation are those of the group, the latter with divisor $G - 1$ and plus
$10^{-4}$, as in TRL. Settings that a file does not mention have the [defaults](configuration.md) of the
library. A source says where the equation stands if that was checked.
"""


@dataclass(frozen=True)
class Recipe:
    """File of ``examples/papers``: a docstring of paragraphs, then code.

    title: first paragraph.
    source: second paragraph.
    text: the others, with the equation between dollar signs.
    code: source after the docstring.
    """

    name: str
    title: str
    source: str
    text: str
    code: str


def read(name: str) -> Recipe:
    """Read the recipe ``name``."""
    source = (RECIPES / f"{name}.py").read_text()
    tree = ast.parse(source)
    title, origin, *text = (ast.get_docstring(tree) or "").split("\n\n")
    text = [f"$${one_line(part.strip('$'))}$$" if part.startswith("$$") else part for part in text]
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip()
    return Recipe(name, one_line(title), one_line(origin), "\n\n".join(text), code)


def one_line(text: str) -> str:
    """Return the text with single spaces for line breaks."""
    return " ".join(text.split())


def papers_page() -> str:
    """Return the Markdown of the page."""
    parts = [INTRODUCTION.rstrip()]
    for title, names in SECTIONS.items():
        parts += [f"## {title}", *(section(read(name)) for name in names)]
    return "\n\n".join(parts) + "\n"


def section(recipe: Recipe) -> str:
    """Return title, source, equation, remarks and code of a recipe."""
    source = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", recipe.source)
    file = f"[examples/papers/{recipe.name}.py](../examples/papers/{recipe.name}.py)"
    return f"### {recipe.title}\n\n{source}. {file}\n\n{recipe.text}\n\n```python\n{recipe.code}\n```"
