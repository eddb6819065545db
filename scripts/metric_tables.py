"""Every metric that a run logs: meaning, healthy range, remedy; ``generate_docs.py`` writes the page from it.

Names contain ``<placeholders>``; a test compares them with the names that the library records.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """Row of the page: meaning, healthy values (empty: any), and what to do outside them."""

    meaning: str
    healthy: str = ""
    remedy: str = ""


GROUPS: dict[str, dict[str, Metric]] = {
    "Rewards": {
        "reward": Metric(
            "mean aggregated reward of the completions", "rises", "[Troubleshooting](troubleshooting.md)"
        ),
        "reward_std": Metric(
            "standard deviation within a group, mean over groups", "above 0", "see `frac_reward_zero_std`"
        ),
        "frac_reward_zero_std": Metric(
            "share of groups whose completions all have the same reward: no gradient",
            "0.1 to 0.7",
            "near 1: easier or harder prompts, partial credit, `dynamic_sampling`",
        ),
        "rewards/<name>/mean": Metric("mean of one reward function, completions without a reward left out"),
        "rewards/<name>/std": Metric(
            "its standard deviation over the completions of the batch", "above 0", "0: it teaches nothing"
        ),
        "rewards/<name>/errors": Metric(
            'failed calls with `reward_on_error="none"`', "0", "the log names the error"
        ),
        "rewards/<name>/steps": Metric(
            "steps of a completion that a process reward model scored",
            "above 1",
            "1: `step_separator` does not occur in the completions",
        ),
    },
    "Completions": {
        "completions/<mean, min, max>_length": Metric("sampled tokens of a completion"),
        "completions/<mean, min, max>_terminated_length": Metric(
            "the same, of completions that ended with an end token; missing if none did"
        ),
        "completions/clipped_ratio": Metric(
            "share of completions that were cut at `max_completion_length`",
            "below 0.2",
            "a larger limit, a reward for brevity, or end tokens: [Completions never "
            "end](troubleshooting.md#completions-never-end)",
        ),
        "num_tokens": Metric("prompt and completion tokens of the run so far, all ranks"),
        "staleness": Metric(
            "optimizer steps between the weights that sampled a completion and those that train on "
            "it, mean; only if the engine reports its weights",
            "at most `rollout_staleness`",
            "an engine that is not synced",
        ),
        "staleness/max": Metric("the largest of them"),
        "dynamic_sampling/rounds": Metric(
            "sampling rounds of a generation batch", "1 to 3", "at the limit: other prompts"
        ),
        "dynamic_sampling/discarded_share": Metric(
            "share of sampled groups that were neither used nor carried over"
        ),
        "dynamic_sampling/carried": Metric("groups carried over from the step before"),
        "dynamic_sampling/unfilled_share": Metric(
            "share of the batch without variance after the last round", "0", "other prompts, or more rounds"
        ),
    },
    "Loss": {
        "loss": Metric(
            "loss of the window. Near 0 on the first pass over a generation by construction: its "
            "value says nothing about progress"
        ),
        "policy_loss": Metric("loss without the entropy bonus; only with a bonus"),
        "kl": Metric(
            "KL to the reference model per token; only with a reference model (`beta` above 0)",
            "below about 0.1 per 100 steps, without jumps",
            "lower learning rate, higher `beta`",
        ),
        "entropy": Metric(
            "mean entropy of the policy's tokens, nats",
            "falls slowly, stays above 0",
            "`epsilon_high`, `entropy_coef`, lower learning rate",
        ),
        "entropy_coef": Metric("coefficient of the entropy bonus; only with a bonus"),
        "clip_ratio/low_mean": Metric(
            "share of tokens clipped at 1 − ε; 0 on the first pass over a generation",
            "below 0.1",
            "lower learning rate, fewer `num_iterations`",
        ),
        "clip_ratio/low_min": Metric("smallest share of a sequence"),
        "clip_ratio/high_mean": Metric("share of tokens clipped at 1 + ε_high", "below 0.1", "as above"),
        "clip_ratio/high_max": Metric("largest share of a sequence"),
        "clip_ratio/region_mean": Metric("share of tokens clipped on either side", "below 0.2", "as above"),
        "cispo_clip_ratio": Metric("share of tokens whose ratio CISPO caps", "below 0.1", "as above"),
        "vespo/phi_seq_mean": Metric("mean weight φ(w) that VESPO gives a sequence"),
        "aux_loss": Metric("load-balancing loss of a mixture of experts"),
        "grad_norm": Metric(
            "norm of the gradient before clipping",
            "finite, no sudden jumps",
            "lower learning rate, `max_grad_norm`",
        ),
        "learning_rate": Metric("that of the schedule"),
        "epoch": Metric("passes over the training prompts so far"),
    },
    "Sampler and trainer": {
        "sampling/logprob_mismatch": Metric(
            "mean difference of the sampler's and the trainer's log-probs on checked completions, "
            "nats per token",
            "float32 below 0.002, bfloat16 below 0.1",
            "[Log-prob mismatch](troubleshooting.md#log-prob-mismatch)",
        ),
        "sampling/sampling_logp_difference/<mean, max>": Metric(
            "the same over all loss tokens, for samplers that report log-probs"
        ),
        "sampling/importance_sampling_ratio/<mean, min, max>": Metric(
            "correction of the loss for the sampler, per token or sequence",
            "mean within 0.9 to 1.1",
            "[Log-prob mismatch](troubleshooting.md#log-prob-mismatch)",
        ),
        "sampling/truncated_mass/<mean, max>": Metric(
            "probability that `top_p`, `top_k` or `min_p` removed at a sampled token",
            "mean below 0.1",
            "less truncation: the bias of the ratio grows with it",
        ),
    },
    "Tools and environments": {
        "tools/call_frequency": Metric("tool calls per completion"),
        "tools/failure_frequency": Metric(
            "share of calls that failed", "below 0.1", "read the tool messages"
        ),
        "tools/fork_frequency": Metric(
            "rewritten histories per completion", "0", "an environment that changes earlier messages"
        ),
        "rollouts/retry_frequency": Metric(
            "repeated rollouts per completion", "near 0", "the log names the failure"
        ),
        "rollouts/dropped_share": Metric("share of dropped completions", "0", "as above"),
        "rollouts/dropped_groups": Metric("groups that were dropped as a whole", "0", "as above"),
    },
    "Time": {
        "step_time": Metric("seconds of an optimizer step, generation included"),
        "time/<generate, reward, sync, logprobs, train, idle>": Metric(
            "seconds of a step by phase, mean over ranks; `idle` is the rest of the step",
            "`idle` below a tenth",
            "[Performance](performance.md)",
        ),
        "time/reward/<name>": Metric("seconds of one reward function; calls may overlap"),
        "tokens_per_second": Metric("prompt and completion tokens of a step per second, mean over ranks"),
        "mfu": Metric("share of the device's peak that training used; on known GPUs"),
        "skipped_share": Metric("share of rows without a gradient, which were not computed"),
        "padding_share": Metric(
            "share of computed tokens that are padding", "below 0.1", "a packed `sequence_layout`"
        ),
    },
    "Evaluation, in addition": {
        "pass@<k>": Metric("probability that one of k completions passes, see [Evaluation](evaluation.md)"),
        "maj@<k>": Metric("probability that the most frequent answer of k passes"),
        "avg@<n>": Metric("mean reward"),
        "<pass@k, maj@k, avg@n>_ci95": Metric("half-width of the 95 % confidence interval"),
        "<pass@k, maj@k, avg@n>_gain": Metric("paired difference to the first evaluation"),
        "<pass@k, maj@k, avg@n>_gain_ci95": Metric("half-width of its interval"),
        "<pass@k, maj@k>_gain_low, _gain_high": Metric(
            "interval of the gain that is valid at all evaluations together"
        ),
    },
}


def metric_tables() -> list[str]:
    """Return the lines of all tables."""
    lines: list[str] = []
    for title, metrics in GROUPS.items():
        lines += ["", f"## {title}", "", "| metric | meaning | healthy | otherwise |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {m.meaning} | {m.healthy} | {m.remedy} |" for name, m in metrics.items()]
    return lines
