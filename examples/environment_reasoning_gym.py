"""Tasks of reasoning-gym, made as they are needed: ``pip install 'groupwise[rewards]'``."""

import argparse

from smollm2 import local_model, tool_tokenizer

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.agents.adapters import reasoning_gym_factory
from groupwise.rewards import create_reasoning_gym

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--output_dir", default="environment-reasoning-gym-output")
GRPOTrainer(
    model=str(local_model()),
    args=GRPOConfig(
        **vars(parser.parse_args()),
        max_completion_length=48,
        max_tool_calling_iterations=2,
        learning_rate=1e-5,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    processing_class=tool_tokenizer("answer"),
    environment_factory=reasoning_gym_factory(create_reasoning_gym("chain_sum", size=500, seed=1)),
).train()
