r"""2-GRPO: It Takes Two: Your GRPO Is Secretly DPO

arXiv 2510.00977, version 3, section 4.3; equation 7 for two completions

$$
L = -\frac1P \sum_p \frac12 \Big[ \frac{1}{\lvert o^+\rvert} \sum_t \min\big(\rho_t^+ a,\
\mathrm{clip}(\rho_t^+, 1-\varepsilon, 1+\varepsilon)\,a\big) + \frac{1}{\lvert o^-\rvert} \sum_t
\min\big({-\rho_t^- a},\
-\mathrm{clip}(\rho_t^-, 1-\varepsilon, 1+\varepsilon)\,a\big) \Big],
\quad a = \frac{r^+ - r^-}{2\,\mathrm{std}(r)}
$$

GRPO with two completions per prompt: the better one is contrasted with the other. The paper's advantages
are 1 and -1; with divisor $G - 1$ they are 0.71 and -0.71. Its variant with re-sampling is
`dynamic_sampling=True`.
"""

from groupwise import GRPOConfig

config = GRPOConfig("out", loss_type="grpo", num_generations=2)
