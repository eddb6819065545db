"""Train on tasks of reasoning-gym, answered with a tool: ``pip install reasoning-gym``."""

import reasoning_gym
from smollm2 import example_parser, tool_tokenizer

from groupwise import GRPOConfig, GRPOTrainer

TASKS = reasoning_gym.create_dataset("chain_sum", size=500, seed=1)  # every process creates the same tasks


class Task:
    """One task per rollout; the row's ``seed`` selects it, so all completions of a group get the same one."""

    def reset(self, seed: int = 0, **row) -> str:
        self.entry, self.score = TASKS[seed % len(TASKS)], 0.0
        return f"{self.entry['question']}\nHand in your answer with the tool submit."

    def submit(self, answer: str) -> str:
        """Hand in the answer to the question. The last one counts.

        Args:
            answer: nothing but the answer, in the form that the question asks for.
        """
        self.score = float(TASKS.score_answer(answer, self.entry))
        return "correct" if self.score == 1.0 else f"not right, score {self.score:.2f}; try again"

    def get_reward(self) -> float:
        return self.score


options = example_parser(__doc__, "environment-reasoning-gym-output").parse_args()
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
    processing_class=tool_tokenizer(options.model, "answer"),
    environment_factory=Task,
).train()
