r"""Unbiased KL estimate: DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models

arXiv 2512.02556, section 3.1; the KL weight is that of DeepSeek-R1

$$
L = \frac1N \sum_i \frac{1}{\lvert o_i\rvert} \sum_t \Big[ -\min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big)
+ \beta\,\rho_{it} \Big(\frac{\pi_\mathrm{ref}}{\pi_\theta} - \log\frac{\pi_\mathrm{ref}}{\pi_\theta} -
1\Big) \Big]
$$
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="grpo", beta=0.001, use_bias_correction_kl=True)
