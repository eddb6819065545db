"""Iterative GRPO: the reference and the reward model are updated after every outer iteration.

The reward model made here is tiny and untrained: it learns from the labels which completions are short.
Run with ``python examples/iterative.py``.
"""

from datasets import Dataset
from reward_model import PROMPTS, tiny_reward_model
from smollm2 import example_parser
from transformers import AutoTokenizer

from groupwise import GRPOConfig, IterativeConfig, IterativeGRPO


def few_words(completions, **_):
    """Label completions for the reward model: any function of the completion and its row."""
    return [float(len(text.split()) < 8) for text in completions]


def main():
    options = example_parser(__doc__, "iterative-output", max_steps=4).parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    runner = IterativeGRPO(
        options.model,
        tiny_reward_model(tokenizer),
        GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            beta=0.04,
            learning_rate=1e-5,
            per_device_train_batch_size=8,
            max_completion_length=12,
            logging_steps=1,
            report_to="none",
        ),
        # Steps per iteration: max_steps / iterations.
        iterative=IterativeConfig(iterations=min(2, options.max_steps), reward_prompts=2, reward_epochs=2),
        label_func=few_words,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        reward_processing_classes=tokenizer,
    )
    runner.train()
    for update in runner.reward_metrics:
        print(update)


if __name__ == "__main__":
    main()
