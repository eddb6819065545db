"""One rank that rebalances a window with images, and counts the bytes that reach it.

    torchrun --nproc_per_node 4 rebalancing_worker.py OUTPUT_DIR [gather]

``gather`` collects every window on every rank instead, for comparison. Each rank leaves its counts in
OUTPUT_DIR/RANK.json.
"""

from __future__ import annotations

import json
import math
import pickle
import random
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object

from groupwise.core.padding import length_mask
from groupwise.data.budget import MicroBatchBudget
from groupwise.data.exchange import all_to_all_objects
from groupwise.data.rebalancing import WindowRows, rebalance
from groupwise.records import MicroBatch
from groupwise.records.images import ImageInputs

ROWS, MICRO_BATCH, PROMPT, LONGEST = 16, 4, 8, 64
PIXELS = 2**18  # float32: 1 MiB per image


def window(rank: int) -> list[MicroBatch]:
    """Rows with an image each; every value follows from the number of the row in the window of all ranks."""
    lengths = [random.Random(rank * ROWS + row).randint(1, LONGEST) for row in range(ROWS)]
    mask = length_mask(lengths, max(lengths), device="cpu")
    number_B1 = torch.arange(rank * ROWS, (rank + 1) * ROWS)[:, None]
    batch = MicroBatch(
        prompt_ids_BL=number_B1.expand(-1, PROMPT).clone(),
        prompt_mask_BL=torch.ones(ROWS, PROMPT, dtype=torch.long),
        completion_ids_BT=number_B1 * mask,
        completion_mask_BT=mask,
        loss_mask_BT=mask,
        group_ids_B=number_B1.squeeze(1),
        old_logps_BT=(-1.0 * number_B1).masked_fill(mask == 0, math.nan),
        advantages_BX=torch.ones(ROWS, 1),
        token_weights_BT=mask.float(),
        entropy_mask_BT=mask,
        sequence_weight_B1=torch.ones(ROWS, 1),
        images=tuple(ImageInputs({"pixel_values": torch.full((1, PIXELS), float(n))}) for n in number_B1),
    )
    return batch.split(MICRO_BATCH)


def size_of(batch: MicroBatch) -> int:
    """Bytes of the tensors of a batch, images included."""
    arrays = [array for row in batch.images or () for array in row.arrays.values()]
    return sum(tensor.nbytes for tensor in [*batch.tensors().values(), *arrays])


def main(output_dir: Path, mode: str = "exchange") -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    own = window(rank)
    received = 0
    all_to_all_single = dist.all_to_all_single

    def counted(output: torch.Tensor, *given: Any) -> None:
        nonlocal received
        received += output.nbytes
        all_to_all_single(output, *given)

    dist.all_to_all_single = counted
    dist.all_to_all_single(torch.empty(world_size), torch.ones(world_size))  # connections
    gather_object([0])
    received = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if mode == "gather":
        joined = MicroBatch.concatenate(gather_object([MicroBatch.concatenate(own)]))
        received, trained = size_of(joined), []
        lengths = 0
    else:
        budget = MicroBatchBudget(
            False, MICRO_BATCH, LONGEST, skip_zero_advantage=True, world_size=world_size, rank=rank
        )
        all_to_all = partial(all_to_all_objects, device=accelerator.device)
        batches, _ = rebalance(own, "padded", budget, gather_object, all_to_all)
        trained = [row for batch in batches if batch is not None for row in batch.split(1)]
        lengths = len(pickle.dumps([WindowRows.of(batch, budget) for batch in own]))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for row in trained:
        number = int(row.completion_ids_BT[0, 0])
        expected = window(number // ROWS)
        alone = MicroBatch.concatenate(expected).select([number % ROWS])
        assert all(
            torch.equal(tensor.nan_to_num(9.0), alone.tensors()[name].nan_to_num(9.0))
            for name, tensor in row.tensors().items()
        )
        assert torch.equal(row.images[0].arrays["pixel_values"], alone.images[0].arrays["pixel_values"])
    result = {
        "window": size_of(MicroBatch.concatenate(own)),
        "received": received,
        "lengths": lengths * world_size,
        "peak": 1024 * grown,
        "rows": [int(row.completion_ids_BT[0, 0]) for row in trained],
    }
    (output_dir / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
