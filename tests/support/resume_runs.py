"""Tiny runs for the resume tests; as a script, one to be killed as it writes.

    resume_runs.py ADDRESS OUTPUT_DIR WEIGHTS_FILE [resume] [stop]

ADDRESS: of the test's socket.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from groupwise.config.grpo_config import GRPOConfig
from groupwise.trainer import GRPOTrainer

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", "<unk>", *LETTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )


_ENDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(LETTERS) + 3, **sizes, **_ENDS))


def gpt2_with_dropout() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    rates = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(LETTERS) + 3, n_embd=16, n_layer=2, n_head=2, n_positions=64, **rates, **_ENDS
        )
    )


def vowels(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
    """A reward that also draws from Python's generator, as rewards with a random part do."""
    log_metric("draw", random.random())
    return [sum(letter in "aeiou" for letter in text) + random.random() for text in completions]


def vowels_of_odd_prompts(prompts: list[str], completions: list[str], **given: Any) -> list[float]:
    """No variance in the groups of even prompts."""
    counts = vowels(completions, **given)
    return [count * (int(prompt[-1]) % 2) for prompt, count in zip(prompts, counts, strict=True)]


def prompts(count: int) -> Dataset:
    # Different lengths, so that padding differs from batch to batch.
    return Dataset.from_dict({"prompt": [f"say {'x' * (i % 4)}{i}" for i in range(count)]})


def make_trainer(
    output_dir: str | Path, *, model: Any = None, num_prompts: int = 12, **settings: Any
) -> GRPOTrainer:
    """A trainer of a randomly initialised model that samples with ``generate``."""
    given = {
        name: settings.pop(name)
        for name in ("peft_config", "reward_funcs", "train_dataset")
        if name in settings
    }
    defaults: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "max_steps": 6,
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    return GRPOTrainer(
        model=llama() if model is None else model,
        args=GRPOConfig(**{**defaults, **settings}),
        eval_dataset=prompts(3),
        processing_class=tokenizer(),
        **{"reward_funcs": vowels, "train_dataset": prompts(num_prompts), **given},
    )


def main(address: str, output_dir: str, weights_file: str, *options: str) -> None:
    """One run in a process of its own.

    With "stop" it reports every point at which a kill could do harm and continues when it gets an answer.
    """
    torch.set_num_threads(1)
    talk = Client(address)
    trainer = make_trainer(output_dir, num_iterations=2, steps_per_generation=2, save_total_limit=2)
    real_save = torch.save
    if "stop" in options:
        _stop_at_writes(talk)
    trainer.train(resume_from_checkpoint="resume" in options or None)
    real_save(trainer.model.state_dict(), weights_file)


def _stop_at_writes(talk: Connection) -> None:
    """Stop in the middle of every file torch writes and of every removal, and around every rename."""
    real_save, real_replace, real_rmtree = torch.save, os.replace, shutil.rmtree

    def announce(moment: str) -> None:
        talk.send(moment)
        talk.recv()

    def save(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        content = io.BytesIO()
        real_save(value, content, *args, **kwargs)
        half = len(content.getvalue()) // 2
        with open(path, "wb") as file:
            file.write(content.getvalue()[:half])
            file.flush()
            announce(f"half of {os.path.basename(path)}")
            file.write(content.getvalue()[half:])

    def replace(source: Any, target: Any) -> None:
        announce(f"before rename to {os.path.basename(target)}")
        real_replace(source, target)
        announce(f"after rename to {os.path.basename(target)}")

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        files = [file for file in sorted(Path(path).rglob("*")) if file.is_file()]
        for file in files[: len(files) // 2]:
            file.unlink()
        if files:
            announce(f"half of {os.path.basename(path)} removed")
        real_rmtree(path, *args, **kwargs)

    torch.save, os.replace, shutil.rmtree = save, replace, rmtree


if __name__ == "__main__":
    main(*sys.argv[1:])
