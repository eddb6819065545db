"""Train in an environment of the ``verifiers`` library: ``pip install 'groupwise[verifiers]'``.

For a published environment: ``verifiers.load_environment("its-name")``.
"""

import verifiers as vf
from datasets import Dataset
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.agents.libraries import VerifiersEnvironment, verifiers_dataset


class Guess(vf.MultiTurnEnv):
    """Answer until the capital is named."""

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

options = example_parser(__doc__, "environment-verifiers-output").parse_args()
GRPOTrainer(
    model=options.model,
    args=GRPOConfig(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        max_completion_length=48,
        learning_rate=1e-5,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=verifiers_dataset(environment),
    environment_factory=VerifiersEnvironment(environment),
).train()
