"""A policy of two layers with the tokenizer of SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AddedToken, AutoConfig, AutoTokenizer, LlamaForCausalLM

TURN = "<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
START = 5  # tokens of a turn before its answer


def save_tiny_smollm2(
    source: Path, directory: Path, answers: tuple[str, ...] = (), tokens: tuple[str, ...] = ()
) -> Path:
    """Save model and tokenizer to ``directory``.

    Args:
        source: checkpoint of SmolLM2-135M-Instruct.
        answers: the model is trained to answer every chat with one of them; without any it is random.
        tokens: tokens that the tokenizer gets besides its own.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    tokenizer.save_pretrained(directory)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # sizes that vLLM takes
    torch.manual_seed(0)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(source, vocab_size=len(tokenizer), **sizes, **heads))
    if answers:
        _train(model, [tokenizer(TURN.format(text), return_tensors="pt")["input_ids"] for text in answers])
    model.save_pretrained(directory)
    return directory


def _train(model: LlamaForCausalLM, turns: list[torch.Tensor]) -> None:
    """Learn the turns after chats of random tokens."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(60):
        chat = torch.randint(model.config.vocab_size, (1, 10 + step % 3 * 50))
        losses = []
        for turn in turns:
            answer = turn[:, START:]
            ids = torch.cat([chat, turn], 1)
            logits = model(ids, logits_to_keep=answer.shape[1] + 1).logits[:, :-1]
            losses.append(F.cross_entropy(logits.flatten(0, 1), answer.flatten()))
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
