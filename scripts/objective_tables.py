"""Tables of ``docs/objectives.md``: the registries of the package with their equations in LaTeX."""

from __future__ import annotations

from collections.abc import Iterable

#: ``loss_type`` -> paper.
LOSSES = {
    "grpo": "DeepSeekMath, arXiv 2402.03300",
    "bnpo": "the token mean of one micro-batch",
    "dr_grpo": "Dr. GRPO, arXiv 2503.20783",
    "dapo": "DAPO, arXiv 2503.14476",
    "luspo": "LUSPO, arXiv 2602.05261",
    "cispo": "MiniMax-M1, arXiv 2506.13585",
    "sapo": "SAPO, arXiv 2511.20347",
    "vespo": "VESPO, arXiv 2602.10693",
    "gspo_token": "GSPO, arXiv 2507.18071, section 4.3",
    "gmpo": "GMPO, arXiv 2507.20673",
    "dppo": "DPPO-Binary-TV, arXiv 2602.04879",
    "scalerl": "ScaleRL, arXiv 2510.13786, section 3.2",
}

#: Function name -> (equation, explanation). No bare ``|``: it would end a table cell.
SURROGATES = {
    "clipped": (
        r"-\min\big(\min(\rho,\delta)\,A,\ \mathrm{clip}(\rho, 1-\varepsilon_\mathrm{low}, "
        r"1+\varepsilon_\mathrm{high})\,A\big)",
        "DeepSeekMath eq. 3; two bounds: DAPO eq. 8; δ, if set: INTELLECT-2, arXiv 2505.07291",
    ),
    "cispo": (
        r"-\mathrm{sg}\big[\min(\rho, \varepsilon_\mathrm{high})\big]\,A\,\log\pi_\theta",
        "MiniMax-M1 eq. 4: bounds the weight, keeps the gradient of every token",
    ),
    "sapo": (
        r"-\tfrac{4}{\tau}\,\sigma\big(\tau(\rho-1)\big)\,A",
        "soft trust region; τ is `sapo_temperature_pos` for A > 0, else `sapo_temperature_neg`",
    ),
    "vespo": (
        r"-\mathrm{sg}\big[e^{\lambda} w_i^{k} e^{-\lambda w_i}\big]\,A\,\log\pi_\theta",
        "w is the product of the sequence's token ratios; k and λ depend on the sign of A",
    ),
    "gspo_token": (
        r"-\min\big(s_{it} A,\ \mathrm{clip}(s_{it}, 1-\varepsilon_\mathrm{low}, "
        r"1+\varepsilon_\mathrm{high})\,A\big),\quad "
        r"s_{it} = \mathrm{sg}[s_i]\,\frac{\pi_\theta(o_{it})}{\mathrm{sg}[\pi_\theta(o_{it})]}",
        "sequence ratio with token-wise advantages",
    ),
    "gmpo": (
        r"-A\,\Big(\prod_t \tilde\rho_{it}\Big)^{1/\lvert o_i\rvert}",
        "geometric mean of clipped ratios; the clip range of log ρ is set in `loss_kwargs`",
    ),
    "dppo": (
        r"-M_{it}\,\frac{\pi_\theta}{\mu}\,A",
        "M is 0 if A moves the token's probability further from the sampler's than δ (`loss_kwargs`)",
    ),
}
NORMALIZERS = {
    "sequence_mean": (
        r"\frac{1}{N\,\lvert o_i\rvert}",
        "mean over tokens, then over sequences (DeepSeekMath eq. 3)",
    ),
    "local_token_mean": (
        r"\frac{1}{N_\mathrm{acc}\sum_{i\in\mathrm{micro-batch}}\lvert o_i\rvert}",
        "mean over the tokens of a micro-batch; depends on how the window is split (BNPO)",
    ),
    "constant_length": (r"\frac{1}{N\,L_\mathrm{max}}", "no length bias (Dr. GRPO section 3.2)"),
    "token_mean": (r"\frac{1}{\sum_i \lvert o_i\rvert}", "every token counts the same (DAPO eq. 8)"),
    "sequence_sum": (r"\frac{1}{N}", "sum over tokens, mean over sequences (LUSPO)"),
    "prompt_mean": (
        r"\frac{1}{P\sum_{j\in\mathrm{group}(i)}\lvert o_j\rvert}",
        "mean over the tokens of a prompt, then over prompts (ScaleRL section 3.2)",
    ),
}
ADVANTAGES = {
    "group_mean": (
        r"\frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + 10^{-4}}",
        "DeepSeekMath section 4.1.2; `scale_rewards` chooses the standard deviation",
    ),
    "leave_one_out": (
        r"\frac{r_i - \frac{1}{G-1}\sum_{j\ne i} r_j}{\mathrm{std}(r) + 10^{-4}}",
        "RLOO, arXiv 2402.14740",
    ),
    "per_token": (
        r"\frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + 10^{-4}} + \sum_f w_f\, r_{it}^f",
        "step rewards are added to their own token as they are, for on-policy distillation "
        "(`get_distillation_reward`)",
    ),
    "turn_level": (
        r"\frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + 10^{-4}}",
        "as `group_mean`; the reward of a [turn](rewards.md#rewards-per-turn) goes to its own tokens alone",
    ),
    "maxrl": (
        r"\frac{r_i - \mathrm{mean}(r)}{\mathrm{mean}(r)}",
        "MaxRL, arXiv 2602.02710; 0 if the mean is 0, and `scale_rewards` has no effect",
    ),
}
KL = {
    "k1": (r"\log\pi_\theta - \log\pi_\mathrm{ref}", "unbiased, high variance, may be negative"),
    "k2": (
        r"\tfrac12\,(\log\pi_\theta - \log\pi_\mathrm{ref})^2",
        "biased value; the gradient is that of the reverse KL in expectation",
    ),
    "k3": (
        r"\frac{\pi_\mathrm{ref}}{\pi_\theta} - \log\frac{\pi_\mathrm{ref}}{\pi_\theta} - 1",
        "unbiased and non-negative (DeepSeekMath eq. 4)",
    ),
    "k3_k2grad": (r"\mathrm{k2} + \mathrm{sg}[\mathrm{k3} - \mathrm{k2}]", "value of k3, gradient of k2"),
}


def objective_tables() -> str:
    """Return the Markdown tables of losses, surrogates, normalizers, advantages and KL estimators."""
    from groupwise.core.advantages import ADVANTAGES as advantages
    from groupwise.core.kl import KL_ESTIMATORS
    from groupwise.core.objectives import OBJECTIVES
    from groupwise.core.weights import NORMALIZERS as normalizers

    losses = {name: OBJECTIVES[name] for name in LOSSES if name in OBJECTIVES}
    surrogates = dict.fromkeys(objective.surrogate.__name__ for objective in losses.values())
    lines = ["| `loss_type` | surrogate | normalizer | source |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {loss.surrogate.__name__} | `{loss.normalizer}` | {LOSSES[name]} |"
        for name, loss in losses.items()
    ]
    lines += table("surrogate", r"loss of a token, $\ell$", surrogates, SURROGATES, "{}")
    lines += table(
        "normalizer", "weight of a loss token, $w_{it}$", built_in(normalizers, NORMALIZERS), NORMALIZERS
    )
    lines += table("`advantage_baseline`", "advantage, $A_i$", built_in(advantages, ADVANTAGES), ADVANTAGES)
    lines += table("`kl_estimator`", r"$\mathrm{KL}_{it}$", built_in(KL_ESTIMATORS, KL), KL)
    return "\n".join(lines)


def built_in(registry: Iterable[str], equations: dict[str, tuple[str, str]]) -> list[str]:
    """Return the entries of ``registry`` that have an equation here, in its order."""
    return [name for name in registry if name in equations]


def table(
    kind: str, column: str, names: Iterable[str], equations: dict[str, tuple[str, str]], shown: str = "`{}`"
) -> list[str]:
    """Return one table: name, equation, explanation."""
    rows = [f"| {shown.format(name)} | ${equations[name][0]}$ | {equations[name][1]} |" for name in names]
    return ["", f"| {kind} | {column} | |", "|---|---|---|", *rows]
