"""A tiny policy, a tokenizer made on the spot, and short runs with them."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from groupwise import GRPOConfig, GRPOTrainer
from groupwise.data.budget import MicroBatchBudget
from groupwise.records import Experience, LogprobOutput, LossOutput, MicroBatch, RolloutBatch

WORDS = [f"w{i}" for i in range(28)]
CHAT = (
    "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """32 words; ids 0 and 1 are padding and end."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<user>", "<assistant>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Sequence([decoders.Replace("w", " w")])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        chat_template=CHAT,
    )


def policy(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A two-layer Llama with random weights over those 32 words."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "max_position_embeddings": 128,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))


def prompts(count: int = 8) -> Dataset:
    """Prompts of one to four words, and a column for the rewards."""
    texts = [" ".join(WORDS[i : i + 1 + i % 4]) for i in range(count)]
    return Dataset.from_dict({"prompt": texts, "row": list(range(count))})


def chats(count: int = 8) -> Dataset:
    return prompts(count).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


def count_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Number of tokens with an even id: varies within groups."""
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]


def trainer(
    directory: Path | str, rewards: Any = count_reward, kind: type[GRPOTrainer] = GRPOTrainer, **given: Any
) -> GRPOTrainer:
    """A trainer for the tiny policy; ``given`` holds configuration fields and trainer arguments."""
    arguments = {
        name: given.pop(name)
        for name in (
            *("peft_config", "rollout_func", "callbacks", "reward_processing_classes", "optimizers"),
            *("tools", "environment_factory", "backend", "compute_metrics", "curriculum"),
        )
        if name in given
    }
    model = given.pop("model", None)
    train_dataset, eval_dataset = given.pop("train_dataset", prompts()), given.pop("eval_dataset", None)
    processing_class = given.pop("processing_class", None) or tokenizer()
    settings = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return kind(
        policy() if model is None else model,
        rewards,
        GRPOConfig(str(directory), **{**settings, **given}),
        train_dataset,
        eval_dataset,
        processing_class,
        **arguments,
    )


def answered_before_updates(run: GRPOTrainer) -> GRPOTrainer:
    """The run, whose updates begin once the server has sampled what was requested ahead.

    A server may be late at any time, and then samples with newer weights.
    """
    futures: list[Future[Any]] = []
    prefetch = run.backend.prefetch

    def requested(*given: Any, **step: Any) -> list[Future[Any]]:
        futures.extend(found := prefetch(*given, **step))
        return found

    class Wait(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            wait(futures)

    run.backend.prefetch = requested
    run.callback_handler.callbacks.insert(0, Wait())
    return run


def generate(run: GRPOTrainer, rows: list[dict[str, Any]]) -> RolloutBatch:
    """Rollouts of these rows, the completions of a prompt next to each other."""
    return run.generate_rollouts(run.make_request(rows))


def experience(run: GRPOTrainer, rows: list[dict[str, Any]]) -> list[Experience]:
    """Experience of a generation batch of these rows, by micro-batch."""
    rollouts, rewards = run.sample(run.make_request(rows))
    on_policy = run.args.micro_batches_per_generation <= run.args.gradient_accumulation_steps
    size = run.args.per_device_train_batch_size
    return run.make_experience(rollouts, rewards, size, on_policy=on_policy)


def weighed(run: GRPOTrainer, window: list[Experience]) -> list[MicroBatch]:
    """Micro-batches of an accumulation window, with token weights."""
    return run.set_token_weights(window, run.compute_entropy_masks(window))


class TermOfEveryRow(GRPOTrainer):
    """A loss with the mean log-prob of the completions: every row has a gradient, also one without loss."""

    def compute_policy_loss(self, batch: MicroBatch, logprobs: LogprobOutput) -> LossOutput:
        return add_term(super().compute_policy_loss(batch, logprobs), batch, logprobs.logps_BT)


class TermOfTrainedRows(GRPOTrainer):
    """The same mean over the loss tokens with an advantage: the other rows have no gradient."""

    zero_grad_at_zero_advantage = True

    def compute_policy_loss(self, batch: MicroBatch, logprobs: LogprobOutput) -> LossOutput:
        logps_BT = logprobs.logps_BT * batch.loss_mask_BT * (batch.advantages_BX != 0)
        return add_term(super().compute_policy_loss(batch, logprobs), batch, logps_BT)


def add_term(output: LossOutput, batch: MicroBatch, logps_BT: torch.Tensor) -> LossOutput:
    """Add 0.1 times the mean over the rows of the window of the summed log-probs."""
    sums_B1 = (logps_BT * batch.completion_mask_BT).sum(-1, keepdim=True)
    return replace(output, loss=output.loss + 0.1 * (sums_B1 * batch.sequence_weight_B1).sum())


def with_all_rows(kind: type[GRPOTrainer]) -> type[GRPOTrainer]:
    """The same trainer without rebalancing: every row is computed where and when it was sampled."""

    class AllRows(kind):  # type: ignore[valid-type, misc]
        @property
        def micro_batch_budget(self) -> MicroBatchBudget:
            return replace(super().micro_batch_budget, fixed=True)

    return AllRows
