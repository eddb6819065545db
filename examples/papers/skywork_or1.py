r"""Skywork-OR1: adaptive entropy control: Skywork Open Reasoner 1 Technical Report

arXiv 2505.22312, section 4

$$
L_k = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} \Big[ \min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big) + \alpha_k H_{it} \Big],
\quad \alpha_k = c_k\,\mathbb{1}[e_{k-1} \le e^*],
\quad c_k = \begin{cases} c_{k-1} + \Delta & e_{k-1} \le e^* \\ c_{k-1} - \Delta & \mathrm{otherwise}
\end{cases}
$$

$e_k$ is the mean token entropy in step k, $c_0 = 0$.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", use_adaptive_entropy=True, entropy_target=0.2, entropy_coef_delta=0.005)
