from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import ModelCard

from groupwise.reporting.model_card import write_model_card


@pytest.fixture
def card(make_args):
    def make(*, settings=None, **changes):
        given = {
            "model_name": "someone/tiny-grpo",
            "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "dataset_name": "openai/gsm8k",
            "tags": [],
            "args": make_args(**(settings or {})),
        } | changes
        args, config = given.pop("args"), SimpleNamespace(name_or_path=given.pop("base_model"))
        write_model_card(SimpleNamespace(args=args, model=SimpleNamespace(config=config)), **given)
        return Path(args.output_dir, "README.md").read_text()

    return make


def listed(text):
    table = text.split("| Setting | Value |\n|---|---|\n")[1].split("\n\n")[0]
    return dict(line.strip("| ").split(" | ") for line in table.splitlines())


def test_head_is_valid_and_complete(card):
    data = ModelCard(card(tags=["math", "grpo"])).data.to_dict()
    assert data == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "datasets": ["openai/gsm8k"],
        "model_name": "someone/tiny-grpo",
        "tags": ["groupwise", "grpo", "generated_from_trainer", "math"],
    }


def test_the_quick_start_is_python(card):
    text = card(settings={"hub_model_id": "someone/else"})
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "quick start", "exec")
    assert 'model="someone/else"' in code


def test_versions_and_citation(card):
    text = card()
    assert f"- transformers: {transformers.__version__}\n- torch: {torch.__version__}\n" in text
    assert "arXiv:2402.03300" in text


def test_settings_list_the_method_and_what_was_changed(card):
    plain = listed(card())
    assert (plain["loss_type"], plain["epsilon_high"], plain["learning_rate"]) == ("dapo", "0.2", "1e-06")
    assert not {"vespo_k_pos", "top_k", "top_p", "delta", "dynamic_sampling", "max_steps"} & set(plain)
    changes = {"loss_type": "vespo", "top_p": 0.9, "lr_scheduler_type": "cosine", "max_steps": 7}
    changed = listed(card(settings=changes))
    assert changed["vespo_k_pos"] == "2.0"  # a setting of the chosen objective, though at its default
    assert (changed["top_p"], changed["lr_scheduler_type"], changed["max_steps"]) == ("0.9", "cosine", "7")
    assert "sapo_temperature_pos" not in changed


@pytest.mark.parametrize(
    "base", ["/home/ann/models/sft", "./models/sft", "../sft/", "C:\\models\\sft", "a/b/sft", "~/sft"]
)
def test_local_names_are_reduced(card, base):
    text = card(base_model=base, dataset_name=base, model_name=base)
    assert base not in text and "ann" not in text.split("## Citation")[0].split("## Framework")[0]
    data = ModelCard(text).data
    assert data.base_model is None and data.datasets is None and data.model_name == "sft"
    assert "starting from `sft`" in text


def test_a_directory_that_looks_like_a_hub_id_is_local(card, tmp_path, monkeypatch):
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    text = card(base_model="runs/sft")
    assert ModelCard(text).data.base_model is None
    assert "runs/sft" not in text


def test_nothing_secret_enters_the_card(card, make_args, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_env")
    monkeypatch.setenv("WANDB_API_KEY", "secret_wandb")
    settings = {
        "hub_token": "hf_secret_token",
        "model_init_kwargs": {"token": "hf_secret_init"},
        "chat_template_kwargs": {"note": "secret_note"},
        "generation_kwargs": {"stop": "secret_stop"},
        "log_completions": True,
        "log_completions_hub_repo": "someone/secret_repo",
        "run_name": "secret_run",
    }
    args = make_args(**settings)
    args.vllm_server_host = "secret-host"
    args.vllm_server_base_url = "http://ann:secret_url@internal:8000"
    args.vllm_engine_kwargs = {"download_dir": "/secret_dir"}
    text = card(args=args)
    assert "secret" not in text
    assert str(tmp_path) not in text
