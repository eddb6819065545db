"""Reward answers with the score of a reasoning-gym task: ``pip install reasoning-gym``."""

import reasoning_gym
from datasets import Dataset
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer

TASKS = reasoning_gym.create_dataset("chain_sum", size=500, seed=1)  # every process creates the same tasks
FORM = "\nPut your answer between <answer> and </answer>."


def score(completions, task, **_):
    """Return the score, from 0 to 1, of the last answer in tags; of the whole text if it has no tags."""
    texts = [messages[-1]["content"] for messages in completions]
    answers = [text.rpartition("<answer>")[2].partition("</answer>")[0].strip() for text in texts]
    return [float(TASKS.score_answer(answer, TASKS[i])) for answer, i in zip(answers, task, strict=True)]


options = example_parser(__doc__, "reward-reasoning-gym-output").parse_args()
questions = [[{"role": "user", "content": entry["question"] + FORM}] for entry in TASKS]
GRPOTrainer(
    model=options.model,
    reward_funcs=score,
    args=GRPOConfig(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        max_completion_length=48,
        learning_rate=1e-5,
        per_device_train_batch_size=16,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"prompt": questions, "task": range(len(TASKS))}),
).train()
