"""Process of a launch, and the runs, which the tests repeat in one process.

    torchrun --nproc_per_node 2 worker.py updates OUTPUT_DIR
    torchrun --nproc_per_node 2 worker.py iterative OUTPUT_DIR
    accelerate launch --multi_gpu --num_processes 2 worker.py train OUTPUT_DIR
    accelerate launch --multi_gpu --num_processes 2 worker.py resume OUTPUT_DIR SINGLE_PROCESS_CHECKPOINT

The first process leaves its results in OUTPUT_DIR.
"""

from __future__ import annotations

import faulthandler
import fcntl
import itertools
import json
import math
import os
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from groupwise.config.grpo_config import GRPOConfig
from groupwise.errors import ConfigError, RewardError
from groupwise.records import RewardBatch, RolloutBatch
from groupwise.rewards import ProcessRewardModel, get_distillation_reward
from groupwise.trainer import GRPOTrainer
from support.architectures import LINEAR, SIZES
from support.iterative_runs import reward_model
from support.iterative_runs import runner as iterative_runner
from support.process_rewards import step_classifier
from support.runs import TermOfEveryRow, TermOfTrainedRows

#: A process that hangs says where, before the test gives up on it.
PATIENCE = 240
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "
_END = 1
OBJECTIVES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


class EqualLengths(GRPOTrainer):
    """Computes rows of equal lengths together, as for a model whose rows depend on padding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logprob_computer.layout, self.logprob_computer.checked = "equal_length", True


class NotesSources(GRPOTrainer):
    """Keeps the sources of this process's rows of each generation."""

    def compute_rewards(self, rollouts: RolloutBatch) -> RewardBatch:
        sources = [row["source"] for row in rollouts.rows]
        self.noted_sources = [*getattr(self, "noted_sources", []), sources]
        return super().compute_rewards(rollouts)


# Two processes with 6 rows each, groups of 4: the second group has rows on both.
UPDATES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in OBJECTIVES},
    **{f"{name}, accumulation": {"loss_type": name, "accumulate": 2} for name in OBJECTIVES},
    "sequence level": {"importance_sampling_level": "sequence"},
    "reference": {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "kl in reward": {"beta": 0.5, "kl_in_reward": True},
    "entropy quantile": {"top_entropy_quantile": 0.4, "accumulate": 2},
    "entropy bonus": {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 5.0},
    "batch scale": {"scale_rewards": "batch"},
    "normalize then sum": {"multi_objective_aggregation": "normalize_then_sum"},
    "distillation": {"distilled": True, "advantage_baseline": "per_token"},
    "leave one out": {"advantage_baseline": "leave_one_out"},
    "truncated masked": {"mask_truncated_completions": True},
    "token correction": {"sampler": True, "vllm_importance_sampling_mode": "token_truncate"},
    "sequence correction": {"sampler": True, "vllm_importance_sampling_mode": "sequence_mask"},
    "vespo correction": {"sampler": True, "loss_type": "vespo"},
    # Of every three groups only the last has variance: the first process has no row with a gradient.
    "idle process": {"sparse": True, "shuffle_dataset": False},
    "idle process, accumulation": {"sparse": True, "shuffle_dataset": False, "accumulate": 2},
    "padded": {"sparse": True, "sequence_layout": "padded"},
    "packed": {"sparse": True, "sequence_layout": "packed", "accumulate": 2},
    "forked": {"sparse": True, "sequence_layout": "forked", "accumulate": 2},
    # Ranks run different numbers of forward passes.
    "unused parameters": {"make_model": "with_unused_parameters", "sparse": True},
    "equal lengths": {"kind": EqualLengths, "sparse": True, "accumulate": 2},
    "forked, all groups": {"sequence_layout": "forked", "scale_rewards": "none"},
    # Prompts 0, 1 and 7 have no variance: two rounds for the first batch, and a group left for the second.
    "dynamic sampling": {"planted": True, "shuffle_dataset": False, "dynamic_sampling": True},
    "dynamic sampling, too few rounds": {
        "planted": True,
        "dynamic_sampling": True,
        "dynamic_sampling_max_rounds": 1,
        "data_seed": 2,
    },
    "dynamic sampling of a stream": {"planted": True, "dynamic_sampling": True, "stream": True},
    "stream": {"stream": True},
    "mixture": {"mixed": True, "dataset_weights": {"odd": 1, "even": 3}},
    # Steps of a group are on both processes, and their numbers differ.
    "process reward model": {"process": True, "scale_rewards": "group"},
    "process reward model, accumulation": {"process": True, "accumulate": 2, "sequence_layout": "packed"},
    # A loss of a subclass, summed with the share of each row.
    "term of every row": {"kind": TermOfEveryRow, "mask_truncated_completions": True},
    "term of trained rows": {"kind": TermOfTrainedRows, "sparse": True, "mask_truncated_completions": True},
    "off-policy mask": {"sampler": True, "off_policy_mask_threshold": 0.02},
    # Rollouts of 1 to 3 rows that do not continue each other; a rank has more rows than the other.
    "several rows": {"several": True, "accumulate": 2, "loss_type": "grpo"},
    "several rows, credit by row": {
        "several": True,
        "accumulate": 2,
        "loss_type": "grpo",
        "rollout_credit": "row",
    },
    "several rows, credit by row, luspo": {"several": True, "loss_type": "luspo", "rollout_credit": "row"},
    "several rows, padded": {"several": True, "sequence_layout": "padded", "beta": 0.5, "kl_in_reward": True},
    "several rows, dynamic sampling": {
        "several": True,
        "planted": True,
        "dynamic_sampling": True,
        "sampler": True,
        "importance_sampling_level": "sequence",
    },
}


#: Rewards vary in the first generation alone, which two steps train on: the window of the third is empty.
EMPTY_WINDOWS: dict[str, Any] = {"optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 1e-2}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", "<unk>", *LETTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )


def policy(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(LETTERS) + 3,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=0,
            eos_token_id=_END,
            bos_token_id=None,
        )
    )


def with_unused_parameters() -> LlamaForCausalLM:
    """A model with parameters that no log-prob depends on, as an indexer of keys."""
    model = policy()
    model.model.layers[0].indexer = torch.nn.Linear(4, 4)
    return model


def gated_delta_net() -> Qwen3_5ForCausalLM:
    """Two layers of linear attention and one of full attention."""
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **LINEAR, initializer_range=0.08))


def mixture() -> Qwen3MoeForCausalLM:
    """Four experts in each layer, two of which a token uses."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, initializer_range=0.08))


def prompts(count: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"say {'x' * (i % 4)}{i}" for i in range(count)]})


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def sparse_vowels(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Zero for two of every three prompts."""
    numbers = [int("".join(letter for letter in prompt if letter.isdigit())) for prompt in prompts]
    counts = vowels(completions)
    return [count * (number % 3 == 2) for count, number in zip(counts, numbers, strict=True)]


def planted_vowels(prompts: list[str], completions: list[str], completion_ids: Any, **_: Any) -> list[float]:
    """The same for all completions of some prompts."""
    numbers = [int(prompt.split("x")[-1].split()[-1]) for prompt in prompts]
    draws = [random.Random(str(ids)).random() for ids in completion_ids]
    return [draw * (number not in (0, 1, 7)) for draw, number in zip(draws, numbers, strict=True)]


def vowels_at_first() -> Any:
    """Vowels in the first generation, the same for all completions later."""
    calls = itertools.count()

    def reward(completions: list[str], **_: Any) -> list[float]:
        return vowels(completions) if next(calls) == 0 else [1.0] * len(completions)

    return reward


def digits_if_any(completions: list[str], **_: Any) -> list[float | None]:
    """No opinion on completions without a digit."""
    counts = [sum(letter.isdigit() for letter in text) for text in completions]
    return [float(count) if count else None for count in counts]


def fails_on_second(completions: list[str], **_: Any) -> list[float]:
    if torch.distributed.get_rank() == 1:
        raise KeyError("answer")
    return vowels(completions)


def make_trainer(
    output_dir: str | Path, kind: type[GRPOTrainer] | None = None, make_model: Any = None, **settings: Any
) -> GRPOTrainer:
    given = {
        "reward_funcs": vowels,
        "train_dataset": prompts(24),
        "eval_dataset": prompts(5),
        "rollout_func": None,
        "peft_config": None,
        "reward_processing_classes": None,
        "compute_metrics": None,
    }
    given.update({name: settings.pop(name) for name in list(given) if name in settings})
    defaults: dict[str, Any] = {
        "output_dir": str(output_dir),
        "max_completion_length": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    kind = kind or GRPOTrainer  # looked up at each call: a worker replaces it
    return kind(
        model=(globals()[make_model] if isinstance(make_model, str) else make_model or policy)(),
        args=GRPOConfig(**{**defaults, **settings}),
        processing_class=tokenizer(),
        **given,
    )


def fixed_rollouts(sampler: bool, several: bool = False) -> Any:
    """Completions that depend only on the generation and on the row's place in the global batch.

    Args:
        several: every third rollout has a row more, after a prompt of its own, and every third two.
    """
    calls = 0

    def rollout(texts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        first = trainer.accelerator.process_index * len(texts)
        prompt_ids = [trainer.processing_class(text)["input_ids"] for text in texts]
        completions, logps = [], []
        for row in range(first, first + len(texts)):
            draw = random.Random(1000 * calls + row)
            length = draw.randint(2, 8)
            tokens = [draw.randrange(3, len(LETTERS) + 3) for _ in range(length)]
            if length < 8:
                tokens[-1] = _END
            completions.append(tokens)
            # About what a random model gives each token, log(1/40), and a little off.
            logps.append([-math.log(40) + draw.uniform(-0.3, 0.3) for _ in tokens])
        output = {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logps}
        if several:
            numbers = [row for row in range(first, first + len(texts)) for _ in range(1 + row % 3)]
            source = [number - first for number in numbers]
            output = {key: [values[row] for row in source] for key, values in output.items()}
            begins = [i == 0 or numbers[i - 1] != number for i, number in enumerate(numbers)]
            contexts = [
                ids if begins[i] else [4 + i % 3, *ids[1:]] for i, ids in enumerate(output["prompt_ids"])
            ]
            output = {**output, "prompt_ids": contexts, "rollout_ids": numbers}
        return output if sampler else {key: values for key, values in output.items() if key != "logprobs"}

    return rollout


def update(output_dir: str | Path, *, rows: int, micro_batches: int, **case: Any) -> dict[str, torch.Tensor]:
    """Weights after three optimizer steps on fixed completions, two of them on one generation.

    Args:
        rows: per micro-batch and process.
        micro_batches: per optimizer step and process; a generation is one such window.
        case: ``read_weights`` maps the trainer to what is returned.
    """
    case.pop("accumulate", None)
    read_weights = case.pop("read_weights", None)
    rewards: list[Any] = [sparse_vowels] if case.pop("sparse", False) else [vowels, digits_if_any]
    rewards = [planted_vowels] if case.pop("planted", False) else rewards
    rewards = [case.pop("reward")] if "reward" in case else rewards
    if case.pop("distilled", False):
        rewards = [vowels, get_distillation_reward(policy(seed=1))]
    is_process = case.pop("process", False)
    if is_process:
        rewards = [ProcessRewardModel(step_classifier(vocab_size=len(LETTERS) + 3), step_separator="e")]
    sampler, several = case.pop("sampler", False), case.pop("several", False)
    rows_of_data: Any = prompts(24).to_iterable_dataset(2) if case.pop("stream", False) else prompts(24)
    if case.pop("mixed", False):
        rows_of_data = {"odd": [*prompts(24)][1::2], "even": [*prompts(24)][::2]}
        rewards = {"odd": [vowels, digits_if_any], "even": vowels}  # type: ignore[assignment]
    trainer = make_trainer(
        output_dir,
        rollout_func=fixed_rollouts(sampler, several),
        rollout_func_importance_sampling_correction=sampler,
        reward_funcs=rewards,
        reward_processing_classes=tokenizer() if is_process else None,
        train_dataset=rows_of_data,
        eval_dataset=None,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=micro_batches,
        steps_per_generation=micro_batches,
        num_generations=4,
        num_iterations=2,
        lr_scheduler_type="constant",
        **{"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "max_steps": 3, **case},
    )
    trainer.train()
    if read_weights is not None:
        return read_weights(trainer)
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def logs_by_source(output_dir: str | Path, micro_batches: int) -> Any:
    """Logs of three steps on a mixture, and the sources of this process's rows of each generation."""
    return update(
        output_dir,
        rows=6,
        micro_batches=micro_batches,
        kind=NotesSources,
        mixed=True,
        dataset_weights={"odd": 1, "even": 1},
        seed=19,
        read_weights=lambda trainer: (trainer.state.log_history, trainer.noted_sources),
    )


def _by_prompt(texts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """As many vowels as the number of the prompt says, and one more in the second completion of a group."""
    prompt_ids = [trainer.processing_class(text)["input_ids"] for text in texts]
    first = trainer.accelerator.process_index * len(texts)
    numbers = [int(text.split("x")[-1].split()[-1]) for text in texts]
    answers = ["a" * (1 + number + (first + i) % 2) for i, number in enumerate(numbers)]
    completion_ids = [[*trainer.processing_class(answer)["input_ids"], _END] for answer in answers]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids}


class StreamOfFirstProcess(torch.utils.data.IterableDataset):
    """Prompts without end that other processes must not read."""

    def __iter__(self) -> Any:
        assert not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        return iter(prompts(99))


def evaluate(output_dir: str | Path, rows: int, **settings: Any) -> dict[str, float]:
    """Metrics of 5 prompts with 2 completions each, ``rows`` of them per batch and process."""
    trainer = make_trainer(
        output_dir,
        **settings,
        rollout_func=_by_prompt,
        num_generations_eval=2,
        per_device_eval_batch_size=rows,
        eval_pass_at_k=[1, 2],
        eval_pass_threshold=2.5,
        metrics_by="prompt",
        loss_type="dr_grpo",  # its normaliser does not depend on how rows are put into batches
        compute_metrics=lambda prediction: {"in_order": zlib.crc32(str(prediction.predictions).encode())},
    )
    return trainer.evaluate()


def sampled_run(output_dir: str | Path, **settings: Any) -> tuple[GRPOTrainer, list[list[str]]]:
    """A run that samples and whose processes log different metrics; also what this process sampled."""
    seen: list[list[str]] = []

    def reward(completions: list[str], log_metric: Any, trainer_state: Any, **_: Any) -> list[float]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if not (seen and len(completions) == 3):  # 3 rows is an evaluation
            seen.append(completions)
        if rank == 1:
            log_metric("only_second", 2.0)
        log_metric(f"of_rank_{rank}", float(rank))
        torch.manual_seed(7)  # the ranks still sample different completions
        return [vowels([text])[0] + random.random() for text in completions]

    defaults = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "num_generations": 2,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "learning_rate": 1e-2,
        "log_completions": True,
    }
    trainer = make_trainer(output_dir, reward_funcs=reward, **{**defaults, **settings})
    return trainer, seen


def _leave(output_dir: Path, name: str, trainer: GRPOTrainer) -> None:
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), output_dir / f"{name}.pt")
        (output_dir / f"{name}.json").write_text(json.dumps(trainer.state.log_history))


def _iterate(output_dir: Path) -> None:
    """Iterations with a reward model whose dropout differs by process; and again from its first update on."""
    for name in ("whole", "resumed"):
        run = iterative_runner(output_dir / "run", judge=reward_model(attention_dropout=0.5))
        rank = torch.distributed.get_rank()  # initialised by the first trainer
        if name == "whole":
            run.train()
        else:
            run.train(str(output_dir / "run" / "checkpoint-1"))
        found = {
            **{f"policy.{key}": value for key, value in run.trainer.model.state_dict().items()},
            **{f"reference.{key}": value for key, value in run.trainer.ref_model.state_dict().items()},
            **{f"reward.{key}": value for key, value in run.scorer.model.state_dict().items()},
        }
        examples = [list(example) for example in run.history]
        torch.save({"weights": found, "examples": examples}, output_dir / f"{name}_{rank}.pt")


@contextmanager
def _locked(directory: Path, rank: int) -> Iterator[None]:
    """The directory as another run holds it."""
    with open(directory / "_run.lock" if rank == 0 else os.devnull, "w") as file:
        if rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        torch.distributed.barrier()
        yield
        torch.distributed.barrier()


def main(mode: str, output_dir: Path, *arguments: str) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    if mode == "updates":
        results = {}
        for name, case in UPDATES.items():
            window = case.get("accumulate", 1)
            results[name] = update(output_dir / "run", rows=6, micro_batches=window, **case)
        for skips in (True, False):
            results[f"skip_zero_advantage={skips}"] = update(
                output_dir / "run",
                rows=6,
                micro_batches=2,
                skip_zero_advantage=skips,
                reward=vowels_at_first(),
                **EMPTY_WINDOWS,
            )
        logs, sources = logs_by_source(output_dir / "run", micro_batches=2)
        results["by source"] = {"logs": logs, "sources": gather_object([sources])}
        if torch.distributed.get_rank() == 0:
            torch.save(results, output_dir / "updates.pt")
    elif mode == "train":
        trainer, seen = sampled_run(output_dir / "run")
        trainer.train()
        _leave(output_dir, "whole", trainer)
        (output_dir / f"seen_{torch.distributed.get_rank()}.json").write_text(json.dumps(seen))
        streamed = {"eval_dataset": StreamOfFirstProcess(), "eval_max_samples": 5}
        for name, given in {"evaluation": {}, "evaluation_of_stream": streamed}.items():
            metrics = evaluate(output_dir / name, rows=3, **given)
            if torch.distributed.get_rank() == 0:
                (output_dir / f"{name}.json").write_text(json.dumps(metrics))
        failing = make_trainer(
            output_dir / "failing",
            reward_funcs=fails_on_second,
            per_device_train_batch_size=4,
            num_generations=2,
            max_steps=1,
        )
        try:
            failing.train()
        except RewardError as error:
            (output_dir / f"reward_error_{torch.distributed.get_rank()}.txt").write_text(str(error))
    elif mode == "resume":
        (single,) = arguments
        trainer, _ = sampled_run(output_dir / "resumed")
        rank = torch.distributed.get_rank()
        for name, lock in (("locked", _locked(output_dir / "resumed", rank)), ("refused", nullcontext())):
            with lock:
                try:
                    trainer.train(resume_from_checkpoint=single)
                except ConfigError as error:
                    (output_dir / f"{name}_{rank}.txt").write_text(str(error))
        trainer, _ = sampled_run(output_dir / "resumed")
        trainer.train(resume_from_checkpoint=str(output_dir / "run" / "checkpoint-3"))
        _leave(output_dir, "resumed", trainer)
    elif mode == "iterative":
        _iterate(output_dir)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
