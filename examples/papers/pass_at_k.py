r"""Pass@k Training for Adaptively Balancing Exploration and Exploitation of Large Reasoning Models

arXiv 2508.10751, equations 11, 12, 14 and 15

$$
A_i = \begin{cases} (1 - \bar R)/\sigma & r_i > 0 \\
\Big(1 - \bar R - \binom{n-1}{k-1}\big/\binom{G-1}{k-1}\Big)\big/\sigma & r_i \le 0 \end{cases},
\quad \bar R = 1 - \binom{n}{k}\big/\binom{G}{k}, \quad \sigma = \sqrt{\bar R(1 - \bar R)}
$$

n of G completions are wrong. Advantages are those of all subsets of k completions, which are solved if one
of them is. Zero where $\sigma = 0$. The loss is DAPO's.
"""

import math

import torch

from groupwise import GRPOConfig, register_advantage

K = 4


def over_subsets(solved_G):
    size, wrong = len(solved_G), int((1 - solved_G).sum())
    mean = 1 - math.comb(wrong, K) / math.comb(size, K)
    share = math.comb(wrong - 1, K - 1) / math.comb(size - 1, K - 1) if wrong else 0.0
    if not 0 < mean < 1:
        return torch.zeros_like(solved_G)
    return (1 - mean - share * (1 - solved_G)) / math.sqrt(mean * (1 - mean))


def pass_at_k(rewards, settings):
    solved_N = ((rewards.rewards_NF * rewards.weights_F).nansum(-1) > 0).to(rewards.rewards_NF)
    return torch.cat([over_subsets(group) for group in solved_N.split(rewards.num_generations)])


register_advantage("pass_at_k", pass_at_k)
config = GRPOConfig("out", advantage_baseline="pass_at_k", epsilon=0.2, epsilon_high=0.28)
