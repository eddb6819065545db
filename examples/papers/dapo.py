r"""DAPO: An Open-Source LLM Reinforcement Learning System at Scale

arXiv 2503.14476, equations 8 and 13, section 4.1

$$
L = -\frac{1}{\sum_i \lvert o_i\rvert} \sum_{i,t} \min\big(\rho_{it} A_i,\
\mathrm{clip}(\rho_{it}, 1-\varepsilon_\mathrm{low}, 1+\varepsilon_\mathrm{high})\,A_i\big),
\quad r_i = r_i^\mathrm{rule} + \begin{cases} 0 & \lvert o_i\rvert \le L_\mathrm{max} - L_\mathrm{cache}
\\
\frac{(L_\mathrm{max} - L_\mathrm{cache}) - \lvert o_i\rvert}{L_\mathrm{cache}} & \lvert o_i\rvert \le
L_\mathrm{max} \\
-1 & \mathrm{otherwise} \end{cases}
$$

Equation 8 is the mean over the tokens of a prompt, then over prompts; `loss_type="dapo"` is the mean over all
tokens, as in TRL. Pass `reward_funcs` after the rule-based reward. Groups without reward variance are sampled
again, and completions that reach the length limit are masked.
"""

from groupwise import GRPOConfig
from groupwise.rewards import get_soft_overlong_punishment

reward_funcs = [get_soft_overlong_punishment(max_completion_len=20480, soft_punish_cache=4096)]
config = GRPOConfig(
    "out",
    loss_type="dapo",
    epsilon=0.2,
    epsilon_high=0.28,
    num_generations=16,
    max_completion_length=20480,
    mask_truncated_completions=True,
    dynamic_sampling=True,
    per_device_train_batch_size=16,
)
