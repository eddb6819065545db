r"""QAE: Quantile Advantage Estimation: Stabilizing RLVR for LLM Reasoning

arXiv 2509.22611, equation 3

$$
A_i = \frac{r_i - b_K}{\mathrm{std}(r)}, \quad b_K = \inf\{x : \tfrac1G \textstyle\sum_j \mathbb{1}[r_j
\le x] \ge K\}
$$

With rewards 0 and 1, only successes count for prompts that are solved by at most a share $1 - K$, else only
failures. The loss is DAPO's.
"""

import math

from groupwise import GRPOConfig, register_advantage

K = 0.4


def quantile_baseline(rewards, settings):
    rewards_PG = (rewards.rewards_NF * rewards.weights_F).nansum(-1).view(-1, rewards.num_generations)
    rank = math.ceil(K * rewards.num_generations)
    baseline_P1 = rewards_PG.sort(dim=-1).values[:, rank - 1 : rank]
    return ((rewards_PG - baseline_P1) / (rewards_PG.std(-1, keepdim=True) + 1e-4)).reshape(-1)


register_advantage("quantile", quantile_baseline)
config = GRPOConfig("out", advantage_baseline="quantile", epsilon=0.2, epsilon_high=0.28)
