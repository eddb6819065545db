r"""Magistral

arXiv 2506.10910, section 2.1

$$
L = -\frac1P \sum_p \frac{1}{\sum_{i \in p} \lvert o_i\rvert} \sum_{i \in p} \sum_t \min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon_\mathrm{low}, 1+\varepsilon_\mathrm{high})\,A_i\big),
\quad A_i = \frac{a_i - \mathrm{mean}(a)}{\mathrm{std}(a)}, \quad a_i = r_i -
\mathrm{mean}_\mathrm{group}(r)
$$

No KL term, and no groups without reward variance. The paper normalizes advantages within a minibatch, this
recipe within the generation batch; they are the same if `steps_per_generation` is
`gradient_accumulation_steps`, as by default. $\varepsilon_\mathrm{high}$ was 0.26 to 0.28; the paper does not
give $\varepsilon_\mathrm{low}$.
"""

import torch

from groupwise import GRPOConfig, register_advantage, register_objective


def clipped(inputs, settings):
    ratio, advantages = inputs.ratio_BX, inputs.advantages_BX
    bounded = ratio.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def minibatch_normalized(rewards, settings):
    rewards_PG = (rewards.rewards_NF * rewards.weights_F).nansum(-1).view(-1, rewards.num_generations)
    centred_N = (rewards_PG - rewards_PG.mean(-1, keepdim=True)).reshape(-1)
    return (centred_N - centred_N.mean()) / (centred_N.std() + 1e-4)


register_objective("magistral", clipped, "prompt_mean", zero_grad_at_zero_advantage=True)
register_advantage("minibatch_normalized", minibatch_normalized)
config = GRPOConfig(
    "out",
    loss_type="magistral",
    advantage_baseline="minibatch_normalized",
    epsilon=0.2,
    epsilon_high=0.28,
    dynamic_sampling=True,
)
