r"""Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for LLM
Reasoning

arXiv 2506.01939, section 5.2

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} \mathbb{1}[H_{it} \ge \tau_{0.2}]\,\min\big(\rho_{it}
A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon_\mathrm{low}, 1+\varepsilon_\mathrm{high})\,A_i\big)
$$

$\tau_{0.2}$ is the entropy that a fifth of all loss tokens reach. DAPO with gradients of those tokens
alone; the sum is divided by the number of all tokens, as in TRL.
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out",
    loss_type="dapo",
    epsilon=0.2,
    epsilon_high=0.28,
    top_entropy_quantile=0.2,
    mask_truncated_completions=True,
)
