"""Train on an endless stream with dynamic sampling, and report pass@k against the first evaluation."""

import itertools
import random
import re

from datasets import Dataset, IterableDataset
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer


def sums(seed, count=None):
    """Yield rows with a sum of two digits, endlessly without ``count``."""
    draw = random.Random(seed)
    for _ in itertools.count() if count is None else range(count):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        yield {"prompt": f"2+2=4\n5+3=8\n{a}+{b}=", "answer": str(a + b)}


def right(completions, answer, log_extra, **_):
    """Return 1 if the first number of the completion is the sum."""
    numbers = [re.search(r"\d+", text) for text in completions]
    said = [number[0] if number else None for number in numbers]
    log_extra("answer_parsed", said)
    return [float(number == sum_) for number, sum_ in zip(said, answer, strict=True)]


def main():
    options = example_parser(__doc__, "streaming-output").parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=right,
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            learning_rate=1e-5,
            per_device_train_batch_size=16,
            max_completion_length=4,
            dynamic_sampling=True,
            dynamic_sampling_max_rounds=3,
            per_device_eval_batch_size=64,
            num_generations_eval=4,
            eval_pass_at_k=[1, 4],
            save_strategy="no",
        ),
        train_dataset=IterableDataset.from_generator(sums, gen_kwargs={"seed": 0}),
        eval_dataset=Dataset.from_list(list(sums(seed=1, count=16))),
    )
    trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    print({name: round(value, 3) for name, value in after.items() if "eval_pass@1" in name})


if __name__ == "__main__":
    main()
