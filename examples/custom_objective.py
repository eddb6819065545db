"""Change the objective in two ways: register a surrogate, and override the advantages.

Run with ``python examples/custom_objective.py``.
"""

from datasets import Dataset
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer, register_objective


def reinforce(terms, settings):
    """Return −A log π, REINFORCE per token: (B, T) from advantages (B, 1) and log-probs (B, T)."""
    return -terms.advantages_BX * terms.logps_BT


register_objective("reinforce", reinforce, "token_mean", zero_grad_at_zero_advantage=True)


class RankTrainer(GRPOTrainer):
    """Compute advantages from the rank of a reward in its group; the scale of the rewards has no effect."""

    def compute_advantages(self, scored):
        rewards_PG = scored.rewards_NF.nansum(-1).view(-1, scored.num_generations)
        rank_PG = (
            (rewards_PG.unsqueeze(2) > rewards_PG.unsqueeze(1)).float().mean(-1)
        )  # (P, G), share of the group below
        return (rank_PG - rank_PG.mean(-1, keepdim=True)).reshape(-1)


def vowels(completions, **_):
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def main():
    options = example_parser(__doc__, "custom-objective-output").parse_args()
    trainer = RankTrainer(
        model=options.model,
        reward_funcs=vowels,
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
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
