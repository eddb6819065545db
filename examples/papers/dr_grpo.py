r"""Dr. GRPO: Understanding R1-Zero-Like Training: A Critical Perspective

arXiv 2503.20783, section 3.2

$$
L = -\frac{1}{N L_\mathrm{max}} \sum_{i,t} \min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big), \quad A_i = r_i - \mathrm{mean}(r)
$$

Neither the length of a completion nor the standard deviation of its group scales its gradient.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="dr_grpo", scale_rewards="none", max_completion_length=3000)
