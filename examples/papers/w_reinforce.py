r"""W-REINFORCE: The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning

arXiv 2506.01347, section 4

$$
A_i = \begin{cases} \lambda & r_i > 0 \\ -1 & r_i \le 0 \end{cases}
$$

$\lambda = 1$ is REINFORCE, $\lambda = 0$ trains on negative samples alone (NSR). On-policy, the gradient of
the default loss is the one of the paper's likelihood terms, averaged over tokens.
"""

from groupwise import GRPOConfig, register_advantage

WEIGHT = 0.1


def weighted_signs(rewards, settings):
    correct_N = (rewards.rewards_NF * rewards.weights_F).nansum(-1) > 0
    return rewards.rewards_NF.new_full(correct_N.shape, -1.0).masked_fill(correct_N, WEIGHT)


register_advantage("weighted_signs", weighted_signs)
config = GRPOConfig("out", advantage_baseline="weighted_signs")
