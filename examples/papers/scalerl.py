r"""ScaleRL: The Art of Scaling Reinforcement Learning Compute for LLMs

arXiv 2510.13786, sections 3.2 and 4; bounds of 4, 5 and 8 did equally well, appendix A.17

$$
L = -\frac1P \sum_p \frac{1}{\sum_{i \in p} \lvert o_i\rvert} \sum_{i \in p} \sum_t
\mathrm{sg}\big[\min(\rho_{it}, \varepsilon_\mathrm{max})\big]\,A_i \log\pi_\theta(o_{it}),
\quad A_i = \frac{r_i - \mathrm{mean}_\mathrm{group}(r)}{\mathrm{std}_\mathrm{batch}(r -
\mathrm{mean}_\mathrm{group}(r))}
$$

The paper leaves out prompts without reward variance and, for good, prompts that are solved in more than 90
% of the attempts; the sampler of a dataset would do that.
"""

from groupwise import GRPOConfig, register_advantage


def batch_scaled(rewards, settings):
    rewards_PG = (rewards.rewards_NF * rewards.weights_F).nansum(-1).view(-1, rewards.num_generations)
    centred_N = (rewards_PG - rewards_PG.mean(-1, keepdim=True)).reshape(-1)
    return centred_N / (centred_N.std() + 1e-4)


register_advantage("batch_scaled", batch_scaled)
config = GRPOConfig(
    "out",
    loss_type="scalerl",
    epsilon_high=5.0,
    advantage_baseline="batch_scaled",
    cast_lm_head_to_fp32=True,
    num_generations=16,
    per_device_train_batch_size=16,
)
