"""Training an adapter: the base model stays as it is, and is the reference of the KL.

Run with ``python examples/lora.py``; ``python -c "import peft"`` says whether PEFT is there.
"""

import argparse

from datasets import Dataset
from peft import LoraConfig
from smollm2 import local_model

from groupwise import GRPOConfig, GRPOTrainer

CITIES = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo"}


def names_the_city(completions, city, **_):
    """1 if the answer begins with the city."""
    return [float(text.strip().startswith(name)) for text, name in zip(completions, city, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--output_dir", default="lora-output")
    options = parser.parse_args()
    data = {"prompt": [f"The capital of {land} is" for land in CITIES], "city": list(CITIES.values())}
    trainer = GRPOTrainer(
        model=str(local_model()),
        reward_funcs=names_the_city,
        args=GRPOConfig(
            **vars(options),
            beta=0.02,  # no second model is loaded: the adapter is switched off to score the reference
            learning_rate=1e-4,  # adapters take larger ones than whole models
            per_device_train_batch_size=16,
            max_completion_length=8,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict(data),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.model.print_trainable_parameters()
    trainer.train()
    trainer.save_model()  # the adapter alone


if __name__ == "__main__":
    main()
