"""Edits of ``groupwise.core``: the equations."""

from __future__ import annotations

from mutation import Mutation, edits_of

OBJECTIVES = ("tests/reference/test_objectives.py", "-k", "on_policy or constants")
KL = ("tests/reference/test_objectives.py", "-k", "differentiates or k1 or k2 or k3")
GARBAGE = ("tests/reference/test_objectives.py", "-k", "garbage or bounded_away")
LIMITS = ("tests/reference/test_surrogate_limits.py",)
MASKS = ("tests/reference/test_masks.py",)
DEVICE = ("tests/trainer/test_another_device.py", "-k", "high_entropy")
DIAGNOSTICS = ("tests/reference/test_diagnostics.py",)
WEIGHTS = ("tests/reference/test_weights.py",)
ADVANTAGES = ("tests/reference/test_advantages.py",)
MERGING = ("tests/core/test_metric_merging.py",)
PADDING = ("tests/core/test_pad_sequences.py",)
REGISTRATION = ("tests/core/test_registration.py",)
VARIANTS = ("tests/reference/test_variants.py",)
ROWS = ("tests/trainer/test_rollouts_of_several_rows.py", "-k", "worked_example or masked_rows")
CONFIDENCE = ("tests/core/test_confidence.py",)
STEPS = ("tests/mixins/test_reward_mixin.py", "-k", "steps or step_rewards")
STREAMS = ("tests/test_random_state.py", "-k", "streams")
DISTILLATION = ("tests/rewards/test_distillation.py", "-k", "loop or outcome")


ALL = ("tests/reference", "tests/core")


def _of(file: str, *edits: tuple[str, str, tuple[str, ...]]) -> list[Mutation]:
    return edits_of(f"core/{file}", *edits, rest=ALL)


CORE = [
    *edits_of(
        "random_state.py",
        (
            "if changes:\n            self._exchange()\n        try",
            "if active:\n            self._exchange()\n        try",
            STREAMS,
        ),
        ("_set_torch_state(self._unused)", "pass", STREAMS),
        ("torch.manual_seed(seed + _USER_SEED)", "torch.manual_seed(seed)", STREAMS),
        ('self._unused = snapshot["user_code"]', "pass", STREAMS),
        rest=STREAMS,
    ),
    *_of(
        "ratios.py",
        ("(log_ratio_BT * mask_BT).sum(", "log_ratio_BT.sum(", LIMITS),
        (".clamp(min=1)", ".clamp(min=2)", LIMITS),
        (" / lengths_B1", "", OBJECTIVES),
        ("mask_BT.sum(-1, keepdim=True)", "torch.ones_like(mask_BT).sum(-1, keepdim=True)", LIMITS),
        ("(log_ratio_BT * mask_BT).sum(-1", "(log_ratio_BT * mask_BT).sum(0", LIMITS),
        ('"sequence": sequence_log_ratio', '"sequence": token_log_ratio', OBJECTIVES),
    ),
    *_of(
        "surrogates.py",
        ("clamp(1 - settings.epsilon_low", "clamp(1 - settings.epsilon_high", LIMITS),
        ("1 + settings.epsilon_high", "1 + settings.epsilon_low", LIMITS),
        ("torch.minimum(", "torch.maximum(", LIMITS),
        ("return -torch.minimum(", "return torch.minimum(", LIMITS),
        ("clamp(max=settings.delta)", "clamp(min=settings.delta)", LIMITS),
        ("torch.minimum(capped_BX", "torch.minimum(ratio_BX", LIMITS),
        ("inputs.ratio_BX.detach()", "inputs.ratio_BX", OBJECTIVES),
        ("clamp(max=settings.epsilon_high)", "clamp(max=1 + settings.epsilon_high)", LIMITS),
        (
            "clamp(max=settings.epsilon_high)",
            "clamp(1 - settings.epsilon_low, settings.epsilon_high)",
            LIMITS,
        ),
        ("return -weight_BX", "return weight_BX", LIMITS),
        ("inputs.advantages_BX > 0", "inputs.advantages_BX < 0", OBJECTIVES),
        ("(inputs.ratio_BX - 1)", "inputs.ratio_BX", LIMITS),
        ("* 4 / temperature_BX", "* 4", LIMITS),
        ("* 4 / temperature_BX", "* 2 / temperature_BX", LIMITS),
        ("return -gate_BX", "return gate_BX", LIMITS),
        ("return -vespo_gate(", "return vespo_gate(", OBJECTIVES),
        ("inputs.log_ratio_BT.detach()", "inputs.log_ratio_BT", OBJECTIVES),
        (".clamp(-20, 20)", ".clamp(-10, 10)", LIMITS),
        (".clamp(-20, 20)", "", LIMITS),
        (".clamp(-20, 20) * inputs.loss_mask_BT", ".clamp(-20, 20)", LIMITS),
        ("inputs.log_correction_BX.clamp(math.log(1e-8), 20)", "inputs.log_correction_BX", LIMITS),
        ("log_w_B1 = log_w_B1 + inputs.log", "log_w_B1 = log_w_B1 - inputs.log", LIMITS),
        ("log_w_B1.clamp(math.log(1e-8), 20)", "log_w_B1", LIMITS),
        ("log_w_B1.clamp(math.log(1e-8), 20)", "log_w_B1.clamp(math.log(1e-6), 20)", LIMITS),
        ("log_w_B1.clamp(math.log(1e-8), 20)", "log_w_B1.clamp(math.log(1e-8), 40)", LIMITS),
        ("inputs.advantages_BX >= 0", "inputs.advantages_BX > 0", LIMITS),
        ("- lambda_BX * log_w_B1.exp()", "+ lambda_BX * log_w_B1.exp()", LIMITS),
        ("k_BX * log_w_B1", "log_w_B1", LIMITS),
        ("above), below)", "below), above)", LIMITS),
        ("like.new_full((), above)", "above", OBJECTIVES),
    ),
    *_of(
        "kl.py",
        ("return logps_BT - ref_logps_BT", "return ref_logps_BT - logps_BT", DIAGNOSTICS),
        ("0.5 * (", "(", DIAGNOSTICS),
        ("delta_BT = ref_logps_BT - logps_BT", "delta_BT = logps_BT - ref_logps_BT", DIAGNOSTICS),
        ("- delta_BT - 1", "- delta_BT", DIAGNOSTICS),
        ("quadratic_BT).detach()", "quadratic_BT)", KL),
        ("return quadratic_BT + (", "return quadratic_BT.detach() + (", KL),
        ("return quadratic_BT + (", "return quadratic_BT - (", DIAGNOSTICS),
        ('"k2": k2', '"k2": k3', DIAGNOSTICS),
    ),
    *_of(
        "corrections.py",
        ("old_logps_BT - sampler_logps_BT", "sampler_logps_BT - old_logps_BT", MASKS),
        ("nan=0.0", "nan=1.0", MASKS),
        ("gap_BT * mask_BT", "gap_BT", MASKS),
        (".sum(-1, keepdim=True)", ".mean(-1, keepdim=True)", MASKS),
        ("factor_BX.clamp(lowest, highest)", "factor_BX.clamp(max=highest)", MASKS),
        ("factor_BX.clamp(lowest, highest)", "factor_BX.clamp(min=lowest)", MASKS),
        ("factor_BX < lowest", "factor_BX <= lowest", MASKS),
        ("factor_BX > highest", "factor_BX >= highest", MASKS),
        ("(outside_BX, 0.0)", "(outside_BX, 1.0)", MASKS),
        ('mode.endswith("truncate")', 'mode.endswith("mask")', MASKS),
        ('mode.startswith("sequence")', 'mode != "token_truncate"', MASKS),
        ("log_gap_BT.detach()", "log_gap_BT", MASKS),
    ),
    *_of(
        "masks.py",
        ("(1.0 - top_quantile)", "top_quantile", MASKS),
        ("* (entropies.numel() - 1)", "* entropies.numel()", MASKS),
        (", position - below)", ", 0.0)", MASKS),
        ("entropies.sort()", "entropies.double().sort()", DEVICE),
        ("behaviour_logps_BT - logps_BT.detach()", "logps_BT.detach() - behaviour_logps_BT", MASKS),
        ("drift_B1 <= threshold", "drift_B1 < threshold", MASKS),
        ("advantages_BX >= 0", "advantages_BX > 0", MASKS),
        ("(advantages_BX >= 0) |", "(advantages_BX >= 0) &", MASKS),
        ("keepdim=True) / lengths_B1", "keepdim=True)", MASKS),
        ("nan=0.0", "nan=1e9", MASKS),
        ("(drift_BT * mask_BT).sum", "drift_BT.sum", MASKS),
    ),
    *_of(
        "weights.py",
        ("counts.sequences * rows.lengths_B1", "len(rows.mask_BT) * rows.lengths_B1", WEIGHTS),
        ("* rows.lengths_B1.clamp(min=1)", "* rows.lengths_B1.clamp(min=1).sum()", WEIGHTS),
        ("mask_BT.sum(-1, keepdim=True)", "mask_BT.sum(0, keepdim=True)", WEIGHTS),
        ("counts.micro_batches * rows.mask_BT.sum()", "rows.mask_BT.sum()", WEIGHTS),
        ("mask_BT.sum().clamp(min=1)", "mask_BT.sum().clamp(min=2)", WEIGHTS),
        ("counts.max_completion_length)", "rows.mask_BT.shape[1])", WEIGHTS),
        ("mask_BT * counts.world_size / max(", "mask_BT / max(", WEIGHTS),
        ("max(counts.tokens, 1)", "rows.mask_BT.sum().clamp(min=1)", WEIGHTS),
        ("max(counts.tokens, 1)", "counts.sequences", WEIGHTS),
        ("counts.world_size / counts.sequences", "1 / counts.sequences", WEIGHTS),
    ),
    *edits_of(
        "records/rollout.py",
        ("math.fsum(r for _, r in steps)", "max(r for _, r in steps)", STEPS),
        (" if steps else math.nan", "", STEPS),
        ("varies_P[group] |= len(", "varies_P[group] = len(", STEPS),
    ),
    *edits_of(
        "core/row_weights.py",
        (".clamp(min=1)", "", ROWS),
        ("repeat_interleave(masks_BKT", "repeat(masks_BKT", ROWS),
        ("view_as(masks_BKT).sum(1)", "view_as(masks_BKT).mean(1)", ROWS),
        ("row_BT[index, start:] += 1", "row_BT[index, start] += 1", ROWS),
        ("1 + max((len(starts", "max((len(starts", ROWS),
        ("* batch.loss_mask_BT.float()", "* batch.completion_mask_BT.float()", ROWS),
    ),
    *_of(
        "objectives.py",
        ("logps_BT.detach(), batch.old_logps_BT)", "logps_BT, batch.old_logps_BT)", OBJECTIVES),
        ("(logps_BT - old_logps_BT).masked_fill(off_BT, 0.0)", "(logps_BT - old_logps_BT)", GARBAGE),
        ("        logps_BT=logps_BT.masked_fill(off_BT, 0.0)", "        logps_BT=logps_BT", GARBAGE),
        ("ref_BT.masked_fill(off_BT, 0.0)", "ref_BT", GARBAGE),
        ("= _log_correction(correction_BX, off_BT)", "= correction_BX.log()", GARBAGE),
        (
            "correction_BX is not None and not objective.applies_sampler_correction",
            "correction_BX is not None",
            OBJECTIVES,
        ),
        ("per_token_BX * batch.entropy_mask_BT", "per_token_BX * (1 - batch.entropy_mask_BT)", KL),
        (
            "(per_token_BX * batch.token_weights_BT).sum()",
            "(per_token_BX * batch.token_weights_BT).mean()",
            OBJECTIVES,
        ),
        ("kl_BT * inputs.ratio_BX", "kl_BT * inputs.ratio_BX.detach()", KL),
        ("if settings.bias_correction_kl", "if not settings.bias_correction_kl", KL),
        ("loss + settings.beta", "loss - settings.beta", OBJECTIVES),
        ("if settings.kl_in_loss", "if True", ("tests/reference/test_objectives.py", "-k", "only_measured")),
        ("loss - (entropy_BT", "loss + (entropy_BT", MASKS),
        ("None else batch.sampler_logps_BT", "None else old_logps_BT", OBJECTIVES),
        ("behaviour_BT, mask_BT, settings", "behaviour_BT, mask_BT, -settings", OBJECTIVES),
        (
            "(kl_BT * batch.token_weights_BT)",
            "(kl_BT * (1.0 if correction_BX is None else correction_BX) * batch.token_weights_BT)",
            OBJECTIVES,
        ),
        ("ratio_BX < 1 - settings.epsilon_low", "ratio_BX < 1 - settings.epsilon_high", DIAGNOSTICS),
        ("inputs.advantages_BX < 0", "inputs.advantages_BX > 0", DIAGNOSTICS),
        ("ratio_BX.detach() > settings.epsilon_high", "ratio_BX.detach() > 1", DIAGNOSTICS),
        ("present_BX == 0", "present_BX < 0", DIAGNOSTICS),
        ("mask_BT.amax(", "mask_BT.amin(", DIAGNOSTICS),
        ('surrogates.clipped, "local_token_mean"', 'surrogates.clipped, "token_mean"', WEIGHTS),
        ('surrogates.clipped, "sequence_sum"', 'surrogates.clipped, "constant_length"', WEIGHTS),
        ("sampler_BT.isfinite(), sampler_BT, old", "sampler_BT.isnan(), sampler_BT, old", REGISTRATION),
        ("if self.settings is None else", "if True else", REGISTRATION),
        ('surrogates.sapo, "sequence_mean"', 'surrogates.sapo, "token_mean"', WEIGHTS),
        ("    NORMALIZERS[normalizer]  # an", "    # an", REGISTRATION),
    ),
    *_of(
        "advantages.py",
        ("STD_EPSILON = 1e-4", "STD_EPSILON = 1e-6", ADVANTAGES),
        ("(count - 1).clamp", "count.clamp", ADVANTAGES),
        ("centred.square().sum(dim, keepdim=True)", "centred.square().sum()", ADVANTAGES),
        ("(rewards_NF * weights_F)", "rewards_NF", ADVANTAGES),
        ("(rewards_NF.isnan().all(-1), ", "(rewards_NF.isnan().any(-1), ", ADVANTAGES),
        ("(total_P1 - rewards_PG)", "total_P1", ADVANTAGES),
        (".sum(-1, keepdim=True) - 1", ".sum(-1, keepdim=True)", ADVANTAGES),
        ("(r_PG - baseline(r_PG))", "r_PG", ADVANTAGES),
        (" / (nan_std(total_N, 0) + STD_EPSILON)", "", ADVANTAGES),
        ("centred_PG = rewards_PG - baseline(rewards_PG)", "centred_PG = rewards_PG", ADVANTAGES),
        ('settings.scale == "group"', 'settings.scale != "none"', ADVANTAGES),
        ("nan_std(rewards_PG.reshape(-1), 0)", "nan_std(rewards_PG, -1)", ADVANTAGES),
        ("nan_to_num(nan=0.0)", "nan_to_num(nan=1.0)", ADVANTAGES),
        ("rewards.weights_F[column]", "rewards.weights_F[0]", ADVANTAGES),
        ('scale=settings.scale != "none"', "scale=True", ADVANTAGES),
        ("[row, : end + 1]", "[row, :end]", ADVANTAGES),
        ("(reward - values.mean().item())", "reward", ADVANTAGES),
        ("total_N - rewards.penalty_N", "total_N + rewards.penalty_N", ADVANTAGES),
        ("AGGREGATIONS[settings.aggregation].normalize_first", "False", ADVANTAGES),
        ("+= weights[column] * reward", "+= reward", DISTILLATION),
        ("+= weights[column] * reward", "= weights[column] * reward", DISTILLATION),
        ("replace(rewards, step_rewards={})", "rewards", DISTILLATION),
    ),
    *_of(
        "confidence.py",
        ("0.05 / (look * (look + 1))", "0.05", CONFIDENCE),
        ("(z**3 + z) / 4", "(z**3 - z) / 4", CONFIDENCE),
        ("16 * z**3", "6 * z**3", CONFIDENCE),
        ("freedom**power", "freedom", CONFIDENCE),
        ("enumerate(terms, 1)", "enumerate(terms)", CONFIDENCE),
        ("1 - level / 2", "1 - level", CONFIDENCE),
        ("count - 1", "count - 20", CONFIDENCE),
        ("values.var()", "values.var(correction=0)", CONFIDENCE),
        ("[-1.0, 1.0]", "[-0.1, 0.1]", CONFIDENCE),
        ("< LEAST_PROMPTS", "<= LEAST_PROMPTS", CONFIDENCE),
        ("max(mean - half, -1.0)", "mean - half", CONFIDENCE),
        ("min(mean + half, 1.0)", "mean + half", CONFIDENCE),
    ),
    *_of(
        "variants.py",
        ("inputs.loss_mask_BT).detach()", "inputs.loss_mask_BT)", VARIANTS),
        ("(log_s_B1 + inputs.log_ratio_BT", "(inputs.log_ratio_BT", VARIANTS),
        ("(min=-settings.epsilon_low)", "(min=-settings.epsilon_high)", VARIANTS),
        ("inputs.advantages_BX > 0, high_BT, low_BT", "inputs.advantages_BX > 0, low_BT, high_BT", VARIANTS),
        ("shift_BT <= settings.delta_high", "shift_BT <= settings.delta_low", VARIANTS),
        ("shift_BT >= -settings.delta_low", "shift_BT >= settings.delta_low", VARIANTS),
        ("is None else inputs.sampler_logps_BT", "is None else inputs.old_logps_BT", VARIANTS),
        ("len(counts.group_tokens) * tokens_B1", "counts.sequences * tokens_B1", VARIANTS),
        ("max(counts.group_tokens.get(group, 0), 1)", "counts.tokens", VARIANTS),
        (" - mean_P1) / mean_P1", ") / mean_P1", VARIANTS),
        ("nan_to_num(nan=0.0)", "nan_to_num(nan=1.0)", VARIANTS),
        ("bool((rewards_PG < 0).any())", "False", VARIANTS),
    ),
    *_of(
        "metrics.py",
        ("self.count + other.count", "self.count", MERGING),
        ("_extreme(torch.maximum, max", "_extreme(torch.minimum, min", MERGING),
        (" * mask_BT).sum(), mask_BT.sum()", ").sum(), mask_BT.sum()", MERGING),
        ("mask_BT.sum())", "float(mask_BT.numel()))", MERGING),
        ("type(known) is not type(reduction)", "False", MERGING),
    ),
    *_of(
        "entropy.py",
        ("self.entropy <= target", "self.entropy < target", MASKS),
        ("if entropy <= target else", "if entropy < target else", MASKS),
        ("self.coef - delta", "self.coef", MASKS),
        ("min(max(moved, low), high)", "max(moved, low)", MASKS),
        ("min(max(moved, low), high)", "min(moved, high)", MASKS),
    ),
    *_of(
        "padding.py",
        ("-(-width // multiple_of)", "(width // multiple_of)", PADDING),
        (
            "slice(width - len(sequence), None) if left",
            "slice(width - len(sequence), None) if not left",
            PADDING,
        ),
        ("position < lengths_B1", "position <= lengths_B1", PADDING),
    ),
]
