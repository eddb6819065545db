"""Scripts after TRL's documentation run with either library, and log every key that TRL logs.

Only the name in the import lines differs. The models are tiny and random: the scripts show what is
accepted.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.agent_runs import LETTERS, policy, tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

pytest.importorskip("trl")
pytestmark = pytest.mark.parity

#: Lines that every script begins with.
HEAD = """
import re

from datasets import Dataset
from LIBRARY import GRPOConfig, GRPOTrainer

training_args = dict(
    output_dir=OUTPUT, max_steps=2, per_device_train_batch_size=4, num_generations=4,
    max_completion_length=24,
    logging_steps=1, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no",
    generation_kwargs={"suppress_tokens": SUPPRESSED},
)
texts = [f"Write about {thing}." for thing in ("rain", "tea", "snow", "bread", "cats", "sand", "wind", "ink")]
chats = [[{"role": "user", "content": text}] for text in texts]
"""

SCRIPTS = {
    "quickstart": """
        # A reward that counts letters, on chat prompts.
        def reward_num_unique_letters(completions, **kwargs):
            contents = [completion[0]["content"] for completion in completions]
            return [float(len(set(content))) for content in contents]

        trainer = GRPOTrainer(
            model=MODEL,
            reward_funcs=reward_num_unique_letters,
            args=GRPOConfig(**training_args),
            train_dataset=Dataset.from_dict({"prompt": chats}),
        )
        trainer.train()
        trainer.save_model(OUTPUT)
        """,
    "library rewards on standard prompts": """
        from LIBRARY.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward

        def as_messages(reward):
            def wrapped(completions, **kwargs):
                return reward([[{"role": "assistant", "content": text}] for text in completions], **kwargs)
            wrapped.__name__ = reward.__name__
            return wrapped

        trainer = GRPOTrainer(
            model=MODEL,
            reward_funcs=[
                as_messages(think_format_reward),
                as_messages(accuracy_reward),
                get_soft_overlong_punishment(max_completion_len=24, soft_punish_cache=8),
            ],
            args=GRPOConfig(**training_args),
            train_dataset=Dataset.from_dict({"prompt": texts, "solution": ["$4$"] * len(texts)}),
        )
        trainer.train()
        """,
    "extra columns": """
        # Other columns of the dataset reach the reward; None where a function does not apply.
        def reward_func(completions, completion_ids, ground_truth, log_extra, log_metric, **kwargs):
            matches = [re.search(r"[a-d]", completion) for completion in completions]
            contents = [match.group(0) if match else "" for match in matches]
            log_extra("found", contents)
            log_metric("share_found", sum(map(bool, contents)) / len(contents))
            rows = zip(contents, ground_truth, completion_ids)
            return [1.0 if found == truth else 0.1 * len(ids) for found, truth, ids in rows]

        def math_reward_func(prompts, completions, task, **kwargs):
            return [float("a" in text) if kind == "math" else None for text, kind in zip(completions, task)]

        async def coding_reward_func(prompts, completions, task, **kwargs):
            return [float("b" in text) if kind == "coding" else None for text, kind in zip(completions, task)]

        dataset = Dataset.from_dict(
            {"prompt": texts, "ground_truth": list("abcdabcd"), "task": ["math", "coding"] * 4}
        )
        trainer = GRPOTrainer(
            model=MODEL,
            reward_funcs=[reward_func, math_reward_func, coding_reward_func],
            args=GRPOConfig(**{**training_args, "per_device_train_batch_size": 8}, log_completions=True),
            train_dataset=dataset,
        )
        trainer.train()
        """,
    "weights and a reward model": """
        def reward_len(completions, **kwargs):
            return [-abs(20 - len(completion)) / 20 for completion in completions]

        trainer = GRPOTrainer(
            model=MODEL,
            reward_funcs=[reward_len, REWARD_MODEL],
            args=GRPOConfig(
                **training_args,
                reward_weights=[0.7, 0.3],
                multi_objective_aggregation="normalize_then_sum",
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=Dataset.from_dict({"prompt": texts}),
        )
        trainer.train()
        """,
    "adapter with a reference": """
        from peft import LoraConfig

        trainer = GRPOTrainer(
            model=MODEL,
            reward_funcs=lambda completions, **kwargs: [float(len(c[0]["content"])) for c in completions],
            args=GRPOConfig(**training_args, beta=0.04, learning_rate=1e-4, gradient_accumulation_steps=2),
            train_dataset=Dataset.from_dict({"prompt": chats}),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )
        trainer.train()
        trainer.model.save_pretrained(OUTPUT)
        """,
    "evaluation and callbacks": """
        from transformers import TrainerCallback

        class Printed(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                seen.append(sorted(logs))

        seen = []
        trainer = GRPOTrainer(
            model=MODEL,
            reward_funcs=[lambda completions, **kwargs: [float(len(set(text))) for text in completions]],
            args=GRPOConfig(
                **training_args, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4,
                num_generations_eval=2, loss_type="grpo", importance_sampling_level="sequence",
                epsilon=3e-4, epsilon_high=4e-4, steps_per_generation=2,
            ),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            eval_dataset=Dataset.from_dict({"prompt": texts[:2]}),
            callbacks=[Printed()],
        )
        trainer.train()
        trainer.evaluate()
        """,
    "objectives of the papers": """
        for given in (
            dict(loss_type="dr_grpo", scale_rewards=False, beta=0.0),
            dict(loss_type="dapo", epsilon_high=0.28, mask_truncated_completions=True, num_iterations=2),
            dict(loss_type="cispo", epsilon_high=5.0, scale_rewards="batch", num_iterations=2),
            dict(loss_type="vespo", num_iterations=2, top_entropy_quantile=0.2, use_adaptive_entropy=True),
        ):
            trainer = GRPOTrainer(
                MODEL,
                lambda completions, **kwargs: [float(len(set(text))) for text in completions],
                GRPOConfig(**training_args, **given),
                Dataset.from_dict({"prompt": texts}),
            )
            trainer.train()
            LOGS.append(trainer.state.log_history)
        """,
    "tools": """
        def measure(text: str) -> int:
            \"\"\"Measure a text.

            Args:
                text: The text to measure.

            Returns:
                Its length.
            \"\"\"
            return len(text)

        def tool_reward(completions, **kwargs):
            return [
                sum(turn["role"] == "tool" for turn in completion) + 0.01 * len(completion[-1]["content"])
                for completion in completions
            ]

        trainer = GRPOTrainer(
            model=MODEL,
            reward_funcs=tool_reward,
            args=GRPOConfig(**{**training_args, "max_completion_length": 96}, max_tool_calling_iterations=2),
            train_dataset=Dataset.from_dict({"prompt": chats}),
            processing_class=TOKENIZER,
            tools=[measure],
        )
        trainer.train()
        """,
    "environment": """
        class Tape:
            def reset(self, target: int, **kwargs) -> str | None:
                self.total, self.target = 0, target
                return f" Reach {target}."

            def measure(self, text: str) -> str:
                \"\"\"Measure a text and add its length to the total.

                Args:
                    text: The text to measure.

                Returns:
                    The total.
                \"\"\"
                self.total += len(text)
                return f"total {self.total}"

            def get_reward(self) -> float:
                return -abs(self.target - self.total) / 10

        trainer = GRPOTrainer(
            model=MODEL,
            args=GRPOConfig(**{**training_args, "max_completion_length": 96}, max_tool_calling_iterations=2),
            train_dataset=Dataset.from_dict({"prompt": chats, "target": list(range(8))}),
            processing_class=TOKENIZER,
            environment_factory=Tape,
        )
        trainer.train()
        """,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A policy and a reward model on disk, and the names that the scripts use."""
    folder, text = tmp_path_factory.mktemp("scripts"), tokenizer()
    model = policy(len(text))
    model.config.eos_token_id = model.generation_config.eos_token_id = text.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = text.pad_token_id
    model.save_pretrained(folder / "policy")
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(text), num_labels=1, pad_token_id=text.pad_token_id, **size)
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    allowed = {*text.convert_tokens_to_ids(list(LETTERS)), text.eos_token_id}
    plain = tokenizer()
    plain.response_template = None
    for name in ("policy", "reward"):
        plain.save_pretrained(folder / name)
    return {
        "MODEL": str(folder / "policy"),
        "REWARD_MODEL": str(folder / "reward"),
        "SUPPRESSED": [token for token in range(len(text)) if token not in allowed],
    }


def run(script: str, library: str, directory: Path, names: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run a script and return the logs of its trainers."""
    source = (HEAD + textwrap.dedent(SCRIPTS[script])).replace("LIBRARY", library)
    scope: dict[str, Any] = {
        **names,
        "__name__": "__main__",
        "OUTPUT": str(directory / library),
        "TOKENIZER": tokenizer(),
        "LOGS": [],
    }
    exec(compile(source, f"{script} ({library})", "exec"), scope)
    return scope["LOGS"] or [scope["trainer"].state.log_history]


def keys(log: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Keys of the training logs, the evaluations and the summary."""
    kinds: dict[str, set[str]] = {"train": set(), "eval": set(), "summary": set()}
    for entry in log:
        summary = "train_runtime" in entry
        kind = "summary" if summary else "eval" if any(key.startswith("eval_") for key in entry) else "train"
        kinds[kind] |= entry.keys()
    return kinds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_key_that_trl_logs_is_logged(
    script: str, tmp_path: Path, checkpoints: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = (run(script, library, tmp_path, checkpoints) for library in ("trl", "groupwise"))
    assert len(theirs) == len(ours)
    for their_log, our_log in zip(theirs, ours, strict=True):
        their_keys, our_keys = keys(their_log), keys(our_log)
        assert {"loss", "reward", "entropy"} <= their_keys["train"]
        for kind, wanted in their_keys.items():
            assert wanted - our_keys[kind] == set(), kind
