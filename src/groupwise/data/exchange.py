"""Objects from every rank to every rank, each sent only to its receiver."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from groupwise.records.serialization import host_copy, load

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
    payloads = [b"" if receiver == rank else _to_bytes(value) for receiver, value in enumerate(outgoing)]
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


def _to_bytes(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(host_copy(value), stream)
    return stream.getvalue()
