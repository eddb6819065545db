"""Distil a teacher on the policy's own completions: the reverse KL to the teacher as a reward per token.

The policy made here is the teacher with noise on its weights, in place of a smaller model with the same
tokenizer; ``rewards/distillation_reward/mean`` is minus the KL of a completion and rises towards 0.
Run with ``python examples/distillation.py``.
"""

import torch
from datasets import Dataset
from smollm2 import example_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.rewards import get_distillation_reward

TOPICS = ["rain", "bread", "trains", "snow", "tea", "a harbour", "the moon", "chess"]


@torch.no_grad()
def add_noise(model, share=0.1):
    """Add normal noise to every matrix, of ``share`` times its standard deviation."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter += share * parameter.std() * torch.randn_like(parameter)
    return model


def main():
    parser = example_parser(__doc__, "distillation-output")
    parser.add_argument("--teacher", help="hub id or directory; default: the model")
    options = parser.parse_args()
    policy = AutoModelForCausalLM.from_pretrained(options.model)
    trainer = GRPOTrainer(
        model=policy if options.teacher else add_noise(policy),
        reward_funcs=get_distillation_reward(options.teacher or options.model),
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            advantage_baseline="per_token",  # the reward of a token is its advantage
            learning_rate=1e-5,
            num_generations=2,  # without a baseline, a group needs no more
            per_device_train_batch_size=8,
            max_completion_length=12,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"One line about {topic}."}]} for topic in TOPICS]
        ),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
