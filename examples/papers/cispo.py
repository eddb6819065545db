r"""CISPO: MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention

arXiv 2506.13585, equations 4 and 5

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t}
\mathrm{sg}\big[\min(\rho_{it}, \varepsilon_\mathrm{high})\big]\,A_i\,\log\pi_\theta(o_{it})
$$

Only the upper bound is used, as in the paper's experiments. `epsilon_high` is the bound of the ratio
itself. The paper does not give its value; ScaleRL (arXiv 2510.13786, appendix A.17) saw no difference
between 4, 5 and 8.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="cispo", epsilon_high=5.0)
