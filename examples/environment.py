"""An environment that brings its own tasks, its own tools and its own reward: no dataset, no reward function.

Every group of completions plays the same game, because the row's ``seed`` decides which one it is.
"""

import argparse
import random

from smollm2 import local_model, tool_tokenizer

from groupwise import GRPOConfig, GRPOTrainer


class HigherOrLower:
    """A secret number between 1 and 9, and hints."""

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


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--output_dir", default="environment-output")
GRPOTrainer(
    model=str(local_model()),
    args=GRPOConfig(
        **vars(parser.parse_args()),
        max_completion_length=48,
        max_tool_calling_iterations=2,
        learning_rate=1e-5,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    processing_class=tool_tokenizer("number"),
    environment_factory=HigherOrLower,
).train()
