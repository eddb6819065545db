r"""IcePop: Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model

arXiv 2510.18855, version 2, equations 1 and 2, section 2.3.2; bounds of section 2.3.4

$$
L = -\frac1N \sum_i \frac{1}{\lvert o_i\rvert} \sum_t
m\Big(\frac{\pi_{\theta_\mathrm{old}}}{\pi_\mathrm{samp}}\Big)
\min\big(\rho_{it} A_i,\ \mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big),
\quad m(k) = \begin{cases} k & \alpha \le k \le \beta \\ 0 & \mathrm{otherwise} \end{cases}
$$

Tokens on which the engine and the trainer disagree have no gradient. The weight of the paper's KL term is 0.
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out",
    loss_type="grpo",
    use_vllm=True,
    vllm_importance_sampling_mode="token_mask",
    vllm_importance_sampling_clip_min=0.5,
    vllm_importance_sampling_clip_max=5.0,
)
