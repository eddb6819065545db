"""Conditions that settings depend on: ``no_effect_unless`` and ``requires`` of a `Setting`."""

from __future__ import annotations

from functools import partial

from groupwise.config.settings import Condition, on
from groupwise.core import surrogates
from groupwise.core.advantages import AGGREGATIONS
from groupwise.core.objectives import OBJECTIVES, Surrogate


def _surrogate(text: str, surrogate: Surrogate) -> Condition:
    """Return the condition that the loss uses ``surrogate``, or a registered one: it may read any field."""
    others = {surrogates.clipped, surrogates.cispo, surrogates.sapo, surrogates.vespo} - {surrogate}
    return Condition(text, lambda c: OBJECTIVES[c.loss_type].surrogate not in others)


CLIPPED_RATIO = _surrogate("loss_type is grpo, bnpo, dr_grpo, dapo or luspo", surrogates.clipped)
SAPO = _surrogate("loss_type='sapo'", surrogates.sapo)
VESPO = _surrogate("loss_type='vespo'", surrogates.vespo)
SEQUENCES = Condition(  # the sum of a token mean is the same however the tokens are split
    "loss_type divides by a number of sequences, as grpo, sapo, dr_grpo and luspo do",
    lambda c: OBJECTIVES[c.loss_type].normalizer not in ("token_mean", "local_token_mean", "prompt_mean"),
)
KL = Condition("beta > 0", lambda c: c.beta > 0)
VLLM = on("use_vllm")
NOT_VLLM = Condition("use_vllm=False", lambda c: not c.use_vllm)
COLOCATE = Condition(
    "use_vllm=True with vllm_mode='colocate'", lambda c: c.use_vllm and c.vllm_mode == "colocate"
)
SERVER = Condition("use_vllm=True with vllm_mode='server'", lambda c: c.use_vllm and c.vllm_mode == "server")
CORRECTION = on("vllm_importance_sampling_correction")
CORRECTION_WITHOUT_VLLM = Condition(
    "vllm_importance_sampling_correction=True with use_vllm=False",
    lambda c: c.vllm_importance_sampling_correction and not c.use_vllm,
)
RETRY = Condition("rollout_on_error='retry'", lambda c: c.rollout_on_error == "retry")
PASS_AT_K = Condition("eval_pass_at_k is set", lambda c: c.eval_pass_at_k is not None)

#: Requirement between settings of equal rank, which is also checked when one of them changes during a run.
_lasting = partial(Condition, lasts=True)


def _has(name: str, *values: object, because: str, only_if: Condition | None = None) -> Condition:
    """Return the lasting condition that a setting has one of the values, the first of which is the way out.

    Args:
        only_if: where this does not hold, every value is valid.
    """
    text = f"{name}={' or '.join(map(repr, values))}"
    return _lasting(
        f"{text} if {only_if.text}" if only_if else text,
        lambda c: getattr(c, name) in values or (only_if is not None and not only_if.holds(c)),
        because,
        (name,),
        f"{name}={values[0]!r}",
    )


# Batches and generation

K_OF_GENERATIONS = _lasting(
    "each k at most num_generations_eval",
    lambda c: max(c.eval_pass_at_k) <= (c.num_generations_eval or max(c.eval_pass_at_k)),
    reads=("num_generations_eval",),
    nearest="eval_pass_at_k=[1, {c.num_generations_eval}]",
)
DIVIDES_PROCESSES = Condition(
    "a divisor of the number of processes",
    lambda c: not COLOCATE.holds(c) or c.world_size % c.vllm_tensor_parallel_size == 0,
    reads=("world_size",),
)
STALENESS = (
    SERVER,
    _lasting(
        "steps_per_generation x num_iterations divisible by gradient_accumulation_steps",
        lambda c: (c.steps_per_generation or 1) * c.num_iterations % c.gradient_accumulation_steps == 0,
        "the next batch would be generated within an optimizer step",
        ("steps_per_generation", "num_iterations", "gradient_accumulation_steps"),
        "steps_per_generation={c.gradient_accumulation_steps}",
    ),
    _has(
        "vllm_importance_sampling_correction",
        True,
        because="completions are sampled from older weights, which is not corrected",
    ),
    _lasting(
        "at most 1 with dynamic_sampling=True",
        lambda c: c.rollout_staleness <= 1 or not c.dynamic_sampling,
        "the prompts of a batch are known when the one before is full",
        ("dynamic_sampling",),
        "rollout_staleness=1",
    ),
)

# Loss

SUM_OF_REWARDS = _lasting(
    "a multi_objective_aggregation that normalizes the sum",
    lambda c: c.beta == 0 or not AGGREGATIONS[c.multi_objective_aggregation].normalize_first,
    "the KL is subtracted from one reward, and each reward function is normalized first",
    ("multi_objective_aggregation",),
)
KL_IN_LOSS = _has(
    "kl_in_reward",
    False,
    because="it corrects the KL in the loss, which has none",
    only_if=KL,
)
BELOW_CLIP_MAX = _lasting(
    "a value of at most vllm_importance_sampling_clip_max",
    lambda c: (
        c.vllm_importance_sampling_clip_max is None
        or c.vllm_importance_sampling_clip_min <= c.vllm_importance_sampling_clip_max
    ),
    reads=("vllm_importance_sampling_clip_max",),
    nearest="vllm_importance_sampling_clip_min={c.vllm_importance_sampling_clip_max}",
)
BOUNDS_OF_TRUNCATION = _lasting(
    "a clip_max or a clip_min to truncate to",
    lambda c: (
        not (c.vllm_importance_sampling_correction and c.vllm_importance_sampling_mode.endswith("_truncate"))
        or {c.vllm_importance_sampling_clip_max, c.vllm_importance_sampling_clip_min} != {None}
    ),
    nearest="vllm_importance_sampling_clip_max=3.0",
)
UPDATE_BALANCE = _has("use_liger_kernel", False, because="Liger's forward sums no routers")
ROUTER_REPLAY = (
    _has("use_liger_kernel", False, because="Liger's fused loss replays no routing"),
    _has("torch_compile", False, because="a compiled model replays no routing"),
    _has(
        "use_vllm",
        False,
        because="vLLM returns routed experts only with its model runner V2 on a GPU, which is not supported",
        only_if=Condition("router_replay is R3", lambda c: c.router_replay == "R3"),
    ),
)
PADDED_ROWS = _has(
    "sequence_layout",
    "auto",
    "padded",
    because="the noise is scaled by the length of a row, which has many sequences in other layouts",
)


_KL_IS_IN_LOSS = Condition("the KL is in the loss", lambda c: c.beta != 0 and not c.kl_in_reward)
_LIGER_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
#: Limits of Liger's fused loss; that on truncated sampling is a rule of ``validation.py``.
LIGER = (
    _has("loss_type", *_LIGER_LOSSES, because="Liger has its own surrogates"),
    _has(
        "importance_sampling_level",
        "token",
        because="Liger has no sequence ratio there",
        only_if=Condition(
            "loss_type is cispo, sapo or vespo", lambda c: c.loss_type in ("cispo", "sapo", "vespo")
        ),
    ),
    _lasting(
        "importance_sampling_level='sequence' and no KL in the loss if loss_type is luspo",
        lambda c: (
            c.loss_type != "luspo"
            or (c.importance_sampling_level == "sequence" and not _KL_IS_IN_LOSS.holds(c))
        ),
        "Liger includes padding in the mean of token terms",
        ("loss_type", "importance_sampling_level", "beta"),
    ),
    _has("kl_estimator", "k3", because="Liger has no other estimator", only_if=_KL_IS_IN_LOSS),
    _has("off_policy_mask_threshold", None, because="Liger has no off-policy sequence mask"),
    _has("top_entropy_quantile", 1.0, because="Liger has one mask for policy loss and KL"),
    _has("entropy_coef", 0.0, because="Liger computes no entropy"),
    _has("use_adaptive_entropy", False, because="Liger computes no entropy"),
    _has("sequence_layout", "padded", "auto", because="Liger requires rectangular batches"),
    _has("logprob_head", "auto", because="Liger's fused loss has its own head"),
)
