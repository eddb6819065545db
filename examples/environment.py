"""Train in an environment with its own tasks, tools and reward: no dataset, no reward function.

The row's ``seed`` selects the game, so all completions of a group play the same one.
"""

import random

from smollm2 import example_parser, tool_tokenizer

from groupwise import GRPOConfig, GRPOTrainer


class HigherOrLower:
    """Guess a secret number between 1 and 9 from hints."""

    def reset(self, seed: int, **row) -> str:
        self.secret, self.best = random.Random(seed).randint(1, 9), 0.0
        return "Guess my number between 1 and 9. Answer with guess(5) or another number, and nothing else."

    def guess(self, number: str) -> str:
        """Guess the number.

        Args:
            number: between 1 and 9.
        """
        away = abs(int(number) - self.secret)
        self.best = max(self.best, 1.0 - away / 9)
        return "Yes!" if away == 0 else "higher" if int(number) < self.secret else "lower"

    def get_reward(self) -> float:
        return self.best


options = example_parser(__doc__, "environment-output").parse_args()
GRPOTrainer(
    model=options.model,
    args=GRPOConfig(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        max_completion_length=48,
        max_tool_calling_iterations=2,
        learning_rate=1e-5,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    processing_class=tool_tokenizer(options.model, "number"),
    environment_factory=HigherOrLower,
).train()
