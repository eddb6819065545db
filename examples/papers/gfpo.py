r"""GFPO: Sample More to Think Less: Group Filtered Policy Optimization for Concise Reasoning

arXiv 2508.09726, equation 2, algorithm 1, section 4

$$
L = \frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} \Big[ -\min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big)
+ \beta \Big(\frac{\pi_\mathrm{ref}}{\pi_\theta} - \log\frac{\pi_\mathrm{ref}}{\pi_\theta} - 1\Big)
- \gamma H_{it} \Big], \quad A_i = \begin{cases}
\frac{r_i - \mathrm{mean}_S(r)}{\mathrm{std}_S(r)} & i \in S \\ 0 & \mathrm{otherwise} \end{cases}
$$

S holds the shorter half of each group ("8 of 16"). The standard deviation has the divisor $\lvert S\rvert$.
Pass `reward_funcs` after the first reward function, $r$; its weight is 0. The equation names the old policy
in the KL; here it is the reference.
"""

import torch

from groupwise import GRPOConfig, register_advantage


def completion_length(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def shorter_half(rewards, settings):
    score, length = rewards.rewards_NF.T.reshape(2, -1, rewards.num_generations)
    rank = length.argsort(dim=-1, stable=True).argsort(dim=-1)
    kept = score.masked_fill(rank >= rewards.num_generations // 2, torch.nan)
    centred = kept - kept.nanmean(-1, keepdim=True)
    return (centred / (centred.square().nanmean(-1, keepdim=True).sqrt() + 1e-4)).nan_to_num(0.0).reshape(-1)


reward_funcs = [completion_length]
register_advantage("shorter_half", shorter_half)
config = GRPOConfig(
    "out",
    advantage_baseline="shorter_half",
    reward_weights=[1.0, 0.0],
    beta=0.001,
    entropy_coef=0.001,
    num_generations=16,
    per_device_train_batch_size=16,
)
