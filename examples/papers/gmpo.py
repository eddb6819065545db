r"""GMPO: Geometric-Mean Policy Optimization

arXiv 2507.20673, equation 4, algorithm 1

$$
L = -\frac1N \sum_i A_i \Big( \prod_t \tilde\rho_{it} \Big)^{1/\lvert o_i\rvert},
\quad \log\tilde\rho_{it} = \begin{cases} \min(\log\rho_{it}, \varepsilon) & A_i > 0 \\
\max(\log\rho_{it}, -\varepsilon) & A_i \le 0 \end{cases}
$$

The clip range is that of the logarithm, $(e^{-0.4}, e^{0.4})$ for the ratio.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="gmpo", loss_kwargs={"epsilon_low": 0.4, "epsilon_high": 0.4})
