r"""TIS: Truncated Importance Sampling

https://fengyao.notion.site/off-policy-rl, a blog; the bound is TRL's

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t}
\min\Big(\frac{\pi_{\theta_\mathrm{old}}}{\pi_\mathrm{samp}}, C\Big)
\min\big(\rho_{it} A_i,\ \mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big)
$$

$\pi_\mathrm{samp}$ are the probabilities that the engine reports.
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out",
    use_vllm=True,
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_clip_max=2.0,
)
