"""An environment of the ``verifiers`` library: ``pip install 'groupwise[verifiers]'``.

With a published one: ``verifiers.load_environment("its-name")``.
"""

import argparse

import verifiers as vf
from datasets import Dataset
from smollm2 import local_model

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.agents.adapters import VerifiersDriver, verifiers_dataset


class Guess(vf.MultiTurnEnv):
    """The environment answers until the capital is named."""

    async def env_response(self, messages, state, **_):
        if state["answer"] in str(messages[-1].content):
            state["final_env_response"] = [vf.UserMessage(content="Yes.")]
            return []
        return [vf.UserMessage(content="No. Try again.")]


def found(completion, answer, **_):
    return float(any(answer in str(m.content) for m in completion if m.role == "assistant"))


CITIES = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo"}
rows = [{"question": f"What is the capital of {land}?", "answer": city} for land, city in CITIES.items()]
environment = Guess(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[found]), max_turns=2)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--output_dir", default="environment-verifiers-output")
GRPOTrainer(
    model=str(local_model()),
    args=GRPOConfig(
        **vars(parser.parse_args()),
        max_completion_length=48,
        learning_rate=1e-5,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=verifiers_dataset(environment),
    environment_factory=VerifiersDriver(environment),
).train()
