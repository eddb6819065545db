"""Two ways to change what is optimised: register a surrogate, and override the advantages.

Run with ``python examples/custom_objective.py``.
"""

import argparse

from datasets import Dataset
from smollm2 import local_model

from groupwise import GRPOConfig, GRPOTrainer, register_objective


def reinforce(terms, settings):
    """−A log π, without a ratio: plain REINFORCE per token. The tensors are (B, T), advantages (B, 1)."""
    return -terms.advantages_BX * terms.logps_BT


register_objective("reinforce", reinforce, "token_mean", zero_grad_at_zero_advantage=True)


class RankTrainer(GRPOTrainer):
    """Advantages from the rank of a reward in its group, so that the scale of rewards does not matter."""

    def compute_advantages(self, scored):
        rewards_PG = scored.rewards.rewards_NF.nansum(-1).view(-1, scored.rewards.num_generations)
        rank_PG = (rewards_PG.unsqueeze(2) > rewards_PG.unsqueeze(1)).float().mean(-1)  # share it beats
        return (rank_PG - rank_PG.mean(-1, keepdim=True)).reshape(-1)


def vowels(completions, **_):
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--output_dir", default="custom-objective-output")
    options = parser.parse_args()
    trainer = RankTrainer(
        model=str(local_model()),
        reward_funcs=vowels,
        args=GRPOConfig(
            **vars(options),
            loss_type="reinforce",
            learning_rate=1e-5,
            per_device_train_batch_size=16,
            max_completion_length=12,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": ["Once upon a time", "In spring", "At sea", "One day"]}),
    )
    trainer.train()


if __name__ == "__main__":
    main()
