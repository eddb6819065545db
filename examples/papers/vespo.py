r"""VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training

arXiv 2602.10693, version 3, equation 20, section 3.5; values of section 4.1

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_i \mathrm{sg}\big[w_i^{k} e^{\lambda(1-w_i)}\big]\,A_i \sum_t
\log\pi_\theta(o_{it}),
\quad w_i = \prod_t \rho_{it}, \quad A_i = r_i - \mathrm{mean}(r)
$$

k and λ depend on the sign of the advantage. Equation 20 is a gradient for whole sequences, and the paper's
pseudo-code leaves the mean open; the authors' code, <https://github.com/FloyedShen/VESPO>, takes the mean
over tokens. Its scripts keep verl's default, which also divides advantages by the standard deviation.
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out",
    loss_type="vespo",
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
    scale_rewards="none",
)
