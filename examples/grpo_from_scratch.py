"""GRPO from scratch: the whole algorithm in one file, on groupwise's equations and plain PyTorch.

It learns the quickstart's task without ``GRPOTrainer``; ``GRPOConfig`` only holds the settings.
Axes: P prompts, G completions per prompt, B = P * G sequences of a generation, M of a mini-batch, L prompt
tokens, T completion tokens, V vocabulary.

Differences from the paper (DeepSeekMath, arXiv 2402.03300, algorithm 1), all of them groupwise's defaults:

1. No reference model and no KL term (beta = 0).
2. The loss is a mean over tokens (DAPO, arXiv 2503.14476, eq. 8); the paper first takes each sequence's mean.
"""

import time

import torch
from quickstart import correct, reviews
from smollm2 import example_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise import GRPOConfig
from groupwise.core.advantages import AdvantageSettings, normalized_advantages
from groupwise.core.surrogates import SurrogateInputs, SurrogateSettings, clipped
from groupwise.core.weights import WeightInputs, WindowCounts, token_mean
from groupwise.records import GroupRewards


@torch.no_grad()
def generate(model, tokenizer, chats, args):
    """Sample one completion per chat. Return ids and attention mask (B, L + T), and the loss mask (B, T)."""
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    ).to(args.device)
    with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
        ids = model.generate(  # (B, L + T): prompts padded on the left, completions on the right
            **prompts,
            max_new_tokens=args.max_completion_length,
            do_sample=True,
            **{"temperature": 1.0, "top_p": 1.0, "top_k": 0},  # no truncation: log-probs are the sampler's
        )
    completion_ids = ids[:, prompts["input_ids"].shape[1] :]  # (B, T)
    # A token counts up to and including the first end token: no end token stands before it.
    is_end = (completion_ids == tokenizer.eos_token_id).long()
    mask = (is_end.cumsum(-1) - is_end == 0).long()  # (B, T)
    return ids, torch.cat([prompts["attention_mask"], mask], dim=1), mask


def compute_rewards(tokenizer, ids, mask, answers):
    """Return one reward per completion, (B,) float32: 1 for the right answer, else 0."""
    texts = tokenizer.batch_decode(ids[:, -mask.shape[1] :], skip_special_tokens=True)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return torch.tensor(correct(completions, answers))


def compute_logprobs(model, ids, attention_mask, width, args):
    """Return the log-prob of each of the last ``width`` tokens under the model, (B, T) float32."""
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # (B, L + T), starts at 0 after the padding
    with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
        inputs = {"input_ids": ids, "attention_mask": attention_mask, "position_ids": positions}
        # The logits that predict a token are those of the position before it: keep T + 1, drop the last.
        logits = model(**inputs, logits_to_keep=width + 1).logits[:, :-1]  # (B, T, V)
    logps = logits.float().log_softmax(-1)
    return logps.gather(-1, ids[:, -width:, None]).squeeze(-1)  # (B, T)


def policy_loss(logps, old_logps, advantages, mask, args):
    """Return the clipped loss of a mini-batch, a scalar: sum over tokens of weight * surrogate."""
    log_ratio = (logps - old_logps) * mask  # (M, T), 0 on padding, so that exp() stays finite
    inputs = SurrogateInputs(
        logps_BT=logps,
        old_logps_BT=old_logps,
        log_ratio_BT=log_ratio,
        ratio_BX=log_ratio.exp(),  # 1 in the first mini-batch: the policy has not changed since sampling
        advantages_BX=advantages[:, None],  # (M, 1): every token of a completion has its advantage
        loss_mask_BT=mask,
        group_ids_B=torch.arange(len(mask)) // args.num_generations,  # (M,): G rows of a prompt are adjacent
    )
    surrogate = clipped(inputs, SurrogateSettings(args.epsilon, args.epsilon_high))  # (M, T)
    counts = WindowCounts(len(mask), int(mask.sum()), 1, 1, args.max_completion_length)  # of one step
    return (surrogate * token_mean(WeightInputs(mask, inputs.group_ids_B), counts)).sum()  # 1 / tokens each


def evaluate(model, tokenizer, dataset, args):
    """Return the share of right answers, one sample per review."""
    right = []
    for rows in dataset.iter(batch_size=100):
        ids, _, mask = generate(model, tokenizer, rows["prompt"], args)
        right += compute_rewards(tokenizer, ids, mask, rows["answer"]).tolist()
    return sum(right) / len(right)


def main():
    options = example_parser(__doc__, "grpo-from-scratch-output", max_steps=60).parse_args()
    args = GRPOConfig(
        options.output_dir,
        max_steps=options.max_steps,
        learning_rate=1e-5,
        num_generations=8,  # G
        per_device_train_batch_size=32,  # M: 4 prompts x 8 completions
        steps_per_generation=2,  # B = 64: a generation is used for two optimizer steps of 32 sequences
        max_completion_length=8,
    )
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(args.device)
    model.eval()  # no dropout: log-probs of one policy are the same in sampling and training
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / args.max_steps)

    num_prompts = args.generation_batch_size // args.num_generations  # P
    num_batches = -(-args.max_steps // args.steps_per_generation)
    train = reviews(num_prompts * num_batches, args.seed, words=slice(12)).shuffle(args.seed)
    held_out = reviews(200, seed=-1, words=slice(12, None))
    before, start, step = evaluate(model, tokenizer, held_out, args), time.time(), 0

    for rows in train.iter(batch_size=num_prompts):
        # 1. Generate: G completions per prompt, the completions of a prompt in adjacent rows.
        repeat = range(args.num_generations)  # G
        chats, answers = ([x for x in rows[name] for _ in repeat] for name in ("prompt", "answer"))
        ids, attention_mask, mask = generate(model, tokenizer, chats, args)  # (B, L + T), (B, L + T), (B, T)

        # 2. Reward: F = 1 function.
        rewards = compute_rewards(tokenizer, ids, mask, answers)  # (B,)

        # 3. Advantages: A = (r - group mean) / (group std + 1e-4); 0 if all rewards of a group are equal.
        groups = GroupRewards(rewards[:, None], torch.ones(1), args.num_generations)
        advantages = normalized_advantages(groups, AdvantageSettings(scale="group")).to(args.device)  # (B,)

        # 4. Old log-probs: of the policy that sampled, before it is updated.
        with torch.no_grad():
            old_logps = compute_logprobs(model, ids, attention_mask, mask.shape[1], args)  # (B, T)

        # 5. Update: one optimizer step per mini-batch. The ratio is 1 in the first and moves in the second.
        for b in torch.arange(len(ids), device=args.device).split(args.per_device_train_batch_size):
            logps = compute_logprobs(model, ids[b], attention_mask[b], mask.shape[1], args)  # (M, T)
            loss = policy_loss(logps, old_logps[b], advantages[b], mask[b], args)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
        print(f"step {step:3d}  reward {rewards.mean():.3f}  {time.time() - start:.0f} s", flush=True)

    after = evaluate(model, tokenizer, held_out, args)
    print(f"held-out accuracy: {before:.1%} before, {after:.1%} after {step} steps")
    model.save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()
