r"""SAPO: Soft Adaptive Policy Optimization

arXiv 2511.20347, equations 5 and 6, section 3; temperatures as appendix D of the VESPO
paper, arXiv 2602.10693, quotes them

$$
L = -\frac1N \sum_i \frac{1}{\lvert o_i\rvert} \sum_t
\frac{4}{\tau_i}\,\sigma\big(\tau_i(\rho_{it}-1)\big)\,A_i,
\quad \tau_i = \begin{cases} \tau_\mathrm{pos} & A_i > 0 \\ \tau_\mathrm{neg} & A_i \le 0 \end{cases}
$$
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
