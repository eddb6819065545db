"""A rollout of our own: the model writes a line, a referee answers, the model writes another.

The referee's tokens get 0 in ``env_mask``: the model reads them and is not trained on them. What else is
returned, here ``shortened``, is a column for the reward function.
"""

import argparse

from datasets import Dataset
from smollm2 import local_model

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.records import SamplingOptions

TURN = 12  # tokens
REFEREE = "<|im_end|>\n<|im_start|>user\nShorter, please.<|im_end|>\n<|im_start|>assistant\n"


def two_turns(prompts, trainer):
    """A draft, the referee's request, and what becomes of the draft."""
    tokenizer, backend = trainer.processing_class, trainer.backend
    chats = [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"] for prompt in prompts
    ]
    request = tokenizer(REFEREE)["input_ids"]
    limits = SamplingOptions([TURN] * len(prompts))
    drafts = [draft.token_ids for draft in backend.generate(chats, limits)]
    # What ended a turn is not repeated: the referee's text begins with it.
    drafts = [ids[:-1] if ids[-1] in backend.end_tokens else ids for ids in drafts]
    contexts = [chat + draft + request for chat, draft in zip(chats, drafts, strict=True)]
    finals = [final.token_ids for final in backend.generate(contexts, limits)]
    pairs = list(zip(drafts, finals, strict=True))
    return {
        "prompt_ids": chats,
        "completion_ids": [draft + request + final for draft, final in pairs],
        "env_mask": [[1] * len(draft) + [0] * len(request) + [1] * len(final) for draft, final in pairs],
        "shortened": [len(final) < len(draft) for draft, final in pairs],
    }


def obeyed(shortened, **_):
    """1 if the second line is shorter than the first."""
    return [float(value) for value in shortened]


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--output_dir", default="rollout-function-output")
batches = {"per_device_train_batch_size": 8, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
args = GRPOConfig(**vars(parser.parse_args()), **batches, learning_rate=1e-5)
topics = ["rain", "bread", "trains", "snow"]
rows = [{"prompt": [{"role": "user", "content": f"One line about {topic}."}]} for topic in topics]
GRPOTrainer(str(local_model()), obeyed, args, Dataset.from_list(rows), rollout_func=two_turns).train()
