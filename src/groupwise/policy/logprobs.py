"""Log-prob computation in the sequence layout of the run.

Layout and head are chosen once and compared on the first rows with the model's own forward on each row alone.
If they differ, the next ones are tried; if the settings name them, the run ends with an error::

    shared_prefix -> forked -> packed -> padded -> equal_length      each with the head chunked -> dense
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from groupwise.policy.attention import supports_packing
from groupwise.policy.heads.capture import LogprobHead
from groupwise.policy.introspection import base_model
from groupwise.policy.layouts.packed import compute_packed_logprobs, pack_sequences
from groupwise.policy.layouts.padded import compute_equal_lengths, compute_padded_logprobs
from groupwise.records import LogprobOutput, MicroBatch, TokenBatch
from groupwise.records.fast_paths import FastPath
from groupwise.records.images import has_images

logger = logging.getLogger(__name__)


#: Layouts whose inputs are prepared before the forward; the others compute the rows of a batch as they are.
PACKED = ("packed", "shared_prefix", "forked")


def forked_layout() -> ModuleType:
    """Import the layout of models with states: most runs do not need it."""
    from groupwise.policy.layouts import forked

    return forked


def model_rows(batch: TokenBatch) -> Any:
    """Return the rows that the model computes for rollouts of several rows."""
    from groupwise.policy.layouts.contexts import ModelRows, split_contexts

    packed = batch.packed if isinstance(batch, MicroBatch) else None
    return packed if isinstance(packed, ModelRows) else split_contexts(batch)


#: Sums of the routers in the passes of a micro-batch (2E + 1,) to its balancing loss.
Balance = Callable[[torch.Tensor], torch.Tensor]


@dataclass(eq=False)
class LogprobComputer:
    """Compute log-probs of completions in the layout of the run.

    layout, head: of the run; the check may take others.
    any_rank: returns True if its argument is true on a rank; called once per check, by all ranks.
    largest: returns the largest of the arguments of all ranks, which call it before the passes of a
        micro-batch to run as many; None: ranks need not run as many.
    sharded: parameters are sharded (FSDP, DeepSpeed); the check then calls the wrapped model and compares no
        gradients.
    mixed_precision: dtype of matrix products under autocast; None: that of the weights.
    varlen: packed attention runs in a varlen kernel; if the check fails, in blocks.
    other_layouts: layouts to try after ``layout``; none if the user chose it by its name.
    other_heads: heads to try after ``head``, in every layout.
    reentrant: gradient checkpoints are reentrant; the check then compares gradients without checkpoints,
        because these give none of chosen parameters.
    longer: from the tokens of the longest prompt, a number of tokens that rows of the run may exceed and on
        which the model's forward depends, such as a window; 0: none.
    with_aux_loss: training includes the balancing loss of a mixture of experts.
    has_dropout: the forward of training may be random; otherwise the check refuses one that is.
    replay: ``RouterReplay`` of experts' routing (``router_replay``).
    checked, checked_images: layout and head are final, for text and for images.
    paths: states of layout and head.
    balance: balancing loss of sums (2E + 1,); None: that of the micro-batch alone.
    fell_back: the layout failed its check, so that another one was taken.
    """

    layout: str
    head: LogprobHead
    any_rank: Callable[[bool], bool] = bool
    largest: Callable[[int], int] | None = None
    sharded: bool = False
    mixed_precision: torch.dtype | None = None
    varlen: bool = False
    other_layouts: Sequence[str] = ("padded",)
    other_heads: Sequence[str] = ()
    reentrant: bool = False
    longer: Callable[[int], int] = lambda prompt: 0
    with_aux_loss: bool = False
    has_dropout: bool = True
    replay: Any = None
    checked: bool = False
    checked_images: bool = False
    paths: list[FastPath] = field(default_factory=list)
    balance: Balance | None = None
    fell_back: bool = False

    def __post_init__(self) -> None:
        self.paths = self.paths or [FastPath("layout", self.layout), FastPath("head", self.head.name)]

    def check(self, model: nn.Module, batch: TokenBatch) -> None:
        """Compare layout and head with the model's own forward on rows alone, and take those that pass.

        The first call does it, and the first one with images. All ranks make it before a batch is prepared,
        so that the layout of prepared batches is final.

        Raises:
            ConfigError: none of the layouts and heads that the settings allow computes the model's log-probs.
        """
        with_images = has_images(batch.images)
        if self.checked and (self.checked_images or not with_images):
            return
        from groupwise.policy.layouts.check import choose_way  # once in a run

        choose_way(self, model, batch if batch.contexts is None else model_rows(batch).rows)
        # Not earlier: after an out-of-memory error the other ranks still wait in `any_rank`.
        self.checked, self.checked_images = True, with_images or self.layout not in PACKED

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        """Pack the batch if its layout is final and needs it: its log-probs take no device sync then."""
        parts = None if batch.contexts is None else model_rows(batch)
        packed = self._pack(batch if parts is None else parts.rows, parts) if self.checked else None
        return replace(batch, packed=packed if parts is None else replace(parts, packed=packed))

    def _pack(self, batch: TokenBatch, parts: Any = None) -> Any:
        """Return the rows of ``batch`` in the layout; ``parts``, if given, are those of rollouts."""
        if self.layout not in PACKED:
            return None
        if self.layout == "forked":
            return forked_layout().fork_sequences(batch, whole=self.with_aux_loss)
        if parts is not None and self.layout == "shared_prefix":
            from groupwise.policy.layouts.contexts import pack_tree

            return pack_tree(batch, varlen=self.varlen)
        return pack_sequences(batch, shared=self.layout == "shared_prefix", varlen=self.varlen)

    def compute(
        self,
        model: nn.Module,
        batch: TokenBatch,
        *,
        with_entropy: bool,
        with_aux_loss: bool = False,
        parts: Any = None,
        routing: Any = None,
    ) -> LogprobOutput:
        """Compute log-probs in the layout of the run, or padded if ``model`` does not take it."""
        head = self.head
        options: Any = {"with_entropy": with_entropy, "with_aux_loss": with_aux_loss, "routing": routing}
        # Padded sequences have a loss, not its sums.
        needs_sums = with_aux_loss and self.balance is not None and not self._supports(model)
        if self.layout == "equal_length" or needs_sums:
            return compute_equal_lengths(model, batch, head, **options)
        if not self._supports(model):
            return compute_padded_logprobs(model, batch, head, **options)  # its own balancing loss
        prepared = getattr(batch if parts is None else parts, "packed", None)
        packed = self._pack(batch, parts) if prepared is None else prepared
        if self.layout != "forked":
            return compute_packed_logprobs(model, batch, packed, head, **options)
        passes = self.largest(packed.num_passes()) if self.largest is not None else 0
        compute = forked_layout().compute_forked_logprobs
        return compute(model, batch, packed, head, num_passes=passes, **options)

    def balanced(self, output: LogprobOutput, balance: Balance | None = None) -> LogprobOutput:
        """Return ``output`` with a balancing loss in place of its sums, if it has any."""
        if output.aux_loss is None or not output.aux_loss.dim():
            return output
        from groupwise.policy.experts import balancing_loss  # a mixture of experts alone

        return replace(output, aux_loss=(balance or balancing_loss)(output.aux_loss))

    def _supports(self, model: nn.Module) -> bool:
        """Return True if ``model`` takes the layout of the run; installs the attention hook if it is needed.

        Other models are created later, such as a reference; those that do not take it are padded.
        """
        if self.layout == "forked":
            return forked_layout().cannot_fork(model) is None
        shared = self.layout == "shared_prefix"
        return self.layout in PACKED and supports_packing(base_model(model), shared=shared)

    def __call__(
        self, model: nn.Module, batch: TokenBatch, *, with_entropy: bool, with_aux_loss: bool = False
    ) -> LogprobOutput:
        """Compute log-probs (and entropies) of the completion tokens under ``model``; see :meth:`check`.

        Args:
            with_aux_loss: also return the balancing loss.

        Returns:
            log-probs and entropies (B, T), float32.
        """
        parts = None if batch.contexts is None else model_rows(batch)  # of rollouts of several rows
        batch = batch if parts is None else parts.rows
        self.check(model, batch)
        # Rollouts of several rows have no recorded routing: a tree of rows computes tokens once for several.
        routing = None if self.replay is None or parts is not None else self.replay.of_batch(batch)
        options: Any = {"with_entropy": with_entropy, "with_aux_loss": with_aux_loss, "routing": routing}
        output = self.balanced(self.compute(model, batch, parts=parts, **options), self.balance)
        output = replace(output, routing=routing) if parts is None else parts.join(output)
        if self.replay is not None and self.replay.recorded is not None:
            self.replay.recorded += [None] * len(output.logps_BT) if routing is None else routing.rows()
        return output
