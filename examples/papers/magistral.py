r"""Magistral

arXiv 2506.10910, section not checked

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} \min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon_\mathrm{low}, 1+\varepsilon_\mathrm{high})\,A_i\big),
\quad A_i = \frac{a_i - \mathrm{mean}(a)}{\mathrm{std}(a)}, \quad a_i = r_i -
\mathrm{mean}_\mathrm{group}(r)
$$

No KL term. The paper normalizes advantages within a minibatch, this recipe within the generation batch;
they are the same if `steps_per_generation` is `gradient_accumulation_steps`, as by default.
$\varepsilon_\mathrm{high}$ was 0.26 to 0.28.
"""

from groupwise import GRPOConfig, register_advantage


def minibatch_normalized(rewards, settings):
    rewards_PG = (rewards.rewards_NF * rewards.weights_F).nansum(-1).view(-1, rewards.num_generations)
    centred_N = (rewards_PG - rewards_PG.mean(-1, keepdim=True)).reshape(-1)
    return (centred_N - centred_N.mean()) / (centred_N.std() + 1e-4)


register_advantage("minibatch_normalized", minibatch_normalized)
config = GRPOConfig("out", advantage_baseline="minibatch_normalized", epsilon=0.2, epsilon_high=0.28)
