r"""Two-sided clipping: INTELLECT-2: A Reasoning Model Trained Through Globally Decentralized Reinforcement
Learning

arXiv 2505.07291, section 4.1

$$
L = \frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} \Big[ -\min\big(\min(\rho_{it}, \delta)\,A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big)
+ \beta \Big(\frac{\pi_\mathrm{ref}}{\pi_\theta} - \log\frac{\pi_\mathrm{ref}}{\pi_\theta} - 1\Big) \Big]
$$

The bound δ acts on tokens with a negative advantage, whose ratio the one-sided clip does not bound.
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out",
    delta=4.0,
    epsilon=0.2,
    beta=0.001,
    num_generations=16,
    learning_rate=3e-7,
    per_device_train_batch_size=16,
)
