"""The model card of a trained model."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData

from groupwise.config.settings import card_settings

_TEMPLATE = """\
---
{{ card_data }}
---

# {{ name }}

This model was trained with groupwise
{%- if base_model_link %}, starting from {{ base_model_link }}{% endif %}
{%- if dataset_link %}, on the prompts of {{ dataset_link }}{% endif %}.

## Quick start

```python
from transformers import pipeline

generate = pipeline("text-generation", model="{{ hub_model }}")
messages = [{"role": "user", "content": "What is 17 * 23?"}]
print(generate(messages, max_new_tokens=256, return_full_text=False)[0]["generated_text"])
```

## Training

Group relative policy optimization: several completions are sampled for each prompt, and the advantage of a
completion is its reward compared with the rewards of its group.

| Setting | Value |
|---|---|
{% for setting, value in settings.items() -%}
| {{ setting }} | {{ value }} |
{% endfor %}
## Framework versions

- transformers: {{ transformers }}
- torch: {{ torch }}

## Citation

GRPO was introduced in [DeepSeekMath](https://arxiv.org/abs/2402.03300):

{% raw -%}
```bibtex
@article{shao2024deepseekmath,
  title   = {{DeepSeekMath}: Pushing the Limits of Mathematical Reasoning in Open Language Models},
  author  = {Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and Xu, Runxin and Song, Junxiao and Bi, Xiao and
             Zhang, Haowei and Zhang, Mingchuan and Li, Y. K. and Wu, Y. and Guo, Daya},
  journal = {arXiv preprint arXiv:2402.03300},
  year    = {2024}
}
```
{% endraw -%}
"""


def write_model_card(
    trainer: Any, model_name: str | None, dataset_name: str | None, tags: Sequence[str]
) -> None:
    """Write the model card, Markdown with a YAML header, as ``README.md`` to the output directory.

    Local directories are never shown in full: the header omits them as base model or dataset, and the text
    shows their last component. Only numbers, flags and names of methods are read from the settings.

    Args:
        model_name: title; default: the last component of the output directory. Also the model of the quick
            start unless ``hub_model_id`` is set.
        dataset_name: Hub id, local directory or None.
        tags: added to groupwise, grpo and generated_from_trainer.
    """
    args, directory = trainer.args, Path(str(trainer.args.output_dir))
    name, base_model = public_name(model_name or directory.name), trainer.model.config.name_or_path
    shown = {**card_settings(args), "world_size": args.world_size}
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base_model if base_model and not _is_local(base_model) else None,
        datasets=[dataset_name] if dataset_name and not _is_local(dataset_name) else None,
        tags=list(dict.fromkeys(["groupwise", "grpo", "generated_from_trainer", *tags])),
        model_name=name,
    )
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        name=name,
        base_model_link=_link(base_model, "https://huggingface.co/"),
        dataset_link=_link(dataset_name, "https://huggingface.co/datasets/"),
        hub_model=args.hub_model_id or name,
        settings={name: str(value).replace("|", "\\|") for name, value in shown.items()},
        transformers=transformers.__version__,
        torch=torch.__version__,
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "README.md").write_text(str(card), encoding="utf-8")


def _is_local(name: str) -> bool:
    """Return True if the name of a model or dataset is a path rather than a Hub id."""
    return os.path.exists(name) or re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is None


def public_name(name: str) -> str:
    """Reduce a path to its last component; return a Hub id unchanged."""
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] if _is_local(name) else name


def _link(name: str | None, site: str) -> str | None:
    if not name:
        return None
    return f"`{public_name(name)}`" if _is_local(name) else f"[{name}]({site}{name})"
