r"""RLOO: Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs

arXiv 2402.14740, version 2, section 2.3, and equation 3 for $R_i$; 4 completions as in table 1, KL weight of
its TL;DR runs

$$
L = -\frac1N \sum_i A_i \log\pi_\theta(o_i), \quad A_i = R_i - \frac{1}{G-1}\sum_{j \ne i} R_j,
\quad R_i = r_i - \beta \log\frac{\pi_{\theta_\mathrm{old}}(o_i)}{\pi_\mathrm{ref}(o_i)}
$$
"""

from groupwise import GRPOConfig, register_objective


def rloo(inputs, settings):
    return -inputs.advantages_BX * inputs.logps_BT


register_objective("rloo", rloo, "sequence_sum", zero_grad_at_zero_advantage=True)
config = GRPOConfig(
    "out",
    loss_type="rloo",
    advantage_baseline="leave_one_out",
    scale_rewards="none",
    beta=0.03,
    kl_in_reward=True,
    kl_estimator="k1",
    num_generations=4,
)
