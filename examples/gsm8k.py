"""GSM8K with Qwen2.5-0.5B-Instruct: a known recipe on a known model, from a local copy of the data.

``--data`` is a folder with train.jsonl and test.jsonl (columns ``question`` and ``answer``, which ends in
"#### 42"): the files of github.com/openai/grade-school-math. On one GPU:

    python examples/gsm8k.py --model Qwen/Qwen2.5-0.5B-Instruct --data grade_school_math/data --use_vllm

232 steps of 64 questions are two passes. docs/learning.md has what others report for this model and data.
"""

import re

from datasets import load_dataset
from smollm2 import example_parser

from groupwise import GRPOConfig, GRPOTrainer

INSTRUCTION = 'Reason step by step. End with "####" and the final number.'
GENERATIONS, ROWS = 8, 32  # completions per question, and per micro-batch


def final_answer(text):
    """Return the number after the last "####" without its thousands separators; None without one."""
    found = re.findall(r"####\s*\$?(-?[\d,]*\.?\d+)", text)
    return found[-1].replace(",", "") if found else None


def correct(completions, solution, log_extra, **_):
    """Return 1 for the right number after "####", else 0."""
    found = [final_answer(completion[0]["content"]) for completion in completions]
    log_extra("answer_parsed", found)
    pairs = zip(found, solution, strict=True)
    return [float(number is not None and float(number) == float(right)) for number, right in pairs]


def chat(row):
    """Return the prompt, and the right number as ``solution``."""
    question = {"role": "user", "content": f"{row['question']} {INSTRUCTION}"}
    return {"prompt": [question], "solution": final_answer(row["answer"])}


def main():
    parser = example_parser(__doc__, "gsm8k-output", max_steps=232)
    parser.add_argument("--data", required=True)
    parser.add_argument("--questions_per_step", type=int, default=64)
    parser.add_argument("--max_completion_length", type=int, default=512)
    parser.add_argument("--use_vllm", action="store_true")
    options = parser.parse_args()
    files = {split: f"{options.data}/{split}.jsonl" for split in ("train", "test")}
    data = load_dataset("json", data_files=files).map(chat, remove_columns=["question", "answer"])
    rows = options.questions_per_step * GENERATIONS
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=correct,
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            use_vllm=options.use_vllm,
            learning_rate=1e-6,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            num_generations=GENERATIONS,
            per_device_train_batch_size=min(ROWS, rows),
            gradient_accumulation_steps=max(rows // ROWS, 1),
            max_completion_length=options.max_completion_length,
            per_device_eval_batch_size=128,
            num_generations_eval=1,
            eval_generation_kwargs={"temperature": 0},  # greedy, as published scores
            eval_pass_at_k=[1],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    before = trainer.evaluate()["eval_pass@1"]
    trainer.train()
    after = trainer.evaluate()
    low, high = after["eval_pass@1_gain_low"], after["eval_pass@1_gain_high"]
    print(f"test accuracy: {before:.1%} before, {after['eval_pass@1']:.1%} after {options.max_steps} steps")
    print(f"95 % interval of the gain over questions: {low:+.1%} to {high:+.1%}")


if __name__ == "__main__":
    main()
