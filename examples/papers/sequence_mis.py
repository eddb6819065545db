r"""Sequence-level masked importance sampling: When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch

https://yingru.notion.site/When-Speed-Kills-Stability-Demystifying-RL-Collapse-from-the-Training-Inference-Mismatch-271211a558b7808d8b12d403fd15edda,
a blog; the bound is TRL's

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} w_i\,\mathbb{1}[w_i \le C]\,
\min\big(\rho_{it} A_i,\ \mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big),
\quad w_i = \prod_t \frac{\pi_{\theta_\mathrm{old}}(o_{it})}{\pi_\mathrm{samp}(o_{it})}
$$
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out",
    use_vllm=True,
    vllm_importance_sampling_mode="sequence_mask",
    vllm_importance_sampling_clip_max=2.0,
)
