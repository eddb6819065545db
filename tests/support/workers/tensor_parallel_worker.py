"""One of two processes that train with one engine over both."""

from __future__ import annotations

import os
import tempfile

import torch.distributed as dist

from support.engine_runs import engine_greedy, greedy, policy, sync, trainer


def main() -> None:
    # Every process has other prompts, and not equally many requests.
    with tempfile.TemporaryDirectory() as directory:
        run = trainer(
            directory,
            model=policy(num_key_value_heads=2),
            vllm_tensor_parallel_size=2,
            per_device_train_batch_size=4,
            num_generations=4,
            learning_rate=0.05,
            ddp_backend="gloo",
        )
        run.train()
        sync(run, run.accelerator.unwrap_model(run.model_wrapped))
        prompts = [[4, 5, 6], [7], [8, 9]][run.args.process_index :]
        model = run.accelerator.unwrap_model(run.model_wrapped)
        assert engine_greedy(run.backend, prompts) == greedy(model, prompts, 6, run.backend.end_tokens)
        gap = run.state.log_history[0]["sampling/sampling_logp_difference/mean"]
        assert 0 <= gap < 1e-4, gap
        size = run.backend.engine.llm_engine.vllm_config.parallel_config.world_size
        os.write(1, f"sampled with {size}\n".encode())  # in one piece, unlike print
        run.backend.close()
        assert dist.is_initialized()  # the group of the trainer, which goes on


if __name__ == "__main__":
    main()
