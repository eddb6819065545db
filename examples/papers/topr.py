r"""TOPR: Tapered Off-Policy REINFORCE: Stable and Efficient Reinforcement Learning for LLMs

arXiv 2503.14286, version 2, equation 8, section 3

$$
L = -\frac1N \Big( \sum_{i:\,r_i > 0} r_i \log\pi_\theta(o_i)
+ \sum_{i:\,r_i \le 0} \mathrm{sg}\Big[\min\Big(\frac{\pi_\theta(o_i)}{\pi_{\theta_\mathrm{old}}(o_i)},
1\Big)\Big]\,
r_i \log\pi_\theta(o_i) \Big)
$$

Rewards are 1 and -1 and stay as they are: no baseline.
"""

import torch

from groupwise import GRPOConfig, register_advantage, register_objective


def topr(inputs, settings):
    log_ratio = (inputs.log_ratio_BT.detach() * inputs.loss_mask_BT).sum(-1, keepdim=True)
    taper = torch.where(inputs.advantages_BX > 0, 0.0, log_ratio.clamp(max=0)).exp()
    return -taper * inputs.advantages_BX * inputs.logps_BT


def raw_reward(rewards, settings):
    return (rewards.rewards_NF * rewards.weights_F).nansum(-1)


register_objective("topr", topr, "sequence_sum", zero_grad_at_zero_advantage=True)
register_advantage("raw_reward", raw_reward)
config = GRPOConfig("out", loss_type="topr", advantage_baseline="raw_reward")
