"""A sequence-classification model as the reward.

The one made here is tiny and untrained, so its opinion means nothing; put your own in its place, as a model
or as its id. Run with ``python examples/reward_model.py``.
"""

import argparse

import torch
from datasets import Dataset
from smollm2 import local_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from groupwise import GRPOConfig, GRPOTrainer

PROMPTS = ["My favourite season is", "On the table lay", "The train was late because", "We laughed when"]


def tiny_reward_model(tokenizer):
    """One label: the model's output is the reward of prompt and completion together."""
    torch.manual_seed(0)
    return LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_labels=1,
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--output_dir", default="reward-model-output")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(local_model())
    trainer = GRPOTrainer(
        model=str(local_model()),
        reward_funcs=tiny_reward_model(tokenizer),
        reward_processing_classes=tokenizer,  # a reward model given by name brings its own
        args=GRPOConfig(
            **vars(options),
            learning_rate=1e-5,
            per_device_train_batch_size=16,
            max_completion_length=16,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    trainer.train()


if __name__ == "__main__":
    main()
