"""Events of a callback inside a step: their order, their records, and what they are not called for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import chats, trainer
from transformers import TrainerCallback

from groupwise import GRPOCallback


class Recorder(GRPOCallback):
    """Store the name of every event, and the records of the last step."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("step_begin")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("pre_optimizer_step")

    def on_generation_end(self, args: Any, state: Any, control: Any, rollouts: Any, rewards: Any) -> None:
        self.events.append("generation_end")
        self.rollouts, self.rewards = rollouts, rewards

    def on_window_begin(self, args: Any, state: Any, control: Any, window: Any) -> None:
        self.events.append("window_begin")
        self.window, self.losses, self.rows = window, [], []

    def on_loss(
        self, args: Any, state: Any, control: Any, batch: Any, logps_BT: torch.Tensor, loss: torch.Tensor
    ) -> None:
        self.events.append("loss")
        self.losses.append(loss.item())
        self.rows.append((batch.row_numbers(), batch.completion_ids_BT, logps_BT))
        assert logps_BT.requires_grad


def test_events_come_in_the_order_of_the_step(tmp_path: Path) -> None:
    seen = Recorder()
    run = trainer(
        tmp_path, callbacks=[seen, TrainerCallback()], num_iterations=2, max_steps=2, train_dataset=chats()
    )
    run.train()
    update = ["window_begin", "loss", "pre_optimizer_step"]
    assert seen.events == ["step_begin", "generation_end", *update, "step_begin", *update]
    losses = [log["loss"] for log in run.state.log_history if "loss" in log]
    assert sum(seen.losses) == pytest.approx(losses[-1])
    # Rows of the loss are those of the window by their numbers, whatever their order.
    (batch,) = seen.window
    ((rows, completion_ids_BT, logps_BT),) = seen.rows
    assert sorted(rows) == batch.row_numbers() == [0, 1, 2, 3]
    assert logps_BT.shape == completion_ids_BT.shape
    for index, row in enumerate(rows):
        width = int(batch.completion_mask_BT[row].sum())
        assert torch.equal(completion_ids_BT[index, :width], batch.completion_ids_BT[row, :width])
    assert [c.token_ids for c in seen.rollouts.completions] == [
        ids[: int(mask.sum())].tolist()
        for ids, mask in zip(batch.completion_ids_BT, batch.completion_mask_BT, strict=True)
    ]
    assert len(seen.rewards.rewards_NF) == 4


class Counter(GRPOCallback):
    """Count the optimizer steps of a run; the number is in its checkpoints."""

    def on_run_begin(self, args: Any, state: Any, control: Any, directory: Path | None) -> None:
        self.count = 0 if directory is None else int((directory / "count.txt").read_text())
        self.began_at = self.count

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def on_checkpoint(self, args: Any, state: Any, control: Any, directory: Path) -> None:
        (directory / "count.txt").write_text(str(self.count))


def test_the_state_of_a_callback_is_in_checkpoints(tmp_path: Path) -> None:
    counter = Counter()
    run = trainer(tmp_path, callbacks=[counter], max_steps=3, save_strategy="steps", save_steps=1)
    run.train()
    assert (counter.began_at, counter.count) == (0, 3)
    manifest = json.loads((tmp_path / "checkpoint-2" / "groupwise_manifest.json").read_text())
    assert "count.txt" in manifest["files"]
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (counter.began_at, counter.count) == (2, 3)
    run.train(resume_from_checkpoint=True)  # the run is finished: no step
    assert (counter.began_at, counter.count) == (3, 3)


def test_an_evaluation_calls_none_of_the_events(tmp_path: Path) -> None:
    seen = Recorder()
    trainer(tmp_path, callbacks=[seen], eval_dataset=chats()).evaluate()
    assert seen.events == []
