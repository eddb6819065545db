r"""GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization

arXiv 2601.05242, version 1, equations 4, 6 and 7, sections 3.1 and 3.2

$$
A_i = \frac{a_i - \mathrm{mean}_\mathrm{batch}(a)}{\mathrm{std}_\mathrm{batch}(a)},
\quad a_i = \sum_f w_f \frac{r_{if} - \mathrm{mean}(r_f)}{\mathrm{std}(r_f)}
$$

Each reward function is normalized within its group before the weighted sum. The weights are an example for
two functions. The loss is the default; equation 3 of the paper is that of `loss_type="grpo"`.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5])
