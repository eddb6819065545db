"""An engine with experts follows the policy, and other experts than the policy's end the run.

A script, because vLLM starts such an engine only in a process that has had no engine without experts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from groupwise.errors import BackendError
from groupwise.generation.vllm import receiver
from groupwise.generation.vllm.receiver import CheckpointReceiver
from support.engine_runs import engine_greedy, greedy, mixture, sync, trainer

PROMPTS = [[4, 5, 6], [7], [8, 9, 10, 11, 12], [13, 14]]
FLIPPED = "model.layers.1.mlp.experts.2.down_proj.weight has other values (1 problems"
OF_ALL_EXPERTS = "(24 problems"  # three matrices of four experts in two layers


def main(directory: str) -> None:
    run = trainer(directory, model=mixture(), learning_rate=0.05)
    run.train()
    gaps = [line["sampling/sampling_logp_difference/max"] for line in run.state.log_history[:2]]
    sync(run, run.model)
    assert engine_greedy(run.backend, PROMPTS) == greedy(run.model, PROMPTS, 6, run.backend.end_tokens)
    finish, repack = CheckpointReceiver.finish_weight_update, receiver.repack_experts

    def flip_bit(engine: CheckpointReceiver) -> None:
        finish(engine)
        experts = engine.model.get_submodule("model.layers.1.mlp.experts.routed_experts")
        experts.w2_weight.data.view(torch.int32)[2, 3, 5] ^= 1

    found = [problem(run)]
    CheckpointReceiver.finish_weight_update = flip_bit
    found.append(problem(run))
    CheckpointReceiver.finish_weight_update = finish
    receiver.repack_experts = lambda model: None
    found.append(problem(run))
    receiver.repack_experts = repack
    found.append(problem(run))
    run.backend.close()
    print(f"log-probs differ by at most {max(gaps):.1e}")
    assert max(gaps) < 1e-4
    assert found[0] == found[3] == "" and FLIPPED in found[1] and OF_ALL_EXPERTS in found[2], found
    print("followed")


def problem(run: Any) -> str:
    """Send the weights again; returns the error if the engine computes with others."""
    run.backend.invalidate_weights()
    try:
        sync(run, run.model)
    except BackendError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(sys.argv[1])
