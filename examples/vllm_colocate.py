"""Sample with a vLLM engine in the trainer's process.

On a CPU, ``scripts/install_vllm.sh`` installs vLLM's CPU build.
"""

from datasets import Dataset
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer

CITIES = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo"}


def names_the_city(completions, city, **_):
    """Return 1 if the answer begins with the city."""
    return [float(text.strip().startswith(name)) for text, name in zip(completions, city, strict=True)]


def main():
    options = example_parser(__doc__, "vllm-colocate-output").parse_args()
    data = {"prompt": [f"The capital of {land} is" for land in CITIES], "city": list(CITIES.values())}
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=names_the_city,
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            use_vllm=True,
            vllm_max_model_length=256,  # prompt + completion tokens
            per_device_train_batch_size=16,
            max_completion_length=8,
            learning_rate=5e-6,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict(data),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
