r"""DPPO: Rethinking the Trust Region in LLM Reinforcement Learning

arXiv 2602.04879, equations 12 and 13 (binary total variation)

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} M_{it}\,\frac{\pi_\theta(o_{it})}{\mu(o_{it})}\,A_i,
\quad M_{it} = \begin{cases} 0 & A_i > 0,\ \pi_\theta(o_{it}) - \mu(o_{it}) > \delta \\
0 & A_i \le 0,\ \mu(o_{it}) - \pi_\theta(o_{it}) > \delta \\ 1 & \mathrm{otherwise} \end{cases}
$$

μ is the policy that sampled: the separate sampler if there is one, else the old policy. The mean over
tokens is the library's.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="dppo", loss_kwargs={"delta_low": 0.15, "delta_high": 0.15})
