"""Completions to rewards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerState

from groupwise.config.grpo_config import GRPOConfig
from groupwise.core.advantages import with_small_groups
from groupwise.core.metrics import Mean, Metrics, Reduction, Sum, merge_metrics
from groupwise.data.dataset_checks import SOURCE
from groupwise.distributed import check_groups, gather_or_raise, rows_of_rank
from groupwise.errors import RewardError, warn_once
from groupwise.random_state import RandomState
from groupwise.records import RewardBatch, RolloutBatch, Row
from groupwise.records.rollout import GroupRewards
from groupwise.reporting.metrics import checked_metrics, reward_metrics
from groupwise.rewards.process import StepScorer
from groupwise.rewards.runtime.calling import Reward, RewardCalls, call_rewards
from groupwise.rewards.runtime.loading import rounded_functions
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
    reward_funcs: list[Any]
    reward_sources: Sequence[tuple[Any, set[str]]] = ()  # functions that score some sources only, and these
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
                    rows_F=self._rows_by_source([rollouts.rows[row] for row in kept]),
                    timeout=args.reward_timeout,
                    loop=self.event_loop,
                    on_error=args.reward_on_error,
                    completion_logprobs=completion_logprobs,
                    trainer_state=self.state,
                    log_extra=log.log_extra,
                    log_metric=log.log_metric,
                )
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
            calls.metrics(names, count_failures=args.reward_on_error == "none"),
            # Copies of the logs: a call that was given up at its time limit may still write to the originals.
            *({name: Mean(value)} for name, value in list(log.metrics)),
        ]
        return RewardBatch(
            **vars(rewards),
            local=rows_of_rank(self.accelerator.process_index, len(rollouts)),  # B of the N rows
            columns={name: at_rows(values, fill=None) for name, values in dict(log.columns).items()},
            metrics=merge_metrics(metrics),
        )

    def _rows_by_source(self, rows: Sequence[Row]) -> list[list[int] | None]:
        """Return the rows that each reward function scores, F entries; None: all rows."""
        if not self.reward_sources:
            return [None] * len(self.reward_callables)
        sources = {id(function): names for function, names in self.reward_sources}
        names_F = [sources.get(id(function)) for function in self.reward_funcs]
        return [
            None if names is None else [i for i, row in enumerate(rows) if row.get(SOURCE) in names]
            for names in names_F
        ]

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
        if (
            not any(isinstance(function, PartialReward) for function in self.reward_callables)
            or type(self).compute_rewards is not RewardMixin.compute_rewards
        ):
            return None

        def start(part: RolloutBatch) -> None:
            limit = self.args.reward_timeout
            executor = CallExecutor(limit, limited_by="reward_timeout", loop=self.event_loop)
            with self.rng.user_code():
                rows_F = self._rows_by_source(part.rows)
                for function, rows in zip(self.reward_callables, rows_F, strict=True):
                    if isinstance(function, PartialReward) and rows != []:
                        own = part if rows is None else part.select(rows)
                        function.begin(own, executor, trainer_state=self.state)

        return start

    def _gather_rewards(
        self,
        rewards_FB: list[list[Reward]],
        rollouts: RolloutBatch,
        failure: RewardError | None = None,
    ) -> GroupRewards:
        """Gather all ranks' rewards in rank order: outcome rewards as a matrix, step rewards by column.

        Args:
            failure: error of this rank, raised on all ranks.
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
        turns_B = [  # of completions with steps
            completion.turn_spans if any(isinstance(rewards_B[row], list) for rewards_B in rewards_FB) else ()
            for row, completion in enumerate(rollouts.completions)
        ]
        gathered = gather_or_raise((rewards_FB, width, digests_B2, turns_B), failure)
        rewards, widths, digests, turns = zip(*gathered, strict=True)  # of each rank

        def joined(of_ranks: Iterable[list[Any]]) -> list[Any]:
            """Return the entries of rank 0, then of rank 1, without those of padding."""
            return list(chain.from_iterable(of_ranks))[: rollouts.num_valid]

        check_groups(joined(digests), rollouts.num_generations, len(rollouts))
        columns = [joined(of_ranks) for of_ranks in zip(*rewards, strict=True)]  # F columns of N rewards
        turns_N = joined(turns)
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
            num_tokens=max(widths),  # T of the longest completion of all ranks
            turns=turns_N if any(turns_N) else (),
        )


def _at_rows(rows: list[int], values: list[Any], num_rows: int, fill: Any) -> list[Any]:
    """Return a list of ``num_rows`` entries with ``values`` at ``rows``, and ``fill`` elsewhere."""
    placed = dict(zip(rows, values, strict=False))
    return [placed.get(row, fill) for row in range(num_rows)]
