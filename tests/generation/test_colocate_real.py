"""SmolLM2-135M-Instruct trained for two steps with a vLLM engine in the trainer's process.

Files: ``generation/vllm/receiver.py``.
"""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from datasets import Dataset
from packaging.version import Version
from support.engine_runs import chat_prompts, engine_greedy, greedy, sync, vllm_version

from groupwise import GRPOConfig, GRPOTrainer

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.real_model]

QUESTIONS = ["What is 2+3?", "Name a colour."]


def contains_e(completions, **_):
    return [float(completion[0]["content"].count("e")) for completion in completions]


def test_engine_and_trainer_agree_after_two_steps(smollm2_path, tmp_path):
    config = GRPOConfig(
        str(tmp_path),
        use_vllm=True,
        vllm_max_model_length=128,
        vllm_engine_kwargs={"kv_cache_memory_bytes": 2**28},
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=8,
        max_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
    # The checkpoint is in bfloat16; what trains is float32, and so is the engine.
    run = GRPOTrainer(str(smollm2_path), contains_e, config, Dataset.from_list(rows))
    before = run.model.model.layers[0].mlp.up_proj.weight.detach().clone()
    run.train()
    assert not torch.equal(before, run.model.model.layers[0].mlp.up_proj.weight)
    for line in run.state.log_history[:2]:
        assert line["sampling/sampling_logp_difference/mean"] < 1e-3
    prompts = chat_prompts(run, rows)
    old = engine_greedy(run.backend, prompts)
    sync(run, run.model)
    new = engine_greedy(run.backend, prompts)
    run.backend.close()
    assert new == greedy(run.model, prompts, 8, run.backend.end_tokens)
    assert old != new


def test_dtype_conversion_warnings_of_the_engine_are_filtered():
    from vllm.model_executor.models import utils

    from groupwise.generation.vllm.receiver import ROUNDED

    def passes(message):
        return bool(utils.logger.filter(logging.LogRecord("vllm", logging.WARNING, "", 0, message, (), None)))

    assert (ROUNDED in inspect.getsource(utils)) == (vllm_version() >= Version("0.32"))
    assert not passes(f"{ROUNDED} %s into parameter with dtype %s") and passes("Attempted to load nothing")
