r"""Kimi k1.5: Scaling Reinforcement Learning with LLMs

arXiv 2501.12599, equation 3, section 2.3.2

$$
L = \frac1N \sum_i \Big[ -(r_i - \mathrm{mean}(r)) \log\pi_\theta(o_i)
+ \frac\tau2 \Big(\log\frac{\pi_\theta(o_i)}{\pi_{\theta_\mathrm{old}}(o_i)}\Big)^2 \Big]
$$

The loss whose gradient the paper gives for online mirror descent. The paper does not give τ.
"""

from dataclasses import dataclass

from groupwise import GRPOConfig, register_objective


@dataclass(frozen=True)
class KimiSettings:
    tau: float = 0.1


def kimi_k1_5(inputs, settings):
    log_prob = (inputs.logps_BT * inputs.loss_mask_BT).sum(-1, keepdim=True)
    log_ratio = (inputs.log_ratio_BT * inputs.loss_mask_BT).sum(-1, keepdim=True)
    return -inputs.advantages_BX * log_prob + settings.tau / 2 * log_ratio**2


register_objective("kimi_k1_5", kimi_k1_5, "sequence_mean", settings=KimiSettings)
config = GRPOConfig("out", loss_type="kimi_k1_5", loss_kwargs={"tau": 0.1}, scale_rewards="none")
