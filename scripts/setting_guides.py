"""Links of the page of settings: the guide that explains a setting, and TRL's name of it."""

from __future__ import annotations

import functools
import re
import unicodedata
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
#: Guides of a group of settings. A setting links to the section that names it most often, of the first guide
#: that names it, or else to the first guide.
GUIDES = {
    "Changed defaults of TrainingArguments": ("recipes", "performance", "data", "getting_started", "cpu"),
    "Model": ("models", "lora", "performance", "data"),
    "Batches": ("recipes", "getting_started", "data", "evaluation"),
    "Generation": ("objectives", "performance", "data", "distributed", "agents", "vllm"),
    "vLLM": ("vllm", "vllm_weights", "troubleshooting", "agents"),
    "Loss": ("objectives", "recipes"),
    "Rewards and advantages": ("rewards", "evaluation", "objectives"),
    "Agents": ("agents",),
    "Efficiency": ("performance", "objectives", "vllm", "recipes"),
    "Logging": ("getting_started", "report", "replay", "checkpoints", "vlm"),
    "Old names": ("migrating",),
}
#: Guides of settings that those of their group do not explain.
EXPLICIT = {
    "use_transformers_continuous_batching": "performance",
    "transformers_continuous_batching_config": "performance",
    "ds3_gather_for_generation": "distributed",
    "chat_template_kwargs": "data",
    "remove_unused_columns": "data",
    "metrics_by": "data",
    "temperature": "recipes",
}
#: Settings that the ``GRPOConfig`` of TRL 1.16.0 lacks; it has the others under their names here.
_NOT_IN_TRL = """
activation_memory_fraction advantage_baseline dataset_weights dynamic_sampling dynamic_sampling_max_rounds
eval_generation_kwargs eval_max_samples eval_pass_at_k eval_pass_threshold hub_include kl_estimator
kl_in_reward logprob_head logprob_mismatch_check logprob_mismatch_steps loss_kwargs
max_prompt_length metrics_by prompt_filter reward_on_error reward_timeout rollout_credit
router_aux_loss_scope router_replay
rollout_func_importance_sampling_correction rollout_on_error rollout_retries rollout_staleness
save_rollouts sequence_layout skip_zero_advantage terminal_metrics tool_timeout use_liger_loss
vllm_engine_kwargs vllm_guided_decoding_regex vllm_weight_check wandb_log_unique_prompts
"""
NOT_IN_TRL = frozenset(_NOT_IN_TRL.split())


def links(name: str, group: str) -> list[str]:
    """Return the facts of a setting that link it: its guide, and TRL's name."""
    trl = "not in TRL" if name in NOT_IN_TRL else f"TRL: `{name}`"
    return [f"guide: {guide_of(name, group)}", trl]


def guide_of(name: str, group: str) -> str:
    """Return a link to the section that explains the setting."""
    # As code of running text, or with a value; `vespo_*` names all settings with that prefix.
    starts = [name[: found.end()] + r"\*" for found in re.finditer("_", name)]
    named = re.compile(rf"`[^`\n]*\b(?:{name}\b|{'|'.join(starts) or name})|\b{name}[=:]")
    pages = (EXPLICIT[name],) if name in EXPLICIT else GUIDES[group]
    for page in pages:
        sections = read_sections(page)
        counts = [len(named.findall(body)) for _, body in sections]
        if max(counts):
            heading = sections[counts.index(max(counts))][0]
            return link(page, sections[0][0], "" if heading == sections[0][0] else heading)
    return link(pages[0], read_sections(pages[0])[0][0])


def link(page: str, title: str, heading: str = "") -> str:
    """Return a link to a page, or to its section."""
    return f"[{title}: {heading}]({page}.md#{slug(heading)})" if heading else f"[{title}]({page}.md)"


@functools.cache
def read_sections(page: str) -> list[tuple[str, str]]:
    """Return headings and texts of a page; comments in its code are no headings."""
    parts = re.split(r"^(?:#{1,3} (.*)|```.*)$", (DOCS / f"{page}.md").read_text(), flags=re.MULTILINE)
    sections: list[tuple[str, str]] = []
    is_code = False
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        if heading is None:
            is_code = not is_code
        if heading is None or is_code:
            sections[-1] = (sections[-1][0], f"{sections[-1][1]}\n{body}")
        else:
            sections.append((heading, body))
    return sections


def slug(heading: str) -> str:
    """Return the anchor that the site gives a heading."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
