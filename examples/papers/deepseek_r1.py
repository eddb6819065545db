r"""DeepSeek-R1: Incentivizing Reasoning Capability in LLMs via Reinforcement Learning

arXiv 2501.12948, version 2, equations 1 to 3, section 2.1; values of section 3.2.1

$$
L = \frac1N \sum_i \frac{1}{\lvert o_i\rvert} \sum_t \Big[ -\min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big)
+ \beta \Big(\frac{\pi_\mathrm{ref}}{\pi_\theta} - \log\frac{\pi_\mathrm{ref}}{\pi_\theta} - 1\Big) \Big],
\quad \varepsilon = 10
$$

The recipe has DeepSeekMath's terms per token; equations 1 and 2 have the probabilities of whole completions.
With a clip range of 10 there is no lower bound, and only tokens that became 11 times as likely are clipped.
The paper replaces the reference by the policy every 400 steps: `sync_ref_model=True,
ref_model_mixup_alpha=1.0, ref_model_sync_steps=400`.
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out",
    loss_type="grpo",
    beta=0.001,
    epsilon=10.0,
    num_generations=16,
    max_completion_length=32768,
    per_device_train_batch_size=16,
)
