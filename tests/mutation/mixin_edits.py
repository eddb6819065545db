"""Edits of ``groupwise.mixins``, the verbs of a step, and of ``groupwise.policy``."""

from __future__ import annotations

from mutation import Mutation, edits_of

REPLAY = ("tests/policy/test_experts.py", "-k", "replayed")
EXPERTS = ("tests/policy/test_experts.py", "-k", "every_layout or once_per_row")
BALANCE = ("tests/policy/test_experts.py", "-k", "add_up or all_its_tokens")

NOISE = ("tests/policy/test_noise.py", "-k", "two_forwards")
PLAIN = ("tests/generation/test_plain_forward.py", "-k", "due_again or by_length")


def _of(name: str, *edits: tuple[str, str]) -> list[Mutation]:
    tests = (f"tests/mixins/test_{name}_mixin.py",)
    return edits_of(f"mixins/{name}.py", *[(old, new, tests) for old, new in edits])


TURNS = ("tests/agents/test_turn_rewards.py",)
REWARDS = ("tests/mixins/test_reward_mixin.py",)

MIXINS = [
    *edits_of(
        "rewards/runtime/calling.py",
        ("if first < end <= stop else None", "", TURNS),
        ("in times if not math.isnan(s)", "in times if math.isnan(s)", REWARDS),
        ("**errors} if count_failures else found", "**errors}", REWARDS),
        ("Sum(float(i in self.failures))", "Sum(float(bool(self.failures)))", REWARDS),
    ),
    *edits_of(
        "rewards/runtime/loading.py",
        ("(spread_FP > 1e-12 * magnitude_FP)", "(spread_FP > 0)", REWARDS),
        ("(spread_FP < 100 * error_FP)", "(spread_FP < error_FP)", REWARDS),
        ("is_rounded_FP.any(-1)", "is_rounded_FP.all(-1)", REWARDS),
    ),
    *edits_of(
        "rewards/process.py",
        ("if r is not None and end]", "if r is not None]", TURNS),
        ("start <= first + end < after", "start <= end < after", TURNS),
    ),
    *edits_of(
        "reporting/metrics.py",
        ("nan_std(values_N, 0).item() * scored", "nan_std(values_N, 0).item()", REWARDS),
        ("nan_std(total_PG.flatten(), 0)", "nan_std(total_PG, -1).mean(0)", REWARDS),
        ("constant_P = scored_P & ", "constant_P = ", REWARDS),
        (" & ~has_variance(rewards, aggregation)", "", REWARDS),
        ("has_variance(rewards, aggregation)", "has_variance(sums, aggregation)", REWARDS),
    ),
    *edits_of(
        "policy/experts.py",
        ("weight_S.repeat_interleave(top_k)", "weight_S.repeat(top_k)", EXPERTS),
        ("(weight_S.unsqueeze(1) * probs_SE)", "probs_SE", EXPERTS),
        ("weight_S.sum() * len(gate_logits)", "weight_S.sum()", EXPERTS),
        ("total = sums if total is None else total", "total = sums", BALANCE),
        ("_Routers(self.size, wanted_SMK, first)", "_Routers(self.size, wanted_SMK)", REPLAY),
        ("scores.gather(-1, index), index", "out[0], index", REPLAY),
    ),
    *edits_of(
        "mixins/loss.py",
        ("num_processes if self.balances_updates else share", "num_processes * share", BALANCE),
    ),
    *edits_of(
        "policy/experts.py",
        ("for batch in batches if batch is not None]", "for batch in batches[:1]]", BALANCE),
    ),
    *edits_of(
        "policy/layouts/packed.py",
        ("counts += [rows] * length", "counts += [1] * length", EXPERTS),
    ),
    *edits_of(
        "policy/layouts/forked.py",
        ("_width(shape, rows) + whole", "_width(shape, rows)", EXPERTS),
    ),
    *edits_of(
        "policy/loading.py",
        (" or name in _JITTERS", "", NOISE),
    ),
    *edits_of(
        "policy/logprob_mismatch.py",
        ("bisect_left(self.numbers, length)", "0", PLAIN),
        ("        self.padded |= padded\n", "        pass\n", PLAIN),
    ),
    *edits_of(
        "policy/introspection.py",
        ("    model.eval()\n", "", ("tests/mixins/test_logprob_mixin.py",)),
        (
            "        model.train(was_training)",
            "        model.train()",
            ("tests/mixins/test_logprob_mixin.py",),
        ),
    ),
    *_of(
        "loss",
        (
            "torch.cat([batch.kept_B for batch in window])",
            "torch.cat([batch.kept_B | True for batch in window])",
        ),
        (
            "[batch.loss_mask_BT.sum() for",
            "[torch.ones_like(batch.completion_mask_BT).sum() for",
        ),
        ("mask_BT.sum(dtype=torch.long) for", "torch.ones_like(mask_BT).sum(dtype=torch.long) for"),
        (
            "if self.args.use_adaptive_entropy else None",
            "if not self.args.use_adaptive_entropy else None",
        ),
        ("coef * world_size / max(", "coef / max("),
        ("max(bonus_tokens, 1)", "bonus_tokens"),
        ("mask_BT.float() * bonus_weight", "batch.loss_mask_BT.float() * bonus_weight"),
        ("mask_BT.float() * bonus_weight", "torch.ones_like(mask_BT).float() * bonus_weight"),
        ("entropy_mask_BT=mask_BT", "entropy_mask_BT=batch.loss_mask_BT"),
        ("world_size / sequences", "1 / sequences"),
        ("total / max(count, 1.0)", "total"),
        ("self.entropy_control = self.entropy_control.step(", "self.entropy_control.step("),
        ("max(totals[3], 1) / world_size", "len(window)"),
        ("max(totals[3], 1) / world_size", "max(totals[3], 1)"),
        ("(sequences, tokens, micro", "(tokens, sequences, micro"),
        ("micro_batches, world_size, length", "micro_batches, 1, length"),
        ("Mean(mean.total, batch.sequence_weight_B1.sum())", "mean"),
        (
            "masked_mean(logprobs.entropy_BT, batch.entropy_mask_BT)",
            "masked_mean(logprobs.entropy_BT, batch.loss_mask_BT)",
        ),
        ("args.epsilon if args.epsilon_high is None else args.epsilon_high", "args.epsilon"),
        ("            if group >= 0:\n", "            if True:\n"),
        ("counts.get(group, 0) + tokens", "tokens"),
        ("dim=1)[counted_B]", "dim=1)"),
        ('given["vllm_importance_sampling_mode"] = None', "pass"),
        ('"truncation_unknown": truncation_unknown, ', ""),
        ("named(SurrogateSettings) | clip", "clip"),
        ('"epsilon_high": high', '"epsilon_high": args.epsilon'),
    ),
    *_of(
        "logprob",
        ("pad_token, left=True, **pad)", "pad_token, **pad)"),
        ("self.accelerator.process_index * len(rollouts)", "0"),
        ("[each.dropped or (", "[("),
        ("if any(dropped) else None", "if all(dropped) else None"),
        ("pad_sequences(logps, math.nan,", "pad_sequences(logps, 0.0,"),
        ("[row // rollouts.num_generations for row", "[row for row"),
        ("each.truncated and masks_truncated", "masks_truncated"),
        ("each.loss_mask or [1]", "[1]"),
        (
            "if any(completion.logps is not None for",
            "if all(completion.logps is not None for",
        ),
        ("            if not on_policy:", "            if True:"),
        ("self._logps_of_rows(reference, own, only)", "self._logps_of_rows(model, tokens, only)"),
        ("completed(batch) if batch.ref_logps_BT is None", "completed(batch) if True"),
        ("only, fill=math.nan)", "only)"),
        ("self._logps_of_rows(reference, own, None)", "self._logps_of_rows(self.model, own, None)"),
        ("if row in chosen]", "]"),
        ("size = self.args.per_device_train_batch_size", "size = len(tokens)"),
        ("(logps.old_logps_BT, logps.ref_logps_BT)", "(logps.ref_logps_BT, logps.old_logps_BT)"),
        ("kl_BT.masked_fill(tokens.loss_mask_BT == 0, 0.0)", "kl_BT"),
        ("[: len(rewards.rewards_NF)]", ""),
        ("self.args.beta * kl_N", "kl_N"),
        ("if rewards.step_rewards:", "if False:"),
        ("[gathered >= 0]", ""),
        ("entropy >= threshold.to(entropy)", "entropy > threshold.to(entropy)"),
        ("entropy[mask] for entropy, mask", "entropy.flatten() for entropy, mask"),
        (".long() * batch.loss_mask_BT", ".long()"),
    ),
    *_of(
        "reward",
        (
            "local=rows_of_rank(self.accelerator.process_index, ",
            "local=rows_of_rank(0, ",
        ),
        ("for name, value in list(log.metrics)", "for name, value in []"),
        ("in dict(log.columns).items()", "in {}.items()"),
        ("type(self).compute_rewards is not RewardMixin.compute_rewards", "False"),
        ("if isinstance(function, PartialReward) and rows != []:", "if rows != []:"),
        ("(of_ranks))[: rollouts.num_valid]", "(of_ranks))"),
        ("if any(isinstance(reward, list) for reward in c)", "if isinstance(c[0], list)"),
        ("[math.nan] * len(c) if i in stepwise else c", "c"),
        ("num_tokens=max(widths)", "num_tokens=width"),
        ("turns_N = joined(turns)", "turns_N = list(chain.from_iterable(turns))"),
        ("isinstance(rewards_B[row], list) for", "isinstance(rewards_B[0], list) for"),
        ("turns=turns_N if any(turns_N) else ()", "turns=()"),
        ("num_generations=rollouts.num_generations", "num_generations=1"),
    ),
    *_of(
        "advantage",
        ("scale=self.args.scale_rewards, aggregation", "aggregation"),
        (", aggregation=self.args.multi_objective_aggregation", ""),
        ("ADVANTAGES[self.args.advantage_baseline]", 'ADVANTAGES["group_mean"]'),
    ),
    *_of(
        "rollout",
        ("generate), **request.kept_fields())", "generate))"),
        ("            **request.kept_fields(),\n", ""),
        ("backend, request.generation_kwargs, generate, step, ", "backend, {}, generate, step, "),
        ("self.rng.user_code(False)(generate)", "generate"),
        ('if request.mode == "train" else None', ""),
        ("if self.agents is not None and first:", "if self.agents is not None:"),
        ('phase("generate"), self.rng.user_code()', 'phase("generate")'),
        ("generation_kwargs=request.generation_kwargs,\n", "generation_kwargs={},\n"),
        ("finished=self._partial_rollouts(request, prompt_ids)", "finished=None"),
        ("extra=extra or {}", "extra={}"),
        ("skip_special_tokens=True", "skip_special_tokens=False"),
        ("if index > 0 and _same_input(row, rows[index - 1])", "if False"),
        ("_same_input(row, rows[index - 1])", "True"),
        ("rows=[request.rows[i] for i in row_ids]", "rows=request.rows[: len(row_ids)]"),
        ("[prompt_ids[i] for i in row_ids]", "prompt_ids"),
        ("replace(rollouts, row_ids=list(row_ids))", "rollouts"),
        (
            "self.args.chat_template_kwargs, self.args.max_prompt_length",
            "self.args.chat_template_kwargs, None",
        ),
    ),
]
