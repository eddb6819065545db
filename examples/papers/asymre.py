r"""AsymRE: Asymmetric REINFORCE for off-Policy Reinforcement Learning: Balancing positive and negative
rewards

arXiv 2506.20520, version 2, equation 4; offset of section 5.3

$$
L = -\frac1N \sum_i A_i \log\pi_\theta(o_i), \quad A_i = r_i - (\mathrm{mean}(r) + \delta_V)
$$

No importance ratio. A baseline below the mean, $\delta_V < 0$, weighs good completions more than bad ones.
The paper's rewards are 1 and -1.
"""

from groupwise import GRPOConfig, register_advantage, register_objective

DELTA_V = -0.1


def asymre(inputs, settings):
    return -inputs.advantages_BX * inputs.logps_BT


def lowered_mean(rewards, settings):
    rewards_PG = (rewards.rewards_NF * rewards.weights_F).nansum(-1).view(-1, rewards.num_generations)
    return (rewards_PG - (rewards_PG.mean(-1, keepdim=True) + DELTA_V)).reshape(-1)


register_objective("asymre", asymre, "sequence_sum", zero_grad_at_zero_advantage=True)
register_advantage("lowered_mean", lowered_mean)
config = GRPOConfig("out", loss_type="asymre", advantage_baseline="lowered_mean")
