r"""DeepSeek-R1: Incentivizing Reasoning Capability in LLMs via Reinforcement Learning

arXiv 2501.12948, section not checked; values as TRL's paper index quotes them

$$
L = \frac1N \sum_i \frac{1}{\lvert o_i\rvert} \sum_t \Big[ -\min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big)
+ \beta \Big(\frac{\pi_\mathrm{ref}}{\pi_\theta} - \log\frac{\pi_\mathrm{ref}}{\pi_\theta} - 1\Big) \Big],
\quad \varepsilon = 10
$$

With a clip range of 10 there is no lower bound, and only tokens that became 11 times as likely are clipped.
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
