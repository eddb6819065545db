"""One accumulation window with given completions, shared by the benchmarks of the training phase.

A measurement is a process of its own: this module describes what it is given and makes it there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from generate import skewed_lengths

PAD, EOS, FIRST_WORD = 0, 1, 2
#: Mean of an exponential distribution in units of the limit; cut off at the limit, its mean is 0.5.
HALF_OF_THE_LIMIT = 0.63


@dataclass(frozen=True)
class Spec:
    """Model and sizes of the work.

    model: "smollm2", or "random:<layers>,<hidden>,<heads>,<kv_heads>,<intermediate>,<vocab>".
    tied: the random model's output layer is its embedding.
    lora: train adapters of rank 16 on all linear layers.
    dtype: of the weights.
    precision: "bf16" casts to bfloat16 for matrix products; with "float32" nothing is cast.
    groups: prompts of a micro-batch; each has `group_size` completions.
    accumulation: micro-batches of a window.
    prompt_tokens, completion_tokens: the longest of either.
    windows: timed ones; one more comes first, as a warm-up.
    """

    model: str = "smollm2"
    tied: bool = False
    lora: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    precision: str = "bf16"
    groups: int = 1
    group_size: int = 8
    accumulation: int = 2
    prompt_tokens: int = 256
    completion_tokens: int = 256
    windows: int = 2

    @property
    def rows(self) -> int:
        return self.groups * self.group_size


@dataclass(frozen=True)
class Work:
    """Token ids of a window.

    prompts: by group.
    completions: by group and sample.
    """

    prompts: list[list[int]]
    completions: list[list[list[int]]]

    @cached_property
    def tokens(self) -> int:
        """Count prompt and completion tokens of all rows."""
        groups = zip(self.prompts, self.completions, strict=True)
        return sum(len(prompt) * len(rows) + sum(map(len, rows)) for prompt, rows in groups)

    @cached_property
    def distinct_tokens(self) -> int:
        """Count tokens with each prompt once: the minimum a model must compute."""
        return sum(map(len, self.prompts)) + sum(len(row) for rows in self.completions for row in rows)

    def texts(self) -> list[str]:
        """Return prompts as text that `random_tokenizer` maps back to their ids."""
        return [" ".join(f"w{token}" for token in prompt) for prompt in self.prompts]

    def rollout(self, texts: list[str], trainer: Any) -> dict[str, Any]:
        """Create a ``rollout_func`` for both libraries."""
        known = {text: group for group, text in enumerate(self.texts())}
        seen = [0] * len(known)
        result: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        for text in texts:
            group = known[text]
            rows = self.completions[group]
            result["prompt_ids"].append(self.prompts[group])
            result["completion_ids"].append(rows[seen[group] % len(rows)])
            seen[group] += 1
        return result


def make_work(spec: Spec, vocabulary: int) -> Work:
    """Make prompts of half to all of the longest length, and shuffled completions of skewed lengths."""
    shuffled = random.Random(0)
    count = spec.groups * spec.accumulation
    lengths = skewed_lengths(count * spec.group_size, spec.completion_tokens, HALF_OF_THE_LIMIT)
    shuffled.shuffle(lengths)

    def words(length: int) -> list[int]:
        return [shuffled.randrange(FIRST_WORD, vocabulary) for _ in range(length)]

    prompts = [
        words(spec.prompt_tokens - spec.prompt_tokens * group // (2 * count)) for group in range(count)
    ]
    rows = iter([words(length) for length in lengths])
    return Work(prompts, [[next(rows) for _ in range(spec.group_size)] for _ in prompts])


def make_model(spec: Spec) -> Any:
    """Load the policy on its device, without adapters."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    dtype = getattr(torch, spec.dtype)
    if spec.model == "smollm2":
        from smollm2 import local_model

        return AutoModelForCausalLM.from_pretrained(local_model(), dtype=dtype).to(spec.device)
    kind, _, numbers = spec.model.partition(":")
    fields = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    names = (*fields, "intermediate_size", "vocab_size")
    values = numbers.split(",")
    if kind != "random" or len(values) != len(names):
        raise SystemExit(
            f"--model is smollm2 or random:<{'>,<'.join(names)}>, given {spec.model!r}; "
            "for example random:2,64,4,2,128,512"
        )
    config = LlamaConfig(
        **dict(zip(names, map(int, values), strict=True)),
        max_position_embeddings=32768,
        tie_word_embeddings=spec.tied,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    torch.manual_seed(0)
    with torch.device(spec.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def make_tokenizer(spec: Spec, vocabulary: int) -> Any:
    """Return the model's tokenizer, or one with a word per token for a random model."""
    if spec.model == "smollm2":
        from smollm2 import local_model
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(local_model(), padding_side="left")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(FIRST_WORD, vocabulary)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def adapter_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def alternating_reward(completions: list[Any], **_: Any) -> list[float]:
    """Return rewards with variance in every group, so that no row is skipped."""
    return [float(index % 2) for index in range(len(completions))]


def make_trainer(
    library: str, spec: Spec, directory: str, wrap: Any = None, model: Any = None, **settings: Any
) -> Any:
    """Create a trainer of either library on `make_work`.

    Args:
        library: "groupwise" or "trl".
        wrap: makes the trainer class from the library's.
        model: one on the device of ``spec`` instead of that which ``spec`` describes.
        settings: further configuration fields; ``sampled`` leaves the completions to the model.
    """
    if library == "trl":
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    else:
        from groupwise import GRPOConfig, GRPOTrainer
    sampled = settings.pop("sampled", False)
    model = make_model(spec) if model is None else model
    work = make_work(spec, model.config.vocab_size)
    rows = [{"prompt": text} for text in work.texts()]  # no library but TRL needs `datasets`
    trainer_class: Any = GRPOTrainer if wrap is None else wrap(GRPOTrainer)
    config = GRPOConfig(
        output_dir=directory,
        **{
            "per_device_train_batch_size": spec.rows,
            "gradient_accumulation_steps": spec.accumulation,
            "num_generations": spec.group_size,
            "max_completion_length": spec.completion_tokens,
            "max_steps": spec.windows + 1,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "optim": "sgd",  # states of Adam would hide the memory of a window
            "learning_rate": 1e-6,
            "max_grad_norm": 0.0,
            "bf16": spec.precision == "bf16",
            "use_cpu": spec.device == "cpu",
            "shuffle_dataset": False,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **settings,
        },
    )
    return trainer_class(
        model=model,
        reward_funcs=alternating_reward,
        args=config,
        train_dataset=Dataset.from_list(rows) if library == "trl" else rows,
        processing_class=make_tokenizer(spec, model.config.vocab_size),
        rollout_func=None if sampled else work.rollout,
        peft_config=adapter_config() if spec.lora else None,
    )
