r"""GSPO: Group Sequence Policy Optimization

arXiv 2507.18071, equations 5 and 7, section 5.1

$$
L = -\frac1N \sum_i \min\big(s_i A_i,\ \mathrm{clip}(s_i, 1-\varepsilon_\mathrm{low},
1+\varepsilon_\mathrm{high})\,A_i\big),
\quad s_i = \Big(\frac{\pi_\theta(o_i)}{\pi_{\theta_\mathrm{old}}(o_i)}\Big)^{1/\lvert o_i\rvert}
$$

The ratio differs from 1 only if a generation is used for several updates.
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out",
    loss_type="grpo",
    importance_sampling_level="sequence",
    epsilon=3e-4,
    epsilon_high=4e-4,
    steps_per_generation=4,
)
