"""A tool: the model learns to look prices up, and to look up the right ones."""

import argparse

from datasets import Dataset
from smollm2 import local_model, tool_tokenizer

from groupwise import GRPOConfig, GRPOTrainer

PRICES = {"tea": 3, "bread": 2, "cheese": 7, "honey": 9}


def price(item: str) -> int:
    """Get the price of an item in the shop.

    Args:
        item: what to look up.
    """
    return PRICES[item]


def ask(item):
    """The question, behind an example of how it is done."""
    made = {"type": "function", "function": {"name": "price", "arguments": {"item": "milk"}}}
    users = [{"role": "user", "content": f"What does {name} cost?"} for name in ("milk", item)]
    called = [{"role": "assistant", "content": "", "tool_calls": [made]}]
    told = [
        {"role": "tool", "name": "price", "content": "4"},
        {"role": "assistant", "content": "It costs 4."},
    ]
    return [users[0], *called, *told, users[1]]


def right_price(completions, item, **_):
    """1 if the right price was looked up, 0.5 if another one was."""
    said = [[m["content"] for m in messages if m["role"] == "tool"] for messages in completions]
    right = [str(PRICES[name]) in answers for answers, name in zip(said, item, strict=True)]
    return [1.0 if ok else 0.5 * any(map(str.isdigit, s)) for ok, s in zip(right, said, strict=True)]


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--output_dir", default="tools-output")
GRPOTrainer(
    model=str(local_model()),
    reward_funcs=right_price,
    args=GRPOConfig(
        **vars(parser.parse_args()),
        max_completion_length=40,  # of all turns together, what tools say included
        max_tool_calling_iterations=1,
        learning_rate=1e-5,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_list([{"prompt": ask(item), "item": item} for item in PRICES]),
    processing_class=tool_tokenizer("item"),
    tools=[price],
).train()
