r"""CE-GPPO: Coordinating Entropy via Gradient-Preserving Clipping Policy Optimization in Reinforcement
Learning

arXiv 2509.20712, equation 8, section 4.1

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} F_{it}\,\rho_{it} A_i, \quad F_{it} = \begin{cases}
\beta_1 \frac{1-\varepsilon}{\mathrm{sg}[\rho_{it}]} & \rho_{it} < 1-\varepsilon,\ A_i < 0 \\
\beta_2 \frac{1+\varepsilon}{\mathrm{sg}[\rho_{it}]} & \rho_{it} > 1+\varepsilon,\ A_i > 0 \\
1 & \mathrm{otherwise} \end{cases}
$$

Clipped tokens keep a bounded gradient. Both zero: PPO's gradient.
"""

from dataclasses import dataclass

import torch

from groupwise import GRPOConfig, register_objective


@dataclass(frozen=True)
class CEGPPOSettings:
    beta_1: float = 0.75
    beta_2: float = 1.0
    epsilon: float = 0.2


def ce_gppo(inputs, settings):
    ratio, advantages, bound = inputs.ratio_BX, inputs.advantages_BX, settings.epsilon
    below = (ratio < 1 - bound) & (advantages < 0)
    above = (ratio > 1 + bound) & (advantages > 0)
    factor = torch.where(below, settings.beta_1 * (1 - bound) / ratio.detach(), torch.ones_like(ratio))
    factor = torch.where(above, settings.beta_2 * (1 + bound) / ratio.detach(), factor)
    return -factor.detach() * ratio * advantages


register_objective("ce_gppo", ce_gppo, "token_mean", settings=CEGPPOSettings)
config = GRPOConfig("out", loss_type="ce_gppo", loss_kwargs={"beta_1": 0.75, "beta_2": 1.0, "epsilon": 0.2})
