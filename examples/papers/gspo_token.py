r"""GSPO-token: Group Sequence Policy Optimization

arXiv 2507.18071, section 4.3

$$
L = -\frac1N \sum_i \frac{1}{\lvert o_i\rvert} \sum_t \min\big(s_{it} A_{it},\
\mathrm{clip}(s_{it}, 1-\varepsilon_\mathrm{low}, 1+\varepsilon_\mathrm{high})\,A_{it}\big),
\quad s_{it} = \mathrm{sg}[s_i]\,\frac{\pi_\theta(o_{it})}{\mathrm{sg}[\pi_\theta(o_{it})]}
$$

Differs from GSPO where advantages differ between the tokens of a completion, as with step rewards.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="gspo_token", epsilon=3e-4, epsilon_high=4e-4, steps_per_generation=4)
