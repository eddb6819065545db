r"""MaxRL: Maximum Likelihood Reinforcement Learning

arXiv 2602.02710, version 3, section 4.3 and algorithm 1

$$
A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{mean}(r)}
$$

Zero where the mean is 0. The loss is the default.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", advantage_baseline="maxrl")
