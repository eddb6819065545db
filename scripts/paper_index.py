"""Page of ``docs/papers.md``: the recipes of ``examples/papers``, each with its equation, source and code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from setting_guides import slug

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "papers"

#: Sections of the page and their recipes, in order.
SECTIONS = {
    "Ratio and clipping": (
        "grpo", "deepseek_r1", "dapo", "gspo", "gspo_token", "gmpo", "cispo", "intellect_2", "dppo", "sapo",
        "vespo", "gppo", "ce_gppo", "aspo", "dcpo",
    ),
    "Normalization over tokens": ("dr_grpo", "luspo", "scalerl"),
    "Baselines and advantages": (
        "two_grpo", "rloo", "reinforce_plus_plus", "lite_ppo", "magistral", "opo", "quantile_advantage",
        "maxrl", "w_reinforce", "pass_at_k", "gfpo",
    ),
    "Rewards": ("gdpo", "kimi_length", "demystifying_long_cot"),
    "Entropy and KL": ("high_entropy_tokens", "skywork_or1", "deepseek_v3_2_kl"),
    "Off-policy data": (
        "tis", "icepop", "sequence_tis", "sequence_mis", "deepseek_v3_2_mask", "kimi_k1_5", "topr", "asymre",
    ),
}  # fmt: skip

#: Entries on GRPO of the page "Paper Index" in TRL's documentation -> recipes.
TRL_INDEX = {
    "DeepSeekMath": ("grpo",),
    "DeepSeek-R1": ("deepseek_r1",),
    "Group Sequence Policy Optimization": ("gspo", "gspo_token"),
    "Geometric-Mean Policy Optimization": ("gmpo",),
    "DAPO": ("dapo",),
    "Demystifying Long Chain-of-Thought Reasoning": ("demystifying_long_cot",),
    "INTELLECT-2": ("intellect_2",),
    "Skywork-OR1": ("skywork_or1",),
    "Beyond the 80/20 Rule": ("high_entropy_tokens",),
    "Dr. GRPO": ("dr_grpo",),
    "Part I: Tricks or Traps? (Lite PPO)": ("lite_ppo",),
    "Truncated Importance Sampling": ("tis",),
    "Masked Importance Sampling": ("icepop", "sequence_mis"),
    "Sequence-level Importance Sampling": ("sequence_tis", "sequence_mis"),
    "The Art of Scaling Reinforcement Learning": ("scalerl",),
    "It Takes Two: Your GRPO Is Secretly DPO": ("two_grpo",),
    "Soft Adaptive Policy Optimization": ("sapo",),
    "DeepSeek-V3.2": ("deepseek_v3_2_kl", "deepseek_v3_2_mask"),
    "GDPO": ("gdpo",),
    "Length-Unbiased Sequence Policy Optimization": ("luspo",),
    "VESPO": ("vespo",),
    "RLOO, for its own trainer": ("rloo",),
    "Group Filtered Policy Optimization, in earlier versions": ("gfpo",),
    "Perception-Aware Policy Optimization, in earlier versions": (),
}

#: Methods without a recipe -> reason.
WITHOUT_RECIPE = {
    "Process supervision, DeepSeekMath section 4.1.3": (
        "part of the library: reward functions return [step rewards](rewards.md)"
    ),
    "Iterative reference, TR-DPO, arXiv 2404.09656": "part of the library: `sync_ref_model`; no other loss",
    "Kept sampling mask, DeepSeek-V3.2, arXiv 2512.02556": (
        "part of the library: [truncated sampling](objectives.md#truncated-sampling)"
    ),
    "PAPO, arXiv 2507.06448": "needs a second forward pass with masked images",
    "Clip-Cov and KL-Cov, arXiv 2505.22617": (
        "select tokens by a covariance over the batch; a surrogate sees the rows of one micro-batch"
    ),
    "Entropy-shaped advantages, arXiv 2506.14758; GTPO, arXiv 2508.04349": (
        "need token entropies, which neither a surrogate nor an advantage receives; override "
        "[`compute_policy_loss`](extending.md#compute_policy_loss), which does"
    ),
    "λ-GRPO, arXiv 2510.06870": "has a trained parameter in the loss",
    "Smooth standardization, DCPO, arXiv 2509.02333": "needs the rewards of a prompt in earlier epochs",
    "REINFORCE++ without a baseline, arXiv 2501.03262": (
        "puts the KL of each token into the return of that token; `kl_in_reward` subtracts the sum"
    ),
    "A*-PO, arXiv 2505.20686": "a regression on values that are estimated beforehand, without groups",
    "BNPO, arXiv 2506.02864": (
        'an advantage; its equations could not be checked. `loss_type="bnpo"` is TRL\'s: the mean over the '
        "tokens of a micro-batch"
    ),
    "GPG, arXiv 2504.02546": "an advantage; its correction factor could not be checked",
}

INTRODUCTION = """\
# Papers

Recipes of papers on group-relative policy optimization: a configuration, or at most 15 lines on the
[registries](extending.md). Each is a file of `examples/papers`. A test runs the file and compares loss and
gradient, from rewards to log-probs, with the equation below as a loop over plain float64 numbers, to a
relative error of 1e-9. Its data have several groups, completions of different lengths, tool tokens, truncated
completions, two micro-batches, on-policy and off-policy.

Equations are losses, to be minimised, in the notation of [Objectives](objectives.md): $N$ completions $o_i$
of $P$ prompts, $G$ for each. $\\lvert o_i\\rvert$ are the loss tokens, $r_i$ the reward, $A_i$ the advantage.
$\\rho_{it}$ is the ratio of the current to the old policy for token $t$; sg stops the gradient. Where no
advantage is given it is GRPO's. Mean and standard deviation are those of the group, the latter with divisor
$G - 1$ and plus $10^{-4}$, as in TRL. Settings that a file does not mention have the
[defaults](configuration.md) of the library. A source says where the equation stands in the paper,
or which code it was compared with. Recipes that register an advantage expect a number from every
reward function.
"""

TRL_INTRODUCTION = """\
Entries on GRPO in TRL's documentation, version 1.9.2, the newest that could be read in full, and two of
earlier versions. The configuration and the trainer of TRL 1.16.0 name no other paper on a loss."""


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
    parts = [INTRODUCTION.rstrip(), "\n".join(index())]
    for title, names in SECTIONS.items():
        parts += [f"## {title}", *(section(read(name)) for name in names)]
    parts += ["## TRL's paper index", TRL_INTRODUCTION, "\n".join(trl_table())]
    parts += ["## Without a recipe", "\n".join(table(("method", "reason"), WITHOUT_RECIPE.items()))]
    return "\n\n".join(parts) + "\n"


def index() -> list[str]:
    """Return the recipes by section, as links to their headings."""
    lines = []
    for title, names in SECTIONS.items():
        titles = [read(name).title for name in names]
        links = [f"[{title.partition(': ')[0]}](#{slug(title)})" for title in titles]
        lines.append(f"- **[{title}](#{slug(title)})**: {' · '.join(links)}")
    return lines


def section(recipe: Recipe) -> str:
    """Return title, source, equation, remarks and code of a recipe."""
    head = f"### {recipe.title}\n\n{linked(recipe.source)}. {file_link(recipe.name)}"
    return f"{head}\n\n{recipe.text}\n\n```python\n{recipe.code}\n```"


def linked(text: str) -> str:
    """Return the text with links for arXiv numbers and addresses."""
    text = re.sub(r"(https://[^\s,]+)", r"<\1>", text)
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def file_link(name: str) -> str:
    """Return a link to the file of a recipe."""
    return f"[examples/papers/{name}.py](../examples/papers/{name}.py)"


def trl_table() -> list[str]:
    """Return the entries of TRL's index with links to the recipes."""
    rows = [(entry, ", ".join(map(file_link, names)) or "see below") for entry, names in TRL_INDEX.items()]
    return table(("entry", "recipe"), rows)


def table(columns: tuple[str, str], rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines of a Markdown table of two columns."""
    lines = [f"| {columns[0]} | {columns[1]} |", "|---|---|"]
    return [*lines, *(f"| {linked(left)} | {linked(right)} |" for left, right in rows)]
