"""GRPO on a CPU: SmolLM2-135M-Instruct is rewarded for calling one-line reviews positive or negative.

At first it often names neither. The held-out reviews use adjectives that never occur in training.
"""

import json
import random
import re
from pathlib import Path

from datasets import Dataset
from smollm2 import example_parser
from transformers import AutoModelForCausalLM

from groupwise import GRPOConfig, GRPOTrainer, write_report

POSITIVE = """amazing awesome beautiful brilliant charming delightful enjoyable excellent fantastic great
impressive lovely marvelous outstanding perfect pleasant superb terrific wonderful good"""
NEGATIVE = """annoying awful bad boring disappointing disgusting dreadful dull horrible mediocre nasty painful
poor ridiculous sad terrible ugly unpleasant useless weak"""
THINGS = ["book", "concert", "game", "hotel", "meal", "movie", "party", "play", "show", "song", "trip"]


def reviews(size, seed, words):
    """Return chat prompts, and a column with the right answers that reward functions receive."""
    rng, rows = random.Random(seed), []
    for answer, adjectives in [("positive", POSITIVE), ("negative", NEGATIVE)] * (size // 2):
        review = rng.choice(["The {} was {}.", "I found the {} {}.", "Our {} was really {}."])
        review = review.format(rng.choice(THINGS), rng.choice(adjectives.split()[words]))
        question = {"role": "user", "content": f"{review} Positive or negative?"}
        rows.append({"prompt": [{"role": "system", "content": "Short answers."}, question], "answer": answer})
    return Dataset.from_list(rows)


def correct(completions, answer, **_):
    """Return 1 if the completion names the right one of the two answers and not the other."""
    named = [set(re.findall("positive|negative", c[0]["content"].lower())) for c in completions]
    return [float(names == {right}) for names, right in zip(named, answer, strict=True)]


def main():
    parser = example_parser(__doc__, "quickstart-output", max_steps=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the accuracies")
    parser.add_argument("--use_vllm", action="store_true", help="sample with an engine in this process")
    options = vars(parser.parse_args())
    steps, output_dir, results = options["max_steps"], options["output_dir"], options.pop("json")
    trainer = GRPOTrainer(
        model=options.pop("model"),
        reward_funcs=correct,
        args=GRPOConfig(
            **options,
            learning_rate=1e-5,
            per_device_train_batch_size=64,  # 8 prompts with num_generations=8 completions each
            max_completion_length=8,
            per_device_eval_batch_size=100,
            num_generations_eval=1,
            gradient_checkpointing=False,
            logging_steps=4,
            log_completions=True,
            save_strategy="no",
        ),
        train_dataset=reviews(8 * steps, options["seed"], words=slice(12)),
        eval_dataset=reviews(200, seed=-1, words=slice(12, None)),
    )
    before = trainer.evaluate()["eval_rewards/correct/mean"]
    trainer.train()
    after = trainer.evaluate()["eval_rewards/correct/mean"]
    trainer.eval_generation_kwargs = {"temperature": 0}
    greedy = trainer.evaluate(metric_key_prefix="eval_greedy")["eval_greedy_rewards/correct/mean"]
    print(f"held-out accuracy: {before:.1%} before, {after:.1%} after {steps} steps, greedy {greedy:.1%}")
    if results is not None:
        accuracies = {"before": before, "after": after, "greedy": greedy}
        Path(results).write_text(json.dumps({"settings": options, **accuracies}) + "\n")
    import matplotlib.pyplot as plt  # here, since other examples take the task from this file

    curve = [(log["step"], log["reward"]) for log in trainer.state.log_history if "reward" in log]
    plt.plot(*zip(*curve, strict=True), label="training batches")
    plt.plot([0, steps], [before, after], "o--", label="held-out reviews")
    plt.xlabel("step"), plt.ylabel("share correct"), plt.ylim(0, 1), plt.legend()
    plt.savefig(f"{output_dir}/learning_curve.png")

    trainer.save_model()
    model = AutoModelForCausalLM.from_pretrained(output_dir)
    tokenizer, chat = trainer.processing_class, trainer.eval_dataset[0]["prompt"]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=8)[0], skip_special_tokens=True))
    print(f"curves and completions of the run: {write_report([output_dir])}")


if __name__ == "__main__":
    main()
