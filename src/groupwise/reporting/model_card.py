"""The model card of a trained model."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCardData

from groupwise.config.grpo_config import GRPOConfig

_OBJECTIVE = (
    *("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "beta", "scale_rewards"),
    *("advantage_baseline", "num_iterations", "num_generations"),
)
_ESSENTIAL = (
    *("temperature", "max_completion_length", "learning_rate", "lr_scheduler_type", "optim"),
    *("num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size"),
    *("generation_batch_size", "bf16", "seed"),
)
# Listed only where they differ from their default. A setting enters the card by being named here. What can
# hold addresses, directories, credentials or free text is not: hub_token, *_kwargs, vllm_server_*, paths.
_OTHER = (
    *("delta", "kl_estimator", "kl_in_reward", "use_bias_correction_kl", "off_policy_mask_threshold"),
    *("sapo_temperature_pos", "sapo_temperature_neg"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    *("mask_truncated_completions", "top_entropy_quantile", "reward_weights", "multi_objective_aggregation"),
    *("entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"),
    *("entropy_target", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    *("disable_dropout", "cast_lm_head_to_fp32", "router_aux_loss_coef", "max_prompt_length"),
    *("top_p", "top_k", "min_p", "repetition_penalty", "use_vllm", "vllm_mode"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    *("use_transformers_continuous_batching", "max_tool_calling_iterations", "use_liger_kernel"),
    *("sequence_layout", "logprob_head", "skip_zero_advantage", "dynamic_sampling"),
    *("dynamic_sampling_max_rounds", "rollout_staleness", "reward_on_error", "shuffle_dataset"),
    *("weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_steps"),
    *("max_steps", "fp16", "gradient_checkpointing"),
)

_CITATION = """\
```bibtex
@article{shao2024deepseekmath,
  title   = {{DeepSeekMath}: Pushing the Limits of Mathematical Reasoning in Open Language Models},
  author  = {Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and Xu, Runxin and Song, Junxiao and Bi, Xiao and
             Zhang, Haowei and Zhang, Mingchuan and Li, Y. K. and Wu, Y. and Guo, Daya},
  journal = {arXiv preprint arXiv:2402.03300},
  year    = {2024}
}
```"""


def model_card(
    *,
    model_name: str,
    base_model: str | None,
    dataset_name: str | None,
    tags: list[str],
    args: GRPOConfig,
    versions: dict[str, str],
    log_history: list[dict[str, Any]],
    reward_names: list[str],
) -> str:
    """Markdown with a YAML head, ready to be a ``README.md`` on the Hub.

    Local directories are never spelled out: as a base model or dataset they are left out of the head and the
    text gives their last component. Of ``args`` only numbers, flags and names of methods are shown.

    Args:
        model_name: title; with ``args.hub_model_id`` unset also the model of the quick start.
        base_model, dataset_name: Hub ids, local directories or None.
        tags: in addition to groupwise, grpo and generated_from_trainer.
        args: the configuration of the run.
        versions: package versions by package name.
        log_history: ``TrainerState.log_history``; the last rewards in it are reported.
        reward_names: the names in the metrics ``rewards/<name>/mean``.
    """
    name = _public_name(model_name)
    sections = [
        f"# {name}",
        _introduction(base_model, dataset_name),
        _quick_start(args.hub_model_id or name),
        "## Training\n\nGroup relative policy optimization: several completions are sampled for each prompt, "
        "and each is reinforced by how its reward compares to those of the others.\n\n" + _settings(args),
        _rewards(log_history, reward_names),
        "## Framework versions\n\n" + "\n".join(f"- {key}: {value}" for key, value in versions.items()),
        f"## Citation\n\nGRPO comes from [DeepSeekMath](https://arxiv.org/abs/2402.03300):\n\n{_CITATION}",
    ]
    body = "\n\n".join(section for section in sections if section)
    return f"---\n{_head(name, base_model, dataset_name, tags)}\n---\n\n{body}\n"


def _head(name: str, base_model: str | None, dataset_name: str | None, tags: list[str]) -> str:
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base_model if base_model and not _is_local(base_model) else None,
        datasets=[dataset_name] if dataset_name and not _is_local(dataset_name) else None,
        tags=list(dict.fromkeys(["groupwise", "grpo", "generated_from_trainer", *tags])),
        model_name=name,
    )
    return str(data.to_yaml()).rstrip()


def _is_local(name: str) -> bool:
    """Whether a name of a model or dataset is a path rather than a Hub id."""
    return os.path.exists(name) or re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is None


def _public_name(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] if _is_local(name) else name


def _introduction(base_model: str | None, dataset_name: str | None) -> str:
    text = "This model was trained with groupwise"
    if base_model:
        text += f", starting from {_mention(base_model, 'https://huggingface.co/')}"
    if dataset_name:
        text += f", on the prompts of {_mention(dataset_name, 'https://huggingface.co/datasets/')}"
    return text + "."


def _mention(name: str, site: str) -> str:
    return f"`{_public_name(name)}`" if _is_local(name) else f"[{name}]({site}{name})"


def _quick_start(model: str) -> str:
    return f"""\
## Quick start

```python
from transformers import pipeline

generate = pipeline("text-generation", model="{model}")
messages = [{{"role": "user", "content": "What is 17 * 23?"}}]
print(generate(messages, max_new_tokens=256, return_full_text=False)[0]["generated_text"])
```"""


def _settings(args: GRPOConfig) -> str:
    """The table of settings: those that make up the method, and the others that were changed."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    defaults["top_k"] = 0  # what the configuration makes of None
    lines = ["| Setting | Value |", "|---|---|"]
    for name in (*_OBJECTIVE, *_ESSENTIAL, *_OTHER):
        value = _plain(getattr(args, name, None))
        chosen = name in _OBJECTIVE or name in _ESSENTIAL or name.startswith(f"{args.loss_type}_")
        if value is not None and (chosen or value != _plain(defaults.get(name))):
            lines.append(f"| {name} | {_escape(value)} |")
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _escape(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _rewards(log_history: list[dict[str, Any]], reward_names: list[str]) -> str:
    """The last rewards of training and of evaluation; nothing when none were logged."""
    parts = []
    for title, prefix in (("training", ""), ("evaluation", "eval_")):
        logs = next((logs for logs in reversed(log_history) if f"{prefix}reward" in logs), None)
        if logs is None:
            continue
        keys = [
            (_public_name(name), f"{prefix}rewards/{name}/mean", f"{prefix}rewards/{name}/std")
            for name in reward_names
        ]
        lines = [
            f"Last {title} log, step {logs.get('step', '?')}:",
            "",
            "| Metric | Mean | Std |",
            "|---|---|---|",
        ]
        for name, mean, std in [("reward", f"{prefix}reward", f"{prefix}reward_std"), *keys]:
            lines.append(f"| `{_escape(name)}` | {_number(logs.get(mean))} | {_number(logs.get(std))} |")
        parts.append("\n".join(lines))
    return "\n\n".join(["## Rewards", *parts]) if parts else ""


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def write_model_card(trainer: Any, model_name: str | None, dataset_name: str | None, tags: Any) -> None:
    """Write the card of a trainer's model as ``README.md`` into its output directory.

    Args:
        model_name: title; by default the last component of the output directory.
        tags: one or a list of further tags, or None.
    """
    directory = Path(trainer.args.output_dir)
    card = model_card(
        model_name=model_name or directory.name,
        base_model=getattr(trainer.model.config, "_name_or_path", None),
        dataset_name=dataset_name,
        tags=[tags] if isinstance(tags, str) else list(tags or []),
        args=trainer.args,
        versions={"transformers": transformers.__version__, "torch": torch.__version__},
        log_history=trainer.state.log_history,
        reward_names=trainer.reward_func_names,
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "README.md").write_text(card, encoding="utf-8")
