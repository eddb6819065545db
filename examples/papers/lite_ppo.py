r"""Lite PPO: Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning

arXiv 2508.08221, version 3, section 5, with sections 4.1.2 and 4.3.1; sampling of section 3.1

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} \min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big),
\quad A_i = \frac{r_i - \mathrm{mean}_\mathrm{group}(r)}{\mathrm{std}_\mathrm{batch}(r)}
$$
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="dapo", scale_rewards="batch", temperature=0.99, top_p=0.99, top_k=100)
