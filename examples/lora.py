"""Train a LoRA adapter. The frozen base model is the reference of the KL term.

Run with ``python examples/lora.py``; it needs PEFT.
"""

from datasets import Dataset
from peft import LoraConfig
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer

CITIES = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo"}


def names_the_city(completions, city, **_):
    """Return 1 if the answer begins with the city."""
    return [float(text.strip().startswith(name)) for text, name in zip(completions, city, strict=True)]


def main():
    options = example_parser(__doc__, "lora-output").parse_args()
    data = {"prompt": [f"The capital of {land} is" for land in CITIES], "city": list(CITIES.values())}
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=names_the_city,
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            beta=0.02,  # reference log-probs come from the policy with its adapter disabled: no second model
            learning_rate=1e-4,  # LoRA takes a larger learning rate than full fine-tuning
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
    trainer.save_model()  # only the adapter


if __name__ == "__main__":
    main()
