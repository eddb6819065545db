"""Objects and rows of a generation from every rank to every rank, each sent only to its receiver."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from groupwise.config.grpo_config import GRPOConfig
from groupwise.distributed import rows_of_rank
from groupwise.errors import ConfigError
from groupwise.records import Experience, MicroBatch
from groupwise.records.serialization import load, to_bytes

T = TypeVar("T")


def all_to_all_objects(outgoing: Sequence[T], device: torch.device | str) -> list[T]:
    """Send ``outgoing[r]`` to rank r. Collective: every rank of the default group calls it.

    A rank holds only the bytes that it sends and receives (gloo and NCCL); in a gather of objects, every rank
    receives the objects of all ranks.

    Args:
        outgoing: one object per rank, of records, tensors and plain containers; this rank's own entry is
            returned unchanged, those of others are on the host.
        device: of the process group: the GPU of this rank for NCCL, the CPU for gloo.

    Returns:
        the objects that the ranks sent to this one, in rank order.
    """
    rank = dist.get_rank()
    payloads = [b"" if receiver == rank else to_bytes(value) for receiver, value in enumerate(outgoing)]
    sent = [len(payload) for payload in payloads]
    sent_sizes = torch.tensor(sent, device=device)
    received_sizes = torch.empty_like(sent_sizes)
    dist.all_to_all_single(received_sizes, sent_sizes)
    received = received_sizes.tolist()
    buffer = torch.empty(sum(received), dtype=torch.uint8, device=device)
    joined = torch.frombuffer(bytearray().join(payloads), dtype=torch.uint8).to(device)
    dist.all_to_all_single(buffer, joined, received, sent)
    return [
        outgoing[rank] if sender == rank else cast(T, load(io.BytesIO(part.numpy().tobytes())))
        for sender, part in enumerate(buffer.cpu().split(received))
    ]


def in_row_order(
    entries: Sequence[Experience],
    config: GRPOConfig,
    all_to_all: Callable[[list[list[Experience]], Any], list[list[Experience]]] = all_to_all_objects,
) -> list[Experience]:
    """Exchange micro-batches so that each optimizer step trains on the next rows of the generation.

    These are then the same on any number of ranks. Two ranks with 4 micro-batches each of rows 0 to 7::

        rank 0    0 1 2 3    ->    0 2 4 6
        rank 1    4 5 6 7    ->    1 3 5 7

    Args:
        entries: micro-batches of this rank, which has sampled adjacent rows.
        all_to_all: sends entry r to rank r and returns those for this rank in rank order. A collective.
    """
    ranks, first = config.world_size, config.process_index * len(entries)
    if ranks == 1:
        return list(entries)
    outgoing = [[e for n, e in enumerate(entries, first) if n % ranks == rank] for rank in range(ranks)]
    device = entries[0].loss_mask_BT.device
    return [entry.to(device) for part in all_to_all(outgoing, device) for entry in part]


def merge_generations(snapshots: Sequence[dict[str, Any]], config: GRPOConfig) -> dict[str, Any]:
    """Divide the micro-batches of all ranks anew; the rows of every optimizer step stay the same.

    Args:
        snapshots: of the buffers of the ranks that wrote a checkpoint, in rank order.

    Raises:
        ConfigError: the rows do not divide into the present micro-batches.
    """
    parts = [each["entries"] for each in snapshots]
    by_row, ranks = config.splits_generation, config.world_size
    entries = list(chain.from_iterable(zip(*parts, strict=True) if by_row else parts))
    joined = {**snapshots[0], "entries": entries, "cursor": snapshots[0]["cursor"] * len(snapshots)}
    whole = cut_anew(joined, config.per_device_train_batch_size, ranks)
    count = len(whole["entries"]) // ranks  # micro-batches of a rank
    own = slice(config.process_index, None, ranks) if by_row else rows_of_rank(config.process_index, count)
    return {**whole, "entries": whole["entries"][own], "cursor": whole["cursor"] // ranks}


def cut_anew(snapshot: dict[str, Any], size: int, ranks: int = 1) -> dict[str, Any]:
    """Cut what is left of a generation into micro-batches of another size, by default on each rank alone.

    A step of as many completions as before has the same ones: 4 micro-batches of 4 rows, of which 2 are
    taken, become 2 of 8, of which 1 is taken.

    Args:
        snapshot: of the buffer.
        size: present ``per_device_train_batch_size``.
        ranks: processes that will share the micro-batches equally.

    Raises:
        ConfigError: the rows do not divide into such micro-batches.
    """
    entries = snapshot["entries"]
    if not entries or (len(entries[0]) == size and ranks == 1):
        return snapshot
    rows, taken = Experience.concatenate(entries), snapshot["cursor"] * len(entries[0])
    if len(rows) % (size * ranks) or taken % (size * ranks):
        raise ConfigError(
            f"per_device_train_batch_size={size} x {ranks} process(es) cannot divide the generation batch of "
            f"the checkpoint: it has {len(rows)} completions, {taken} of them trained on; set a divisor of "
            f"{math.gcd(len(rows), taken)}, or resume as before until a new generation begins"
        )
    return {**snapshot, "entries": rows.split(size), "cursor": taken // size}


def exchange(
    window: Sequence[MicroBatch],
    held: Sequence[range],
    plan: Sequence[Sequence[Sequence[int]]],
    rank: int,
    all_to_all: Callable[[list[MicroBatch | None]], list[MicroBatch | None]],
) -> list[MicroBatch]:
    """Send each row to the rank that trains on it.

    Args:
        window: this rank's rows.
        held: row indices by the rank that sampled them.
        plan: row indices of the micro-batches by the rank that trains on them.
        all_to_all: sends entry r to rank r and returns those for this rank. A collective.

    Returns:
        the rows that the plan gives to this rank, in the order of their indices; a batch may have none.
    """
    assigned = [sorted(row for part in parts for row in part) for parts in plan]  # by receiving rank
    local = [[row - held[rank].start for row in wanted if row in held[rank]] for wanted in assigned]
    parts = MicroBatch.regroup(window, local)  # by receiving rank; some have no rows
    pieces = [part if len(part) and receiver != rank else None for receiver, part in enumerate(parts)]
    # A collective: every rank decides by the whole plan, and so alike.
    if any(row not in held[receiver] for receiver, wanted in enumerate(assigned) for row in wanted):
        pieces = all_to_all(pieces)
    pieces[rank] = parts[rank]  # rows that stay are not serialized
    # Pieces come in rank order, and a rank's rows in order: together they ascend.
    return [piece.to(window[0].completion_ids_BT.device) for piece in pieces if piece is not None]
