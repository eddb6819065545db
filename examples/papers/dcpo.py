r"""DCPO: Dynamic Clipping Policy Optimization

arXiv 2509.02333, version 2, equations 4 and 8; clip range of appendix A.9

$$
L = -\frac1P \sum_i \frac{1}{\lvert o_i\rvert} \sum_t \min\big(\min(\rho_{it}, 10)\,A_i,\
\mathrm{clip}(\rho_{it}, l_{it}, \min(u_{it}, 10))\,A_i\big),
\quad l_{it} = \tfrac12 + \tfrac12\sqrt{\max\big(1 - \tfrac{4\varepsilon_\mathrm{low}}{q_{it}}, 0\big)},
\quad u_{it} = \tfrac12 + \tfrac12\sqrt{1 + \tfrac{4\varepsilon_\mathrm{high}}{q_{it}}}
$$

$q_{it}$ is the old probability of the token: rare tokens may move further. Sequences are added, not
averaged. The paper's smooth standardization is left out, since it needs the rewards of a prompt in earlier
epochs.
"""

import torch

from groupwise import GRPOConfig, register_normalizer, register_objective


def dcpo(inputs, settings):
    old_probs = inputs.old_logps_BT.exp()
    low = 0.5 + 0.5 * (1 - 4 * settings.epsilon_low / old_probs).clamp(min=0).sqrt()
    high = (0.5 + 0.5 * (1 + 4 * settings.epsilon_high / old_probs).sqrt()).clamp(max=10)
    bounded = inputs.ratio_BX.maximum(low).minimum(high) * inputs.advantages_BX
    return -torch.minimum(inputs.ratio_BX.clamp(max=10) * inputs.advantages_BX, bounded)


def only_token_mean(rows, counts):
    prompts = len(counts.group_tokens)
    return rows.mask_BT * counts.world_size / (prompts * rows.lengths_B1.clamp(min=1))


register_normalizer("only_token_mean", only_token_mean, needs_group_tokens=True)
register_objective("dcpo", dcpo, "only_token_mean", zero_grad_at_zero_advantage=True)
config = GRPOConfig("out", loss_type="dcpo", epsilon=0.16, epsilon_high=0.2)
