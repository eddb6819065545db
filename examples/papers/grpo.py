r"""GRPO: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models

arXiv 2402.03300, equations 3 and 4, section 4.1.2

$$
L = \frac1N \sum_i \frac{1}{\lvert o_i\rvert} \sum_t \Big[ -\min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big)
+ \beta \Big(\frac{\pi_\mathrm{ref}}{\pi_\theta} - \log\frac{\pi_\mathrm{ref}}{\pi_\theta} - 1\Big) \Big],
\quad A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r)}
$$

The clip range is not given in the paper; 0.2 is the default.
"""

from groupwise import GRPOConfig

config = GRPOConfig(
    "out",
    loss_type="grpo",
    beta=0.04,
    num_generations=64,
    max_completion_length=1024,
    per_device_train_batch_size=64,
)
