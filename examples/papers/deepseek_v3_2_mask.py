r"""Off-policy sequence masking: DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models

arXiv 2512.02556, section 3.1, equation 9; the threshold is TRL's example

$$
L = -\frac1N \sum_i \frac{M_i}{\lvert o_i\rvert} \sum_t \min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big),
\quad M_i = \begin{cases} 0 & A_i < 0,\ \frac{1}{\lvert o_i\rvert}\sum_t
\log\frac{\pi_{\theta_\mathrm{old}}}{\pi_\theta} > \delta \\ 1 & \mathrm{otherwise} \end{cases}
$$

The sampler's log-probs take the place of the old ones where a separate sampler reports them.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="grpo", off_policy_mask_threshold=0.5)
