r"""GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization

arXiv 2601.05242, section not checked; equation as in TRL's paper index

$$
A_i = \frac{a_i - \mathrm{mean}_\mathrm{batch}(a)}{\mathrm{std}_\mathrm{batch}(a)},
\quad a_i = \sum_f w_f \frac{r_{if} - \mathrm{mean}(r_f)}{\mathrm{std}(r_f)}
$$

Each reward function is normalized within its group before the weighted sum. The weights are an example for
two functions.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5])
