r"""GPPO: Klear-Reasoner: Advancing Reasoning Capability via Gradient-Preserving Clipping Policy Optimization

arXiv 2508.07629; equation and clip range as in the authors' code,
https://github.com/Kwai-Klear/KlearReasoner, `compute_gppo_loss`

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} \min\Big(\rho_{it} A_i,\
\mathrm{clip}\big(\mathrm{sg}[\rho_{it}], 1-\varepsilon_\mathrm{low}, 1+\varepsilon_\mathrm{high}\big)
\frac{\rho_{it}}{\mathrm{sg}[\rho_{it}]}\,A_i\Big)
$$

Tokens beyond the clip range have the gradient of its bound instead of none. The code also bounds the loss
of negative advantages (dual clip) and has a weight for a loss on positive examples; both are left out.
"""

import torch

from groupwise import GRPOConfig, register_objective


def gppo(inputs, settings):
    ratio, advantages = inputs.ratio_BX, inputs.advantages_BX
    bound = ratio.detach().clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
    return -torch.minimum(ratio * advantages, bound * ratio / ratio.detach() * advantages)


register_objective("gppo", gppo, "token_mean", zero_grad_at_zero_advantage=True)
config = GRPOConfig("out", loss_type="gppo", epsilon=0.2, epsilon_high=0.28)
