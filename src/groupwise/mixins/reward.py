"""Completions to rewards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers import TrainerState

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import above_lowest, has_variance, nan_std, total_rewards, with_small_groups
from groupwise.core.metrics import Mean, Metrics, Reduction, Sum, merge_metrics
from groupwise.distributed import rows_of_rank
from groupwise.errors import RewardError, TrainingError, warn_once
from groupwise.random_state import RandomState
from groupwise.records import RewardBatch, RolloutBatch
from groupwise.records.rollout import GroupRewards
from groupwise.reporting.metrics import checked_metrics
from groupwise.rewards.process import StepScorer, check_step_order
from groupwise.rewards.runtime.calling import Reward, RewardCalls, call_rewards
from groupwise.rewards.runtime.partial import PartialReward
from groupwise.rewards.texts import RewardLog
from groupwise.threads import CallExecutor, EventLoop
from groupwise.tokenization.prompts import prompt_digest

logger = logging.getLogger(__name__)


class RewardMixin:
    """Compute rewards: call the reward functions and gather their results from all ranks."""

    accelerator: Accelerator
    args: GRPOConfig
    state: TrainerState
    rng: RandomState
    event_loop: EventLoop  # of all async functions of the user
    reward_callables: list[Callable[..., Any]]
    reward_func_names: list[str]
    reward_weights: torch.Tensor
    completion_logprobs: Callable[..., list[list[float]]]  # of LogprobMixin

    def compute_rewards(self, rollouts: RolloutBatch) -> RewardBatch:
        """Call every reward function on this rank's completions and gather the results of all ranks.

        Override to compute rewards differently; groups of one prompt are adjacent rows.

        Args:
            rollouts: completions of this rank, B rows.

        Returns:
            ``rewards_NF`` (N, F) float32 for all N completions in rank order, NaN where a function returned
            None; weights, step rewards and logged columns.

        Raises:
            RewardError: on all ranks: a function failed, timed out, or returned a wrong number or type of
                values on one of them; or it returned numbers on some ranks and step rewards on others.
        """
        # Reward functions never see a dropped completion; its rewards are NaN, its logged columns None.
        kept = [row for row, completion in enumerate(rollouts.completions) if not completion.dropped]

        def completion_logprobs(model: nn.Module | None = None) -> list[list[float]]:
            logps_B = self.completion_logprobs(rollouts, model)  # of all rows: all ranks run as many forwards
            return [logps_B[row] for row in kept]

        names, args = self.reward_func_names, self.args
        log = RewardLog(len(kept), checked_metrics)
        calls, failure = RewardCalls([[] for _ in names], {}, []), None  # of a rank without a row to reward
        try:
            if kept:
                calls = call_rewards(
                    self.reward_callables,
                    names,
                    rollouts.select(kept),
                    timeout=args.reward_timeout,
                    loop=self.event_loop,
                    on_error=args.reward_on_error,
                    completion_logprobs=completion_logprobs,
                    trainer_state=self.state,
                    log_extra=log.log_extra,
                    log_metric=log.log_metric,
                )
                completions = [rollouts.completions[row] for row in kept]
                # The tokens in front of a step get its reward; after a fork they may not be those before it.
                if args.advantage_baseline != "per_token" and any(c.contexts for c in completions):
                    check_step_order(names, calls.rewards_FB, completions)
        except RewardError as error:
            failure = error  # raised by all ranks in _gather_rewards
        # kept [0, 2] of B = 3 rows, values [1.0, 0.5] -> [1.0, nan, 0.5]
        at_rows = partial(_at_rows, kept, num_rows=len(rollouts))
        rewards_FB = [at_rows(values, fill=math.nan) for values in calls.rewards_FB]
        rewards = self._gather_rewards(rewards_FB, rollouts, failure)  # (F, B) -> (N, F)
        if kept and not rewards.step_rewards and bool(rewards.rewards_NF.isnan().all()):
            warn_once(logger, "every reward of a generation is None, and nothing is trained: return numbers")
        for column, steps_N in rewards.step_rewards.items():
            if isinstance(scorer := self.reward_callables[column], StepScorer):
                scorer.warn_if_unsplit(names[column], steps_N)
        metrics: list[Mapping[str, Reduction]] = [
            reward_metrics(rewards, names, args.multi_objective_aggregation),
            call_metrics(calls, names, count_failures=args.reward_on_error == "none"),
            # Copies of the logs: a call that was given up at its time limit may still write to the originals.
            *({name: Mean(value)} for name, value in list(log.metrics)),
        ]
        return RewardBatch(
            **vars(rewards),
            local=rows_of_rank(self.accelerator.process_index, len(rollouts)),  # B of the N rows
            columns={name: at_rows(values, fill=None) for name, values in dict(log.columns).items()},
            metrics=merge_metrics(metrics),
        )

    def drop_failed(self, rollouts: RolloutBatch) -> tuple[RolloutBatch, torch.Tensor | None]:
        """Drop groups of which fewer than two rollouts succeeded (``rollout_on_error="retry"``).

        Returns:
            the rollouts; and which completions of all ranks are dropped (N,), None with ``"raise"``.
        """
        if self.args.rollout_on_error == "raise":
            return rollouts, None
        failed_B = torch.tensor([c.dropped for c in rollouts.completions], device=self.accelerator.device)
        failed_N = self.accelerator.gather(failed_B)[: rollouts.num_valid].cpu()
        # A group of one has no baseline. G = 4: [1, 1, 0, 1 | 0, 0, 1, 0] -> [1, 1, 1, 1 | 0, 0, 1, 0]
        dropped_N = with_small_groups(failed_N, rollouts.num_generations)
        local = dropped_N[rows_of_rank(self.accelerator.process_index, len(rollouts))].tolist()
        local += [True] * (len(rollouts) - len(local))  # rows that pad an evaluation batch
        completions = [
            replace(completion, dropped=gone)
            for completion, gone in zip(rollouts.completions, local, strict=True)
        ]
        if failed_N.all():
            logger.warning("all %d rollouts of a generation failed: the step has no gradient", len(failed_N))
        is_first = self.accelerator.process_index == 0
        groups_P = dropped_N.view(-1, rollouts.num_generations).all(-1)  # (N,) -> (P, G) -> (P,)
        metrics: Metrics = {
            "rollouts/dropped_share": Mean(float(dropped_N.sum()), float(len(dropped_N))),
            # Every rank knows all groups: one of them counts.
            "rollouts/dropped_groups": Sum(float(groups_P.sum()) if is_first else 0.0),
        }
        metrics = merge_metrics([rollouts.metrics, metrics])
        return replace(rollouts, completions=completions, metrics=metrics), dropped_N

    def start_partial_rewards(self) -> Callable[[RolloutBatch], None] | None:
        """Return a callback that calls the per-sample reward functions on finished prompts of a rollout.

        Returns None without such functions, or if ``compute_rewards`` is overridden: it may not call them.
        """
        functions = [function for function in self.reward_callables if isinstance(function, PartialReward)]
        if not functions or type(self).compute_rewards is not RewardMixin.compute_rewards:
            return None

        def start(part: RolloutBatch) -> None:
            limit = self.args.reward_timeout
            executor = CallExecutor(limit, limited_by="reward_timeout", loop=self.event_loop)
            with self.rng.user_code():
                for function in functions:
                    function.begin(part, executor, trainer_state=self.state)

        return start

    def _gather_rewards(
        self,
        rewards_FB: list[list[Reward]],
        rollouts: RolloutBatch,
        failure: RewardError | None = None,
    ) -> GroupRewards:
        """Gather all ranks' rewards in rank order: outcome rewards as a matrix, step rewards by column.

        Args:
            failure: error of this rank. It is raised on all ranks, which would otherwise wait for rewards
                until the time limit of the process group, and then report a closed connection.
        """
        width = max(len(completion.token_ids) for completion in rollouts.completions)
        # Objects, not tensors: an outcome reward is a number, step rewards are a list of (index of the step's
        # last token, reward), and ranks may differ in which functions returned them.
        digests_B2 = [
            (prompt_digest(row.get("prompt")), None if completion.dropped else prompt_digest(prompt))
            for row, prompt, completion in zip(
                rollouts.rows, rollouts.prompts, rollouts.completions, strict=True
            )
        ]
        gathered = gather_object([(rewards_FB, width, digests_B2) if failure is None else str(failure)])
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {part}" for rank, part in enumerate(gathered) if isinstance(part, str)]
        if failed:
            raise RewardError("; ".join(failed))
        digests_N2 = [pair for _, _, part in gathered for pair in part][: rollouts.num_valid]
        check_groups(digests_N2, rollouts.num_generations, len(rollouts))
        columns = [  # F columns of N rewards: per function those of rank 0, then of rank 1, without padding
            [reward for part, _, _ in gathered for reward in part[i]][: rollouts.num_valid]
            for i in range(len(rewards_FB))
        ]
        stepwise = [i for i, c in enumerate(columns) if any(isinstance(reward, list) for reward in c)]
        for i in stepwise:  # checked on every rank: numbers would be ignored
            if any(isinstance(reward, float) and not math.isnan(reward) for reward in columns[i]):
                raise RewardError(
                    f"reward function {self.reward_func_names[i]!r} returned step rewards on some processes "
                    "and numbers on others; return None or an empty list for a completion without steps"
                )
        # Step rewards stay lists, and their column of the matrix is NaN: no outcome reward.
        matrix_FN = [[math.nan] * len(c) if i in stepwise else c for i, c in enumerate(columns)]
        rewards_FN = torch.tensor(matrix_FN, dtype=torch.float64)  # as the functions returned them
        for i in rounded_functions(rewards_FN, rollouts.num_generations):
            warn_once(
                logger,
                "reward function %r: the differences between rewards of a group are lost in float32, which "
                "keeps 7 digits, so that their advantages are wrong; subtract a constant from the rewards",
                self.reward_func_names[i],
            )
        return GroupRewards(
            rewards_NF=rewards_FN.float().T,  # (F, N) -> (N, F)
            weights_F=self.reward_weights,
            num_generations=rollouts.num_generations,
            step_rewards={i: [r if isinstance(r, list) else [] for r in columns[i]] for i in stepwise},
            num_tokens=max(width for _, width, _ in gathered),  # T of the longest completion of all ranks
        )


def check_groups(
    digests_N2: Sequence[tuple[int, int | None]], num_generations: int, rows_per_rank: int
) -> None:
    """Check that the completions of a group have one prompt, from digests of all ranks.

    Args:
        digests_N2: of the prompt in the dataset, and of the prompt in the rollout; None: it is dropped.

    Raises:
        TrainingError: the ranks read different data.
    """
    for first in range(0, len(digests_N2), num_generations):
        group = digests_N2[first : first + num_generations]
        rank = first // rows_per_rank
        for row, (given, _) in enumerate(group, start=first):
            if given != group[0][0] and row // rows_per_rank != rank:
                raise TrainingError(
                    f"row {row % rows_per_rank} of rank {row // rows_per_rank} has another prompt than row "
                    f"{first % rows_per_rank} of rank {rank}, which is of the same group: the ranks read "
                    "different data; every rank needs the same rows in the same order (a seed for shuffle(), "
                    "the same files)"
                )
        if len({prompt for _, prompt in group} - {None}) > 1:
            warn_once(
                logger,
                "rollouts of a group have different prompts, although their advantages compare them: reset "
                "of an environment, or an override of generate_rollouts, changes them; choose the task by "
                "columns of the row, such as seed, which the group shares",
            )


def rounded_functions(rewards_FN: torch.Tensor, num_generations: int) -> list[int]:
    """Return the functions with a group whose spread is below 100 times the rounding error of float32.

    A spread at the rounding error of float64 is none: the rewards are equal.
    """
    if not rewards_FN.numel():
        return []
    rewards_FPG = rewards_FN.reshape(len(rewards_FN), -1, num_generations)  # (F, N) -> (F, P, G)
    error_FP = (rewards_FPG - rewards_FPG.float().double()).abs().nan_to_num(0.0).amax(-1)
    spread_FP = above_lowest(rewards_FPG, -1).nan_to_num(0.0).amax(-1)
    magnitude_FP = rewards_FPG.abs().nan_to_num(0.0).amax(-1)
    # 1e9 + [0, 1, 2, 3] has a spread of 3, but neighbours in float32 are 64 apart there.
    is_rounded_FP = (spread_FP > 1e-12 * magnitude_FP) & (spread_FP < 100 * error_FP)
    return is_rounded_FP.any(-1).nonzero().flatten().tolist()


def _at_rows(rows: list[int], values: list[Any], num_rows: int, fill: Any) -> list[Any]:
    """Return a list of ``num_rows`` entries with ``values`` at ``rows``, and ``fill`` elsewhere."""
    placed = dict(zip(rows, values, strict=False))
    return [placed.get(row, fill) for row in range(num_rows)]


def call_metrics(calls: RewardCalls, names: list[str], *, count_failures: bool) -> Metrics:
    """Seconds of the calls that returned and, with ``count_failures``, 1 for each that failed, per rank."""
    times = zip(names, calls.seconds_F, strict=False)  # empty without a call
    metrics: Metrics = {f"time/reward/{name}": Mean(s) for name, s in times if not math.isnan(s)}
    if count_failures:
        metrics |= {f"rewards/{name}/errors": Sum(float(i in calls.failures)) for i, name in enumerate(names)}
    return metrics


def reward_metrics(
    rewards: GroupRewards, names: list[str], aggregation: str = "sum_then_normalize"
) -> Metrics:
    """Statistics of the global batch (the same on every rank), weighted by the number of rewards.

    Step rewards count by their sum; a group whose step rewards differ is not one of zero deviation.

    Args:
        names: names of the reward functions, in the order of their columns.
        aggregation: combines them into ``reward``, ``reward_std`` and ``frac_reward_zero_std``.
    """
    metrics: Metrics = {}
    sums = rewards.with_step_sums()  # (N, F): step rewards of a completion by their sum
    for column, name in enumerate(names):
        values_N = sums.rewards_NF[:, column]
        scored = (~values_N.isnan()).sum().item()
        if scored:
            metrics[f"rewards/{name}/mean"] = Mean(values_N.nansum().item(), scored)
            metrics[f"rewards/{name}/std"] = Mean(nan_std(values_N, 0).item() * scored, scored)
        if column in rewards.step_rewards:
            num_steps = sum(len(steps) for steps in rewards.step_rewards[column])
            metrics[f"rewards/{name}/steps"] = Mean(num_steps, scored)
    total_PG = total_rewards(sums, aggregation).view(-1, rewards.num_generations)  # (N,) -> (P, G)
    scored = (~total_PG.isnan()).sum().item()
    if scored:
        scored_P = ~total_PG.isnan().all(-1)
        # No advantage, and no gradient of the policy loss: what dynamic_sampling would replace.
        constant_P = scored_P & ~has_variance(rewards, aggregation)
        metrics["reward"] = Mean(total_PG.nansum().item(), scored)
        metrics["reward_std"] = Mean(nan_std(total_PG.flatten(), 0).item() * scored, scored)
        metrics["frac_reward_zero_std"] = Mean(constant_P.sum().item(), scored_P.sum().item())
    return metrics
