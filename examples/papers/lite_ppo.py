r"""Lite PPO: Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning

arXiv 2508.08221, section not checked; values as TRL's paper index quotes them

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} \min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big),
\quad A_i = \frac{r_i - \mathrm{mean}_\mathrm{group}(r)}{\mathrm{std}_\mathrm{batch}(r)}
$$
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="dapo", scale_rewards="batch", temperature=0.99, top_p=0.99, top_k=100)
