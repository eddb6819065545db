"""Checkpoint directories: how they get their names, which one is found, which ones are kept.

Files: ``hf/run_directory.py``.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from support.iterative_runs import runner
from support.resume_runs import make_trainer, vowels
from support.runs import policy, prompts, trainer
from transformers import TrainerCallback

from groupwise import GRPOConfig
from groupwise.config.changes import take_snapshot
from groupwise.errors import ConfigError
from groupwise.hf import run_directory
from groupwise.hf.checkpointing import check_loaded, load_states, save_policy, save_state
from groupwise.hf.run_directory import RunDirectory, find_checkpoint


def _write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_text(content)
    return directory


def _names(directory: Path) -> list[str]:
    """Without logged metrics, settings and the file of the lock, which every run writes."""
    names = [path.name for path in directory.iterdir() if path.suffix != ".jsonl"]
    return sorted(name for name in names if name not in ("settings.json", "_run.lock"))


def _run(directory: Path) -> RunDirectory:
    return RunDirectory(GRPOConfig(str(directory), use_cpu=True, bf16=False, report_to="none"))


def _publish(directory: Path) -> None:
    run = _run(directory)
    with run.locked():
        staged = _write(run.staging / "checkpoint-3", weights="new")
        run.publish(staged, directory / "checkpoint-3")
        assert not run.staging.exists()


def test_publish_moves_the_whole_directory(tmp_path: Path) -> None:
    _publish(tmp_path)
    assert _names(tmp_path) == ["checkpoint-3"]
    assert _names(tmp_path / "checkpoint-3") == ["groupwise_manifest.json", "weights"]
    assert (tmp_path / "checkpoint-3" / "weights").read_text() == "new"


def test_publish_replaces_a_checkpoint_of_the_same_name(tmp_path: Path) -> None:
    _write(tmp_path / "checkpoint-3", weights="old", left_over="old")
    _publish(tmp_path)
    assert _names(tmp_path) == ["checkpoint-3"]
    assert _names(tmp_path / "checkpoint-3") == ["groupwise_manifest.json", "weights"]
    assert (tmp_path / "checkpoint-3" / "weights").read_text() == "new"


_COMPLETE = {"trainer_state.json": '{"global_step": 3}', "groupwise_state_0.pt": "x"}


def test_weights_that_nobody_compares_are_reported(tmp_path: Path, caplog: Any) -> None:
    """FSDP 1 saves no digests: an adapter would be loaded onto any base without a word."""
    model = policy()
    save_policy(str(tmp_path), model, {})
    check_loaded(str(tmp_path), model, {})
    assert "the loaded weights are not compared" in caplog.text and "FSDP 1" in caplog.text


def test_find_checkpoint_takes_the_highest_step(tmp_path: Path, caplog: Any) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best", "checkpoint-11.old"):
        _write(tmp_path / name, **_COMPLETE)
    (tmp_path / "checkpoint-50").write_text("a file")
    _write(tmp_path / "_incomplete" / "checkpoint-99", **_COMPLETE)
    assert find_checkpoint(True, str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert "skipped" not in caplog.text


@pytest.mark.parametrize(
    "files",
    [{}, {"checkpoint-is-incomplete.txt": "x"}, {"trainer_state.json": '{"global_step": 5}'}],
    ids=list,
)
def test_find_checkpoint_skips_what_cannot_be_resumed(
    tmp_path: Path, caplog: Any, files: dict[str, str]
) -> None:
    _write(tmp_path / "checkpoint-3", **_COMPLETE)
    _write(tmp_path / "checkpoint-4", **_COMPLETE)
    for step in (5, 6):
        _write(tmp_path / f"checkpoint-{step}", **files)
    assert find_checkpoint(True, str(tmp_path)) == str(tmp_path / "checkpoint-4")
    for step in (5, 6):
        assert f"checkpoint-{step} skipped: the state of the run is not complete there" in caplog.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("groupwise_manifest.json", text) for text in ("null", "[]", "{}", '{"files": null}', "[" * 10**5)),
        *(("groupwise_manifest.json", text) for text in ('{"files": {"x": 3}}', '{"files": {}, "run": []}')),
        *(("trainer_state.json", text) for text in ("null", "[]", "{}", '{"global_step": "3"}')),
        *(
            ("groupwise_policy.json", text)
            for text in ("null", "[]", "{}", '{"adapters": [], "weights": {}}')
        ),
        ("model.safetensors.index.json", '{"weight_map": []}'),
    ],
)
def test_json_of_another_shape_is_named_and_the_newest_sound_checkpoint_taken(
    tmp_path: Path, caplog: Any, name: str, content: str
) -> None:
    _write(tmp_path / "checkpoint-3", **_COMPLETE)
    _write(tmp_path / "checkpoint-4", **{**_COMPLETE, name: content})
    assert find_checkpoint(True, str(tmp_path)) == str(tmp_path / "checkpoint-3")
    assert f"checkpoint-4 skipped: {tmp_path / 'checkpoint-4' / name}" in caplog.text
    with pytest.raises(ConfigError, match=rf"{name}.*newest sound checkpoint is '.*checkpoint-3'"):
        find_checkpoint(str(tmp_path / "checkpoint-4"), str(tmp_path))
    shutil.rmtree(tmp_path / "checkpoint-3")
    with pytest.raises(ConfigError, match=rf"{name}.*none beside it is sound"):
        find_checkpoint(True, str(tmp_path))


def _rotate(newest: Path, limit: int | None, best: str | None) -> None:
    run = _run(newest.parent)
    with run.locked():
        run.args.save_total_limit = limit
        run.rotate(newest, best)


def test_rotation_deletes_incomplete_checkpoints_first(tmp_path: Path) -> None:
    _checkpoints_of_age(tmp_path, 1, 2, 3, 4)
    for step in (1, 2, 4):
        for name, content in _COMPLETE.items():
            (tmp_path / f"checkpoint-{step}" / name).write_text(content)
        os.utime(tmp_path / f"checkpoint-{step}", (1000 + step, 1000 + step))
    _rotate(tmp_path / "checkpoint-4", 2, None)
    assert _names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_find_checkpoint_takes_a_directory_as_given(tmp_path: Path) -> None:
    _write(tmp_path / "mine")
    assert find_checkpoint(str(tmp_path / "mine"), "elsewhere") == str(tmp_path / "mine")


@pytest.mark.parametrize("nothing", [None, False])
def test_find_checkpoint_without_resuming(tmp_path: Path, nothing: Any) -> None:
    _write(tmp_path / "checkpoint-9")
    assert find_checkpoint(nothing, str(tmp_path)) is None


def test_find_checkpoint_refuses_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no checkpoint"):
        find_checkpoint(True, str(tmp_path))
    with pytest.raises(ConfigError, match="contains no checkpoint"):
        find_checkpoint(True, str(tmp_path / "never made"))
    with pytest.raises(ConfigError, match=r"checkpoint-7.*not a directory"):
        find_checkpoint(str(tmp_path / "checkpoint-7"), str(tmp_path))


_PLAIN: Any = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU)


def _of_rank(rank: int, world_size: int) -> Any:
    return SimpleNamespace(process_index=rank, world_size=world_size)


def test_state_comes_back(tmp_path: Path) -> None:
    state = {"numbers": torch.arange(3), "nested": {"coef": (0.5, None)}}
    for rank in (0, 1):
        save_state(str(tmp_path), rank, 2, {**state, "rank": rank})
    for rank in (0, 1):
        (back,) = load_states(str(tmp_path), _of_rank(rank, 2), {}, _PLAIN)
        assert back["numbers"].tolist() == [0, 1, 2]
        assert (back["nested"], back["rank"]) == ({"coef": (0.5, None)}, rank)


def test_flat_parameters_of_another_number_of_processes_are_refused(tmp_path: Path) -> None:
    for written in (0, 1):
        save_state(str(tmp_path), written, 2, {})
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False)
    with pytest.raises(ConfigError, match="written by 2 processes and cannot be resumed with 3 under FSDP 1"):
        load_states(str(tmp_path), _of_rank(2, 3), {}, accelerator)


def test_shards_that_cannot_be_converted_are_refused(tmp_path: Path) -> None:
    """As those of an optimizer without Adam's moments; here the engine's files are missing."""
    config = GRPOConfig(str(tmp_path), per_device_train_batch_size=8, use_cpu=True, bf16=False)
    settings = {"generation_batch_size": 8, "steps_per_generation": 1, "gradient_accumulation_steps": 1}
    for written in (0, 1):
        save_state(str(tmp_path), written, 2, {"settings": settings})
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    with pytest.raises(ConfigError, match=r"cannot convert .* of 2 processes for 1 .*; start 2 processes"):
        load_states(str(tmp_path), config, take_snapshot(config), accelerator)


def test_a_directory_without_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no groupwise_state_0\.pt.*save_only_model"):
        load_states(str(tmp_path), _of_rank(0, 1), {}, _PLAIN)


class OfAnotherVersion:
    pass


def test_records_of_another_version_are_refused(tmp_path):
    torch.save({"world_size": 1, "buffer": OfAnotherVersion()}, tmp_path / "groupwise_state_0.pt")
    with pytest.raises(ConfigError, match="resume with the version that wrote it"):
        load_states(str(tmp_path), _of_rank(0, 1), {}, _PLAIN)


def test_resuming_from_weights_alone_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_only_model=True, max_steps=1).train()
    assert "model.safetensors" in _names(tmp_path / "checkpoint-1")
    with pytest.raises(ConfigError, match="save_only_model"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_changed_settings_that_reorder_prompts_are_reported_on_resume(tmp_path: Path, caplog: Any) -> None:
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 2}
    trainer(tmp_path, **settings).train()
    trainer(tmp_path, **{**settings, "max_steps": 2}).train(resume_from_checkpoint=True)
    assert "order of prompts" not in caplog.text  # another length of the run reorders nothing
    changes = {"max_steps": 3, "num_generations": 2, "train_dataset": prompts(6)}
    trainer(tmp_path, **{**settings, **changes}).train(resume_from_checkpoint=True)
    assert (
        "num_generations=2 (was 4), rows of train_dataset=6 (was 8), which changes the order" in caplog.text
    )


def test_resuming_without_the_weights_of_a_synced_reference_is_refused(tmp_path: Path) -> None:
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "beta": 0.1}
    trainer(tmp_path, **settings).train()
    with pytest.raises(ConfigError, match=r"written without it.*resume with sync_ref_model=False"):
        trainer(tmp_path, **settings, sync_ref_model=True).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_ignored_weights_of_a_synced_reference_are_reported(tmp_path: Path, caplog: Any) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "beta": 0.1}
    trainer(tmp_path, **settings, max_steps=1, sync_ref_model=True).train()
    trainer(tmp_path, **settings, max_steps=2, sync_ref_model=True).train(resume_from_checkpoint=True)
    assert "the reference is the initial model" not in caplog.text
    trainer(tmp_path, **settings, max_steps=3).train(resume_from_checkpoint=True)
    assert "resumed with sync_ref_model=False: the reference is the initial model" in caplog.text


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no checkpoint"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)


def _checkpoints_of_age(directory: Path, *steps: int) -> None:
    """The first one is the oldest."""
    for age, step in enumerate(steps):
        path = _write(directory / f"checkpoint-{step}", weights="x")
        os.utime(path, (1000 + age, 1000 + age))


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [1, 2, 3, 9]),
        (4, None, [1, 2, 3, 9]),
        (2, None, [2, 3]),  # 9 is the oldest
        (1, None, [3]),
        (2, 1, [1, 3]),
        (1, 1, [1, 3]),  # the newest and the best stay, whatever the limit
        (1, 3, [3]),
        (3, 9, [2, 3, 9]),
    ],
)
def test_rotation(tmp_path: Path, limit: int | None, best: int | None, kept: list[int]) -> None:
    _checkpoints_of_age(tmp_path, 9, 1, 2, 3)
    _rotate(tmp_path / "checkpoint-3", limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert _names(tmp_path) == [f"checkpoint-{step}" for step in kept]


def test_rotation_knows_the_best_by_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _checkpoints_of_age(tmp_path / "run", 1, 2, 3)
    monkeypatch.chdir(tmp_path)
    _rotate(tmp_path / "run" / "checkpoint-3", 1, "run/checkpoint-1")
    assert _names(tmp_path / "run") == ["checkpoint-1", "checkpoint-3"]


def _score_by_step(completions: list[str], trainer_state: Any, log_metric: Any, **_: Any) -> list[float]:
    log_metric("score", {0: 0.0, 1: 1.0, 2: 5.0, 3: 2.0, 4: 3.0}[trainer_state.global_step])
    return [float(len(set(text))) for text in completions]


def _saved_state(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "trainer_state.json").read_text())


_BEST = {"metric_for_best_model": "score", "greater_is_better": True, "reward_funcs": _score_by_step}


@pytest.mark.slow
def test_the_best_checkpoint_is_known_by_its_final_name_and_kept(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        save_total_limit=2,
        max_steps=4,
        **_BEST,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert _names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    for step in (2, 4):
        saved = _saved_state(tmp_path / f"checkpoint-{step}")
        assert saved["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
    best = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    last = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    now = trainer.model.state_dict()
    assert all(torch.equal(now[name], best[name]) for name in best)
    assert any(not torch.equal(now[name], last[name]) for name in last)


@pytest.mark.slow
def test_only_better_checkpoints_are_saved_on_request(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="best", max_steps=4, **_BEST
    )
    trainer.train()
    assert _names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert trainer.state.best_metric == 5.0
    # Older versions of transformers do not note the path with this strategy.
    assert trainer.state.best_model_checkpoint in (None, str(tmp_path / "checkpoint-2"))


@pytest.mark.slow
def test_a_resumed_run_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, **_BEST}
    make_trainer(tmp_path, max_steps=3, **settings).train()
    resumed = make_trainer(tmp_path, max_steps=4, save_total_limit=2, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert _names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.slow
def test_a_second_run_in_the_same_directory(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=2).train()
    (tmp_path / "checkpoint-1" / "left over").touch()
    second = make_trainer(tmp_path, max_steps=2, save_total_limit=2, seed=7)
    second.train()
    assert _names(tmp_path) == ["_earlier_runs", "checkpoint-1", "checkpoint-2"]
    assert "left over" not in _names(tmp_path / "checkpoint-1")
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(second.model.state_dict()[name], saved[name]) for name in saved)


def test_files_left_by_a_crash_are_not_in_the_next_checkpoint(tmp_path: Path) -> None:
    for name in ("_incomplete", "_incomplete_notes"):
        _write(tmp_path / name / "checkpoint-1", rng_state_5="of a larger run")
    make_trainer(tmp_path, max_steps=1).train()
    assert "rng_state_5" not in _names(tmp_path / "checkpoint-1")
    assert _names(tmp_path) == ["_incomplete_notes", "checkpoint-1"]


def test_a_failed_write_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, max_steps=2)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("groupwise.hf.checkpointing.save_state", full_disk)
    with pytest.raises(
        OSError, match=r"checkpoint-1 could not be written \(OSError: .*No space left"
    ) as caught:
        trainer.train()
    assert caught.value.errno == errno.ENOSPC
    assert _names(tmp_path) == []


def test_an_interrupted_write_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("groupwise.hf.checkpointing.save_state", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, max_steps=2).train()
    assert _names(tmp_path) == []


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_disk_without_space_is_named(tmp_path: Path, file: str) -> None:
    """No file of this process can become as large as ``file``, the first of its size to be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class LimitFiles(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                size = (tmp_path / "checkpoint-1" / file).stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, before[1]))

    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.add_callback(LimitFiles())
    message = rf"{tmp_path}/checkpoint-2 could not be written .*; [0-9.,]+ MB are free"
    try:
        with pytest.raises(OSError, match=message):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert _names(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("policy", [True, False])
def test_a_full_disk_while_the_tokenizer_is_written_is_named(tmp_path: Path, policy: bool) -> None:
    """Its Rust library writes the file: no file of this process can become as large."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = runner(tmp_path)
    owner = run.trainer.processing_class if policy else run.scorer.tokenizer
    save = owner.save_pretrained

    def save_to_a_full_disk(*given: Any, **options: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
        try:
            return save(*given, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    owner.save_pretrained = save_to_a_full_disk
    with pytest.raises(
        OSError, match=r"checkpoint-1 could not be written \(.*File too large.*[0-9.] MB are free"
    ):
        run.train()
    assert _names(tmp_path) == []


class FakeHub:
    """Records the path of every file that is uploaded; background uploads run when files are flushed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        self.waiting: list[Callable[[], None]] = []
        monkeypatch.setattr(
            HfApi, "create_repo", lambda hub, name, **_: SimpleNamespace(repo_id=f"me/{name}")
        )
        monkeypatch.setattr(HfApi, "upload_folder", self.upload_folder)
        flush = run_directory.flush

        def flush_after_uploads(path: Path) -> None:  # a checkpoint is being written
            self.run_waiting()
            flush(path)

        monkeypatch.setattr(run_directory, "flush", flush_after_uploads)

    def upload_folder(self, *, folder_path: str, run_as_future: bool, **given: Any) -> Any:
        def upload() -> None:
            files = [path for path in Path(folder_path).rglob("*") if path.is_file()]
            names = [str(path.relative_to(folder_path)) for path in files]
            prefix = f"{given['path_in_repo']}/" if "path_in_repo" in given else ""
            self.paths += [
                prefix + name
                for name in filter_repo_objects(names, ignore_patterns=given.get("ignore_patterns"))
            ]

        self.waiting.append(upload)
        if not run_as_future:
            self.run_waiting()
        return SimpleNamespace(done=lambda: True)

    def run_waiting(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


#: Checkpoints in the repository, by strategy.
UPLOADED = {
    "every_save": [],
    "checkpoint": ["last-checkpoint"],
    "all_checkpoints": ["checkpoint-1", "checkpoint-2"],
    "end": [],
}


@pytest.mark.parametrize("strategy", UPLOADED)
def test_uploads_contain_whole_checkpoints_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """The third checkpoint fails, and its files stay, as after a kill."""
    hub = FakeHub(monkeypatch)
    output_dir = tmp_path / "run"
    trainer = make_trainer(
        output_dir,
        max_steps=3,
        push_to_hub=True,
        hub_strategy=strategy,
        hub_always_push=True,
        hub_model_id="model",
    )
    save = save_state

    def fail_at_third(directory: str, *given: Any) -> None:
        if trainer.state.global_step == 3:
            monkeypatch.setattr(RunDirectory, "clear_staging", lambda _: None)
            raise KeyboardInterrupt
        save(directory, *given)

    monkeypatch.setattr("groupwise.hf.checkpointing.save_state", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    hub.run_waiting()
    trainer.push_to_hub()
    assert {"model.safetensors", "README.md"} <= set(hub.paths)
    folders = {name.split("/")[0] for name in hub.paths if "checkpoint" in name}
    assert sorted(folders) == UPLOADED[strategy]
    for folder in folders:
        assert {f"{folder}/optimizer.pt", f"{folder}/groupwise_state_0.pt"} <= set(hub.paths)
    (half,) = tmp_path.rglob("checkpoint-3")
    assert (half / "model.safetensors").is_file() and half.parent.name == "_incomplete"
    assert [name for name in hub.paths if name.startswith("_")] == []


@pytest.mark.parametrize("hub_include", [None, ["completions", "metrics"]])
def test_data_of_a_run_are_uploaded_on_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_include: list[str] | None
) -> None:
    hub = FakeHub(monkeypatch)
    trainer = make_trainer(
        tmp_path / "run",
        max_steps=1,
        push_to_hub=True,
        hub_model_id="model",
        hub_include=hub_include,
        save_rollouts=True,
        log_completions=True,
        logging_steps=1,
    )
    files = (
        "report.html",
        "runs/a/events.out.tfevents.1",
        "reward-model-0/examples.json",
        "rollouts-1/run.json",
    )
    for name in (*files, "metrics-1.jsonl", "completions_eval/completions_00001.parquet", "notes.md"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("{}")
    trainer.train()
    hub.run_waiting()
    at_save = set(hub.paths)
    trainer.push_to_hub()
    asked = {
        *("completions/completions_00001.parquet", "completions_eval/completions_00001.parquet"),
        *("metrics.jsonl", "metrics-1.jsonl", "report.html", "runs/a/events.out.tfevents.1"),
    }
    of_the_model = {"config.json", "model.safetensors", "training_args.bin", "notes.md"}
    for uploaded in (at_save, set(hub.paths)):
        assert of_the_model <= uploaded
        data = {
            name for name in uploaded if "/" in name or name.startswith(("metrics", "report", "settings"))
        }
        assert data == (asked if hub_include else set())
    assert (tmp_path / "run" / "settings.json").is_file() and (tmp_path / "run" / "rollouts").is_dir()


def test_checkpoints_load_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = make_trainer(tmp_path, max_steps=1, reward_funcs=vowels)
    trainer.train()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    theirs = model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in trainer.model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint-1")("abc")["input_ids"] == [3, 4, 5]


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_kill_or_an_interrupt_at_any_rename_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """At the n-th rename. A killed run leaves one of both to the next run, an interrupted run in place."""
    rename = os.replace
    for kill_at in range(3):
        output_dir, calls = tmp_path / str(kill_at) / "run", []
        _write(output_dir / "checkpoint-3", weights="old")

        def counted(*paths: Any, calls: Any = calls, kill_at: int = kill_at) -> None:
            calls.append(paths)
            if len(calls) == kill_at + 1:
                raise KeyboardInterrupt
            rename(*paths)

        run = _run(output_dir)
        with run.locked(), monkeypatch.context() as patched:
            staged = _write(run.staging / "checkpoint-3", weights="new")
            patched.setattr(os, "replace", counted)
            try:
                run.publish(staged, output_dir / "checkpoint-3")
            except KeyboardInterrupt:
                if not is_killed:
                    run.clear_staging()
        assert len(calls) == (2 if is_killed or kill_at != 1 else 3) - (kill_at == 0)
        if is_killed:
            assert (output_dir / "checkpoint-3").exists() == (kill_at != 1)
            with _run(output_dir).locked():
                pass
        assert (output_dir / "checkpoint-3" / "weights").read_text() == ("old" if kill_at == 0 else "new")
        assert _names(output_dir) == ["checkpoint-3"]


def test_rotation_keeps_checkpoints_of_other_runs(tmp_path: Path) -> None:
    """As of one that was copied there while this run trained."""
    for step in (1, 2, 3):
        _write(tmp_path / f"checkpoint-{step}", **_COMPLETE)
    (tmp_path / "checkpoint-1" / "groupwise_manifest.json").write_text('{"run": "another", "files": {}}')
    _rotate(tmp_path / "checkpoint-3", 1, None)
    assert _names(tmp_path) == ["checkpoint-1", "checkpoint-3"]


def test_rotation_does_not_look_at_the_clock(tmp_path: Path) -> None:
    for step, age in ((1, 5), (4, 1), (5, 0)):  # times were set back
        path = _write(tmp_path / f"checkpoint-{step}", weights="x")
        os.utime(path, (1000 + age, 1000 + age))
    _rotate(tmp_path / "checkpoint-5", 2, None)
    assert _names(tmp_path) == ["checkpoint-4", "checkpoint-5"]
