r"""ASPO: Asymmetric Importance Sampling Policy Optimization

arXiv 2510.06062, version 2, section 6, equation 3

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} \hat\rho_{it} A_i, \quad \hat\rho_{it} = \begin{cases}
\mathbb{1}[\rho_{it} \le 1+\varepsilon_\mathrm{high}]\,
\mathrm{sg}\big[\min(\rho_{it}^{-1}, c)\big]\,\frac{\pi_\theta}{\mathrm{sg}[\pi_\theta]} & A_i > 0 \\
\mathbb{1}[\rho_{it} \ge 1-\varepsilon_\mathrm{low}]\,\min(\rho_{it}, c) & A_i \le 0 \end{cases}
$$

Tokens of good completions that became less likely get the larger weight. The equation is that of version 2;
the bound c of the two dual clips is read from its figure 4.
"""

from dataclasses import dataclass

import torch

from groupwise import GRPOConfig, register_objective


@dataclass(frozen=True)
class ASPOSettings:
    epsilon_low: float = 0.2
    epsilon_high: float = 0.28
    dual_clip: float = 3.0


def aspo(inputs, settings):
    ratio, advantages = inputs.ratio_BX, inputs.advantages_BX
    value = ratio.detach()
    flipped = value.reciprocal().clamp(max=settings.dual_clip) * ratio / value
    positive = flipped * (value <= 1 + settings.epsilon_high)
    negative = ratio.clamp(max=settings.dual_clip) * (value >= 1 - settings.epsilon_low)
    return -torch.where(advantages > 0, positive, negative) * advantages


register_objective("aspo", aspo, "token_mean", settings=ASPOSettings, zero_grad_at_zero_advantage=True)
config = GRPOConfig(
    "out", loss_type="aspo", loss_kwargs={"epsilon_low": 0.2, "epsilon_high": 0.28, "dual_clip": 3.0}
)
