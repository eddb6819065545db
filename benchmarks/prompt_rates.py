"""Measure the state of ``prompt_filter`` for many prompts: bytes in a checkpoint, and time of a generation.

OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/prompt_rates.py
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time

import torch
from common import write_results
from torch.utils.data import Dataset

from groupwise import GRPOConfig
from groupwise.data.sampler import PromptSampler
from groupwise.data.sources import CurriculumPrompts
from groupwise.distributed import RankSlice
from groupwise.records import GroupRewards


class Rows(Dataset):
    """Prompts that take no memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"prompt": str(index)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=10**6)
    parser.add_argument("--batch", type=int, default=512, help="prompts of a generation")
    parser.add_argument("--generations", type=int, default=20)
    options = parser.parse_args()
    rows, group = Rows(options.prompts), 8
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            directory,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=options.batch * group,
            num_generations=group,
            prompt_filter={"min": 0.05, "max": 0.95, "again_after": 200},
        )
    source = CurriculumPrompts(rows, lambda: PromptSampler(rows, config), RankSlice(group), config)
    seen = torch.rand(options.prompts)  # every prompt was sampled, half of them are outside the range
    source.rates = source.rates.updated(dict(enumerate((2 * seen - 0.5).clamp(0, 1).tolist())), 0)
    seconds: dict[str, list[float]] = {"take": [], "add_rewards": [], "snapshot": [], "restore": []}
    ones_F = torch.ones(1)

    def timed(name: str, call):
        begun = time.process_time()
        result = call()
        seconds[name].append(time.process_time() - begun)
        return result

    for step in range(options.generations):
        mark = timed("snapshot", source.snapshot)
        timed("take", lambda step=step: source.take(options.batch, step))
        rewards = GroupRewards(torch.randint(0, 2, (options.batch * group, 1)).float(), ones_F, group)
        timed("add_rewards", lambda rewards=rewards: source.add_rewards(rewards, ["correct"]))
    timed("restore", lambda: source.restore(mark))
    saved = io.BytesIO()
    torch.save(source.snapshot(), saved)
    results = {
        "prompts": options.prompts,
        "batch": options.batch,
        "checkpoint_bytes": saved.tell(),
        "checkpoint_bytes_per_prompt": round(saved.tell() / options.prompts, 2),
        "milliseconds": {name: round(1e3 * statistics.median(each), 2) for name, each in seconds.items()},
        "first_take_milliseconds": round(1e3 * seconds["take"][0], 2),  # with the order of the epoch
    }
    print(results)
    write_results("prompt_rates", results)


if __name__ == "__main__":
    main()
