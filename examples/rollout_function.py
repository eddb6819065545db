"""Replace generation by a ``rollout_func``: a draft, a request to shorten it, and a second line.

The tokens of the request have ``env_mask`` 0 and carry no loss. Further keys of the result, here
``shortened``, are passed to the reward functions.
"""

from datasets import Dataset
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer, SamplingOptions

TURN = 12  # tokens
REFEREE = "<|im_end|>\n<|im_start|>user\nShorter, please.<|im_end|>\n<|im_start|>assistant\n"


def two_turns(prompts, trainer):
    """Sample a draft, append the referee's request, and sample the final line."""
    tokenizer, backend = trainer.processing_class, trainer.backend
    chats = [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"] for prompt in prompts
    ]
    request = tokenizer(REFEREE)["input_ids"]
    limits = SamplingOptions([TURN] * len(prompts))
    drafts = [draft.token_ids for draft in backend.generate(chats, limits)]
    # The referee's text begins with the end-of-turn token: drop the sampled one.
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
    """Return 1 if the second line is shorter than the first."""
    return [float(value) for value in shortened]


options = example_parser(__doc__, "rollout-function-output").parse_args()
batches = {"per_device_train_batch_size": 8, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
args = GRPOConfig(options.output_dir, max_steps=options.max_steps, learning_rate=1e-5, **batches)
topics = ["rain", "bread", "trains", "snow"]
rows = [{"prompt": [{"role": "user", "content": f"One line about {topic}."}]} for topic in topics]
GRPOTrainer(options.model, obeyed, args, Dataset.from_list(rows), rollout_func=two_turns).train()
