r"""2-GRPO: It Takes Two: Your GRPO Is Secretly DPO

arXiv 2510.00977, section not checked

$$
L = -\frac1P \sum_p \frac12 \Big[ \frac{1}{\lvert o^+\rvert} \sum_t \min\big(\rho_t^+ a,\
\mathrm{clip}(\rho_t^+, 1-\varepsilon, 1+\varepsilon)\,a\big) + \frac{1}{\lvert o^-\rvert} \sum_t
\min\big({-\rho_t^- a},\
-\mathrm{clip}(\rho_t^-, 1-\varepsilon, 1+\varepsilon)\,a\big) \Big],
\quad a = \frac{r^+ - r^-}{2\,\mathrm{std}(r)}
$$

GRPO with two completions per prompt: the better one is contrasted with the other.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="grpo", num_generations=2)
