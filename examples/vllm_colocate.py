"""Sampling with vLLM in the trainer's process. On a CPU, scripts/install_vllm.sh installs the build for it.

Run with ``python examples/vllm_colocate.py``; ``python -c "import vllm"`` says whether vLLM is there.
"""

import argparse

from datasets import Dataset
from smollm2 import local_model

from groupwise import GRPOConfig, GRPOTrainer

CITIES = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo"}


def names_the_city(completions, city, **_):
    """1 if the answer begins with the city."""
    return [float(text.strip().startswith(name)) for text, name in zip(completions, city, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--output_dir", default="vllm-colocate-output")
    options = parser.parse_args()
    data = {"prompt": [f"The capital of {land} is" for land in CITIES], "city": list(CITIES.values())}
    trainer = GRPOTrainer(
        model=str(local_model()),
        reward_funcs=names_the_city,
        args=GRPOConfig(
            **vars(options),
            use_vllm=True,
            vllm_max_model_length=256,  # prompt and completion together
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
