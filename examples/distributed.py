"""Train on several processes. A group of completions may span two of them.

On GPUs: ``accelerate launch --config_file examples/accelerate/ddp.yaml examples/distributed.py``.
On a CPU: ``accelerate launch --multi_gpu --num_processes 2 examples/distributed.py --use_cpu``.
"""

from datasets import Dataset
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer

COLOURS = ["black", "blue", "green", "red", "white", "yellow"]


def names_a_colour(completions, **_):
    return [float(any(colour in text.lower() for colour in COLOURS)) for text in completions]


def main():
    parser = example_parser(__doc__, "distributed-output")
    parser.add_argument("--use_cpu", action="store_true")
    options = parser.parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=names_a_colour,
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            use_cpu=options.use_cpu,
            learning_rate=1e-5,
            # Two processes x 4 completions = one group of 8 over both.
            per_device_train_batch_size=4,
            num_generations=8,
            max_completion_length=8,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            ddp_find_unused_parameters=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["The door was", "Her coat was", "The car is", "A bird"]}),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"trained on {trainer.args.world_size} processes")


if __name__ == "__main__":
    main()
