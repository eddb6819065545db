"""Train on tasks of reasoning-gym, generated on demand: ``pip install 'groupwise[rewards]'``."""

from smollm2 import example_parser, tool_tokenizer

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.agents.libraries import reasoning_gym_factory
from groupwise.rewards import create_reasoning_gym

options = example_parser(__doc__, "environment-reasoning-gym-output").parse_args()
GRPOTrainer(
    model=options.model,
    args=GRPOConfig(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        max_completion_length=48,
        max_tool_calling_iterations=2,
        learning_rate=1e-5,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    processing_class=tool_tokenizer(options.model, "answer"),
    environment_factory=reasoning_gym_factory(create_reasoning_gym("chain_sum", size=500, seed=1)),
).train()
