r"""REINFORCE++ with baseline: REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage
Normalization

arXiv 2501.03262, version 9, equations 6 to 8

$$
L = \frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} \Big[ -\min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon, 1+\varepsilon)\,A_i\big)
+ \frac\beta2 \Big(\log\frac{\pi_\theta}{\pi_\mathrm{ref}}\Big)^2 \Big],
\quad A_i = \frac{r'_i - \mathrm{mean}_\mathrm{batch}(r')}{\mathrm{std}_\mathrm{batch}(r')},
\quad r'_i = r_i - \mathrm{mean}_\mathrm{group}(r)
$$

The batch statistics are those of completions, not of tokens. The KL weight is an example.
"""

from groupwise import GRPOConfig, register_advantage


def whitened_over_batch(rewards, settings):
    rewards_PG = (rewards.rewards_NF * rewards.weights_F).nansum(-1).view(-1, rewards.num_generations)
    centred_N = (rewards_PG - rewards_PG.mean(-1, keepdim=True)).reshape(-1)
    return (centred_N - centred_N.mean()) / (centred_N.std() + 1e-4)


register_advantage("whitened_over_batch", whitened_over_batch)
config = GRPOConfig("out", advantage_baseline="whitened_over_batch", beta=0.001, kl_estimator="k2")
