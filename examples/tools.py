"""Train with a tool: the model learns to look up the right price."""

from datasets import Dataset
from smollm2 import example_parser, tool_tokenizer

from groupwise import GRPOConfig, GRPOTrainer

PRICES = {"tea": 3, "bread": 2, "cheese": 7, "honey": 9}


def price(item: str) -> int:
    """Get the price of an item in the shop.

    Args:
        item: name of the item.
    """
    return PRICES[item]


def ask(item):
    """Return the question as messages, after one example of a tool call."""
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": "milk"}}}
    users = [{"role": "user", "content": f"What does {name} cost?"} for name in ("milk", item)]
    example = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "price", "content": "4"},
        {"role": "assistant", "content": "It costs 4."},
    ]
    return [users[0], *example, users[1]]


def right_price(completions, item, **_):
    """Return 1 if the right price was looked up, 0.5 for the price of another item."""
    results = [[m["content"] for m in messages if m["role"] == "tool"] for messages in completions]
    right = [str(PRICES[name]) in answers for answers, name in zip(results, item, strict=True)]
    return [1.0 if ok else 0.5 * any(map(str.isdigit, s)) for ok, s in zip(right, results, strict=True)]


options = example_parser(__doc__, "tools-output").parse_args()
GRPOTrainer(
    model=options.model,
    reward_funcs=right_price,
    args=GRPOConfig(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        max_completion_length=40,  # tokens of all turns, tool results included
        max_tool_calling_iterations=1,
        log_completions=True,  # transcripts: a table at every log, and parquet files below output_dir
        learning_rate=1e-5,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_list([{"prompt": ask(item), "item": item} for item in PRICES]),
    processing_class=tool_tokenizer(options.model, "item"),
    tools=[price],
).train()
