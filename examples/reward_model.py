"""Use a sequence-classification model as the reward.

The model made here is tiny and untrained; replace it with a trained one, given as a model or a hub id.
Run with ``python examples/reward_model.py``.
"""

import torch
from datasets import Dataset
from smollm2 import example_parser
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from groupwise import GRPOConfig, GRPOTrainer

PROMPTS = ["My favourite season is", "On the table lay", "The train was late because", "We laughed when"]


def tiny_reward_model(tokenizer):
    """Create a model with one label: its logit is the reward of prompt + completion."""
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
    options = example_parser(__doc__, "reward-model-output").parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=tiny_reward_model(tokenizer),
        reward_processing_classes=tokenizer,  # a reward model given by id loads its own
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
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    trainer.train()


if __name__ == "__main__":
    main()
