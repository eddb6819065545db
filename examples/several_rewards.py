"""Combine several reward functions. A function returns None for completions it does not apply to.

Run with ``python examples/several_rewards.py``.
"""

import re

from datasets import Dataset
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer

SUMS = [(f"What is {a} + {b}?", str(a + b)) for a in (2, 5) for b in (3, 4)]
OTHERS = [(f"Name a {thing}.", None) for thing in ("colour", "country", "fruit", "planet")]


def right_number(completions, answer, **_):
    """Return 1 if the first number is the answer, None for questions without one."""
    found = [re.search(r"\d+", completion[0]["content"]) for completion in completions]
    return [
        None if right is None else float(number is not None and number[0] == right)
        for number, right in zip(found, answer, strict=True)
    ]


def short(completions, **_):
    """Return 1 for at most five words."""
    return [float(len(completion[0]["content"].split()) <= 5) for completion in completions]


def main():
    options = example_parser(__doc__, "several-rewards-output").parse_args()
    rows = [{"prompt": [{"role": "user", "content": q}], "answer": answer} for q, answer in SUMS + OTHERS]
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=[right_number, short],
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            reward_weights=[1.0, 0.2],
            learning_rate=1e-5,
            per_device_train_batch_size=16,
            max_completion_length=16,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()


if __name__ == "__main__":
    main()
