"""Files of saved rollouts: what they contain, and which of an earlier run remain."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runs import chats, trainer

from groupwise import GRPOTrainer
from groupwise.records import ImageInputs, LogprobOutput
from groupwise.reporting.rollout_files import FOLDER, Recording, RolloutFiles, file_name, gradient_norms


def saved(directory: Path, **settings: Any) -> tuple[GRPOTrainer, Recording]:
    run = trainer(directory, save_rollouts=True, **settings)
    run.train()
    return run, Recording(directory / FOLDER)


def files_of(run: GRPOTrainer) -> RolloutFiles:
    (found,) = [each for each in run.callback_handler.callbacks if isinstance(each, RolloutFiles)]
    return found


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / FOLDER).iterdir())


def test_a_run_leaves_a_generation_and_a_step_for_every_update(tmp_path):
    run, recording = saved(tmp_path, num_iterations=2, max_steps=3, train_dataset=chats())
    assert names(tmp_path) == [
        "generation-000001.0.rank0.pt.gz",
        "generation-000003.0.rank0.pt.gz",
        "run.json",
        *(file_name("step", step, 0) for step in (1, 2, 3)),
    ]
    assert recording.steps == [1, 2, 3] and recording.last_step == 3
    record, generation = recording.step(1), recording.generation(1, 0)
    assert [recording.step(step).num_generations for step in (1, 2, 3)] == [1, 0, 1]
    (batch,) = record.window
    completions = [completion.token_ids for completion in generation.rollouts.completions]
    widths = batch.completion_mask_BT.sum(-1).tolist()
    kept = [row[:width] for row, width in zip(batch.completion_ids_BT.tolist(), widths, strict=True)]
    assert kept == completions and batch.rows_B.tolist() == [0, 1, 2, 3]
    # The reward counts even tokens.
    expected = [float(sum(token % 2 == 0 for token in ids)) for ids in completions]
    assert generation.rewards.rewards_NF.flatten().tolist() == expected
    assert generation.rollouts.prompts[0] == [
        {"role": "user", "content": generation.rollouts.prompts[0][0]["content"]}
    ]
    assert generation.rollouts.rows == [{}] * 4 and generation.rollouts.texts == [""] * 4
    losses = [log["loss"] for log in run.state.log_history if "loss" in log]
    assert [sum(part.loss for part in recording.step(n).computed) for n in (1, 2, 3)] == pytest.approx(losses)


def test_log_probs_and_gradient_norms_are_those_of_the_update(tmp_path):
    seen: list[LogprobOutput] = []

    class Seen(GRPOTrainer):
        def compute_logprobs(self, model: Any, batch: Any, *, with_entropy: bool = False) -> LogprobOutput:
            found = super().compute_logprobs(model, batch, with_entropy=with_entropy)
            if torch.is_grad_enabled():
                seen.append(found)
            return found

    run, recording = saved(tmp_path, kind=Seen, max_steps=1, max_grad_norm=1e-3)
    record = recording.step(1)
    assert len(record.computed) == len(seen) == 1
    assert torch.equal(record.computed[0].logps_BT, seen[0].logps_BT)
    assert set(record.gradient_norms) == {name for name, _ in run.model.named_parameters()}
    # Clipped to the limit: the norm over all parameters is that of max_grad_norm.
    assert sum(norm**2 for norm in record.gradient_norms.values()) ** 0.5 == pytest.approx(1e-3, rel=1e-2)


def test_nothing_is_saved_unless_asked_for(tmp_path):
    run = trainer(tmp_path, max_steps=1)
    run.train()
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.slow
def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "save_rollouts": True}
    trainer(tmp_path, max_steps=3, **settings).train()
    before = (tmp_path / FOLDER / file_name("step", 1, 0)).read_bytes()
    again = trainer(tmp_path, max_steps=2, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert Recording(tmp_path / FOLDER).steps == [1, 2]
    assert "generation-000003.0.rank0.pt.gz" not in names(tmp_path)
    assert (tmp_path / FOLDER / file_name("step", 1, 0)).read_bytes() == before


def test_a_new_run_renames_the_folder_of_an_earlier_one(tmp_path):
    saved(tmp_path, max_steps=2)
    _, recording = saved(tmp_path, max_steps=1)
    assert recording.steps == [1]
    (earlier,) = tmp_path.glob(f"{FOLDER}-*")
    assert Recording(earlier).steps == [1, 2]


def test_a_link_to_the_folder_stays(tmp_path):
    (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    _, recording = saved(tmp_path, max_steps=1)
    assert recording.steps == [1] and (tmp_path / FOLDER).is_symlink()
    assert Recording(tmp_path / "elsewhere").steps == [1]


def test_a_generation_is_written_before_the_step_that_fails(tmp_path):
    class Fails(GRPOTrainer):
        def compute_policy_loss(self, batch: Any, logprobs: Any) -> Any:
            raise ArithmeticError("planted")

    run = trainer(tmp_path, kind=Fails, save_rollouts=True)
    with pytest.raises(ArithmeticError):
        run.train()
    assert names(tmp_path) == ["generation-000001.0.rank0.pt.gz", "run.json"]
    assert Recording(tmp_path / FOLDER).steps == []


def test_rows_that_are_computed_again_count_once(tmp_path):
    run, recording = saved(tmp_path, max_steps=1)
    files, (batch,) = files_of(run), recording.step(1).window
    logps_BT = torch.zeros_like(batch.token_weights_BT)
    one, two = batch.select([0, 1]), batch.select([2, 3])
    for part in (one, two, one, batch):  # after an out-of-memory error the window begins again
        run.call_callbacks("on_loss", batch=part, logps_BT=logps_BT[: len(part)], loss=torch.tensor(1.0))
        rows = [row for part in files._record.computed for row in part.rows]
        assert len(set(rows)) == len(rows)
    assert [len(part.rows) for part in files._record.computed] == [4]


def test_images_are_stored_once_by_digest(tmp_path):
    run, recording = saved(tmp_path, max_steps=1)
    generation = recording.generation(1, 0)
    pixels = [torch.full((1, 3), float(n)) for n in (1, 2)]
    images = [ImageInputs({"pixels": pixels[n]}, {"types": [1, 0]}) for n in (0, 0, 1)] + [ImageInputs()]
    rollouts = generation.rollouts
    for _ in range(2):
        run.state.global_step = 6
        files_of(run)._begin_step()
        changed = replace(rollouts, images=images)
        run.call_callbacks("on_generation_end", rollouts=changed, rewards=generation.rewards)
    stored = sorted((tmp_path / FOLDER / "images").iterdir())
    assert [path.name for path in stored] == sorted({f"{image.digest}.pt.gz" for image in images[1:3]})
    found = recording.generation(7, 0).rollouts.images
    assert [image.digest for image in found] == [image.digest for image in images]
    assert found[0].token_types == {"types": [1, 0]} and found[3].arrays == {}


def test_the_header_has_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted-key-of-wandb")
    token = "hf_planted000000000000000000hubtoken"
    kwargs = {"note": "planted-key-of-wandb", "token": token, "api_key": "planted-by-name-alone"}
    saved(tmp_path, max_steps=1, hub_token=token, chat_template_kwargs=kwargs)
    text = (tmp_path / FOLDER / "run.json").read_text()
    assert "planted" not in text.replace(str(tmp_path), "") and "<WANDB_API_KEY>" in text
    header = json.loads(text)
    assert header["settings"]["learning_rate"] == 1e-2 and "steps_per_generation" not in header["settings"]
    assert header["versions"]["torch"] == version("torch") and header["max_steps"] == 1
    assert header["trainer"][0] == "groupwise.trainer.GRPOTrainer" and header["sharded"] is False
    assert header["reward_funcs"] == ["count_reward"] and header["num_prompts"] == 8
    files = b"".join(path.read_bytes() for path in (tmp_path / FOLDER).glob("*.gz"))
    assert token.encode() not in files


def test_gradient_norms_of_parameters_without_a_gradient_are_left_out():
    layer = torch.nn.Linear(2, 1)
    assert gradient_norms(layer) == {}
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    assert gradient_norms(layer) == {"weight": 5.0}


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def fails(path: Path, content: bytes) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("groupwise.reporting.rollout_files.replace_file", fails)
    run, _ = saved(tmp_path, max_steps=1)
    assert run.state.global_step == 1
    assert any("was not written: OSError: no space left" in record.getMessage() for record in caplog.records)


def test_a_full_disk_while_an_image_is_recorded_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    run, _ = saved(tmp_path, max_steps=1)
    files = RolloutFiles(run)
    monkeypatch.setattr("pathlib.Path.write_bytes", full_disk)
    rollouts = SimpleNamespace(images=[ImageInputs({"pixels": torch.ones(2)}, (), "0" * 8)])
    files.on_generation_end(run.args, run.state, run.control, rollouts, None)
    assert "generation 0 of step 2" in caplog.text and "No space left" in caplog.text
    monkeypatch.undo()
    assert not [path.name for path in tmp_path.rglob("*.tmp")] and "000002.0" not in str(names(tmp_path))


def full_disk(path: Path, content: bytes) -> None:
    path.touch()  # its first bytes
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_recordings_of_runs_that_end_within_a_second_are_all_kept(tmp_path):
    for steps in (1, 2, 3):
        saved(tmp_path, max_steps=steps)
        os.utime(tmp_path / FOLDER, (1e9, 1e9))
    found = [Recording(path).steps for path in tmp_path.glob(f"{FOLDER}*")]
    assert sorted(found) == [[1], [1, 2], [1, 2, 3]]
