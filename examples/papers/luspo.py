r"""LUSPO: Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length Variation
in RLVR

arXiv 2602.05261, section 5.1 for the clip range

$$
L = -\frac1N \sum_i \lvert o_i\rvert \min\big(s_i A_i,\
\mathrm{clip}(s_i, 1-\varepsilon_\mathrm{low}, 1+\varepsilon_\mathrm{high})\,A_i\big),
\quad s_i = \Big(\frac{\pi_\theta(o_i)}{\pi_{\theta_\mathrm{old}}(o_i)}\Big)^{1/\lvert o_i\rvert}
$$
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out", loss_type="luspo", importance_sampling_level="sequence", epsilon=2e-3, epsilon_high=2.5e-3
)
