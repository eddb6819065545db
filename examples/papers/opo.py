r"""OPO: On-Policy RL with Optimal Reward Baseline

arXiv 2505.23585, version 2, section 3.2; equation as in the authors' addition to verl,
https://verl.readthedocs.io/en/latest/algo/opo.html

$$
A_i = r_i - \frac{\sum_j \lvert o_j\rvert\, r_j}{\sum_j \lvert o_j\rvert}
$$

The first reward function is $r$. Pass `reward_funcs` after it; its weight is 0. Lengths include tool
tokens. The loss is the default; the paper trains strictly on-policy.
"""

from groupwise import GRPOConfig, register_advantage


def length(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def length_weighted(rewards, settings):
    score, tokens = rewards.rewards_NF.T.reshape(2, -1, rewards.num_generations)
    baseline = (tokens * score).sum(-1, keepdim=True) / tokens.sum(-1, keepdim=True)
    return (score - baseline).reshape(-1)


reward_funcs = [length]
register_advantage("length_weighted", length_weighted)
config = GRPOConfig("out", advantage_baseline="length_weighted", reward_weights=[1.0, 0.0])
