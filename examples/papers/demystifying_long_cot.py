r"""Cosine length reward and repetition penalty: Demystifying Long Chain-of-Thought Reasoning in LLMs

arXiv 2502.03373, appendices C.1 and C.2

$$
r_i = v_1 + \tfrac12 (v_0 - v_1)\Big(1 + \cos\frac{\pi \min(\lvert o_i\rvert, L)}{L}\Big)
- \frac{n_i - u_i}{n_i}, \quad (v_0, v_1) = \begin{cases} (1, 0.5) & \mathrm{correct} \\ (-1, -0.5) &
\mathrm{wrong} \end{cases}
$$

$u_i$ of the $n_i$ trigrams of token ids are distinct. The values are the defaults of the library and of
TRL. The dataset has a `solution` column. The loss is the default.
"""

from groupwise import GRPOConfig
from groupwise.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward

reward_funcs = [
    get_cosine_scaled_reward(max_len=1024),
    get_repetition_penalty_reward(ngram_size=3, max_penalty=-1.0),
]
config = GRPOConfig("out", max_completion_length=1024)
