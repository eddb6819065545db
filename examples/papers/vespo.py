r"""VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training

arXiv 2602.10693, section not checked

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_i \mathrm{sg}\big[w_i^{k} e^{\lambda(1-w_i)}\big]\,A_i \sum_t
\log\pi_\theta(o_{it}),
\quad w_i = \prod_t \rho_{it}
$$

k and λ depend on the sign of the advantage. The mean over tokens is the one of TRL's implementation.
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out",
    loss_type="vespo",
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
)
