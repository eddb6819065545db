r"""Length penalty of Kimi k1.5: Scaling Reinforcement Learning with LLMs

arXiv 2501.12599, section 2.3.3

$$
r_i = c_i + \begin{cases} \lambda_i & c_i = 1 \\ \min(0, \lambda_i) & c_i = 0 \end{cases},
\quad \lambda_i = \frac12 - \frac{\lvert o_i\rvert - \min_j \lvert o_j\rvert}{\max_j \lvert o_j\rvert -
\min_j \lvert o_j\rvert}
$$

$c_i$ is the first reward function, 1 for a correct answer. Pass `reward_funcs` after it. No penalty if all
completions of a group are equally long. The loss is the default.
"""

from groupwise import GRPOConfig, register_aggregation


def num_tokens(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def shorter_is_better(rewards_NF, weights_F, num_generations):
    correct, length = rewards_NF.T.reshape(2, -1, num_generations)
    low, high = length.amin(-1, keepdim=True), length.amax(-1, keepdim=True)
    bonus = (0.5 - (length - low) / (high - low)).nan_to_num(nan=0.0)
    bonus = bonus.where(correct == 1, bonus.clamp(max=0))
    return (correct + bonus).reshape(-1)


reward_funcs = [num_tokens]
register_aggregation("shorter_is_better", shorter_is_better)
config = GRPOConfig("out", multi_objective_aggregation="shorter_is_better")
