"""``torch_compile=True``: the same updates, and no new compilation for every micro-batch."""

import random

import pytest
import torch
from support import runs
from torch._dynamo.utils import counters


def fixed_completions(prompts, trainer):
    """Completions of two to six tokens, other lengths at every call."""
    draw = random.Random(trainer.state.global_step)
    lengths = [draw.randrange(2, 6) for _ in prompts]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": [[*(draw.randrange(4, 32) for _ in range(n)), 1] for n in lengths],
    }


def trained(directory, **settings):
    """The weights after five steps, and how many graphs had been compiled after each."""
    trainer = runs.trainer(
        directory,
        rollout_func=fixed_completions,
        train_dataset=runs.prompts(16),
        per_device_train_batch_size=8,
        max_steps=5,
        optim="sgd",
        gradient_checkpointing=False,
        **settings,
    )
    graphs, step = [], trainer.training_step

    def num_valid(*args, **kwargs):
        loss = step(*args, **kwargs)
        graphs.append(counters["stats"]["unique_graphs"])
        return loss

    trainer.training_step = num_valid
    trainer.train()
    return [p.detach().clone() for p in trainer.model.parameters()], graphs


@pytest.mark.slow
def test_a_compiled_model_makes_the_same_updates(tmp_path):
    plain, _ = trained(tmp_path / "plain")
    torch.compiler.reset()
    counters.clear()
    compiled, graphs = trained(tmp_path / "compiled", torch_compile=True, torch_compile_backend="aot_eager")
    moved = max((p - q).abs().max() for p, q in zip(plain, runs.policy().parameters(), strict=True))
    gap = max((p - q).abs().max() for p, q in zip(plain, compiled, strict=True))
    assert moved > 1e-4 and gap < 1e-6
    # One set of graphs for the first shapes, one for any others; nothing more after that.
    assert graphs[-1] > 0 and graphs[-1] == graphs[3]
