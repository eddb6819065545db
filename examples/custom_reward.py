"""Write a reward function: short answers on the subject.

Run with ``python examples/custom_reward.py``.
"""

from datasets import Dataset
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer

THINGS = ["bread", "clouds", "iron", "jazz", "maps", "rivers", "salt", "trains"]


def brief_and_on_topic(completions, subject, log_metric, **_):
    """Return 1 for naming the subject, minus a tenth per word beyond eight.

    Every dataset column is passed as a list, here ``subject``; completions of chat prompts are messages.
    """
    texts = [completion[0]["content"] for completion in completions]
    log_metric("words", sum(len(text.split()) for text in texts) / len(texts))
    named = [float(word in text.lower()) for word, text in zip(subject, texts, strict=True)]
    extra = [max(len(text.split()) - 8, 0) for text in texts]
    return [name - 0.1 * words for name, words in zip(named, extra, strict=True)]


def main():
    options = example_parser(__doc__, "custom-reward-output").parse_args()
    questions = [[{"role": "user", "content": f"Tell me something about {thing}."}] for thing in THINGS]
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=brief_and_on_topic,
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            learning_rate=1e-5,
            per_device_train_batch_size=16,
            max_completion_length=16,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": questions, "subject": THINGS}),
    )
    trainer.train()


if __name__ == "__main__":
    main()
