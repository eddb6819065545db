r"""IcePop: Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model

arXiv 2510.18855 and https://ringtech.notion.site/icepop, section not checked

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t}
m\Big(\frac{\pi_{\theta_\mathrm{old}}}{\pi_\mathrm{samp}}\Big)
\min\big(\rho_{it} A_i,\ \mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big),
\quad m(k) = \begin{cases} k & \alpha \le k \le \beta \\ 0 & \mathrm{otherwise} \end{cases}
$$

Tokens on which the engine and the trainer disagree have no gradient. The bounds 0.5 and 5 were not compared
with the paper.
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out",
    use_vllm=True,
    vllm_importance_sampling_mode="token_mask",
    vllm_importance_sampling_clip_min=0.5,
    vllm_importance_sampling_clip_max=5.0,
)
