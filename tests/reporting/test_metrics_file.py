"""``metrics.jsonl`` and ``settings.json``: what runs write and keep; files that are replaced.

Files: ``files.py``.
"""

from __future__ import annotations

import json
import os
import threading

import pytest
from support.runs import trainer
from transformers import TrainerControl, TrainerState

from groupwise import GRPOConfig
from groupwise.reporting.metrics_file import (
    METRICS_FILE,
    SETTINGS_FILE,
    MetricsFileCallback,
    read_metrics,
    replace_file,
)


def config(directory) -> GRPOConfig:
    return GRPOConfig(str(directory), use_cpu=True, bf16=False, report_to="none")


def state(step: int, first: bool = True) -> TrainerState:
    return TrainerState(global_step=step, is_world_process_zero=first)


def test_a_line_has_step_time_and_all_values(tmp_path):
    args, callback = config(tmp_path / "run"), MetricsFileCallback()
    callback.on_train_begin(args, state(0), TrainerControl())
    callback.on_log(args, state(1), TrainerControl(), {"reward": 0.5, "loss": float("nan"), "who": tmp_path})
    callback.on_log(args, state(2, first=False), TrainerControl(), {"reward": 0.5})
    (record,) = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert record.pop("time") > 1e9
    assert record == {"step": 1, "reward": 0.5, "loss": None, "who": str(tmp_path)}


def test_a_new_run_keeps_the_file_of_an_earlier_one(tmp_path):
    args, callback = config(tmp_path), MetricsFileCallback()
    (tmp_path / METRICS_FILE).write_text('{"step": 7}\n')
    callback.on_train_begin(args, state(0), TrainerControl())
    (kept,) = tmp_path.glob("metrics-*.jsonl")
    assert kept.read_text() == '{"step": 7}\n' and not (tmp_path / METRICS_FILE).exists()


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("name", [METRICS_FILE, SETTINGS_FILE])
def test_a_link_stays_and_its_target_is_written(tmp_path, name, step):
    (tmp_path / "run").mkdir()
    target, link = tmp_path / "target", tmp_path / "run" / name
    target.write_text('{"step": 1}\n{"step": 2}\n')
    link.symlink_to(target)
    args, callback = config(tmp_path / "run"), MetricsFileCallback()
    callback.on_train_begin(args, state(step), TrainerControl())
    callback.on_log(args, state(3), TrainerControl(), {"reward": 0.5})
    assert link.is_symlink() and link.resolve() == target
    if name == METRICS_FILE:
        assert [record["step"] for record in read_metrics(target)] == [[3], [1, 3]][step]
    else:
        assert "settings" in json.loads(target.read_text())


def test_pipes_are_written_and_stay(tmp_path):
    """As devices; of those, root would replace the machine's."""
    pipe, link, read = tmp_path / "pipe", tmp_path / METRICS_FILE, []
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
        reader.start()
        replace_file(path, b"text")
        reader.join(60)
    assert read == [b"text", b"text"]
    for step in (0, 1):
        MetricsFileCallback().on_train_begin(config(tmp_path), state(step), TrainerControl())
    assert pipe.is_fifo() and link.is_symlink()


def test_evaluations_before_training_stay(tmp_path):
    """Those of this trainer; a second training of it begins a new file."""
    args, callback = config(tmp_path), MetricsFileCallback()
    (tmp_path / METRICS_FILE).write_text('{"step": 7}\n')
    callback.on_log(args, state(0), TrainerControl(), {"eval_reward": 0.25})
    callback.on_train_begin(args, state(0), TrainerControl())
    callback.on_log(args, state(1), TrainerControl(), {"reward": 0.5})
    assert [record["step"] for record in read_metrics(tmp_path / METRICS_FILE)] == [0, 1]
    (kept,) = tmp_path.glob("metrics-*.jsonl")
    assert kept.read_text() == '{"step": 7}\n'
    kept.unlink()
    callback.on_train_begin(args, state(0), TrainerControl())
    (kept,) = tmp_path.glob("metrics-*.jsonl")
    assert [record["step"] for record in read_metrics(kept)] == [0, 1]


def test_an_evaluation_alone_begins_the_file_of_the_run(tmp_path):
    args, callback = config(tmp_path), MetricsFileCallback()
    callback.on_log(args, state(0), TrainerControl(), {"eval_reward": 0.25})
    callback.on_train_begin(args, state(0), TrainerControl())
    assert [record["eval_reward"] for record in read_metrics(tmp_path / METRICS_FILE)] == [0.25]
    assert list(tmp_path.glob("metrics-*.jsonl")) == []


def test_a_resumed_run_drops_later_steps_and_an_incomplete_line(tmp_path):
    args, callback = config(tmp_path), MetricsFileCallback()
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    callback.on_train_begin(args, state(2), TrainerControl())
    callback.on_log(args, state(3), TrainerControl(), {"reward": 1.0})
    assert [record["step"] for record in read_metrics(tmp_path / METRICS_FILE)] == [1, 2, 3]


def test_an_evaluation_before_a_resumed_training_is_no_double(tmp_path):
    args, path = config(tmp_path), tmp_path / METRICS_FILE
    path.write_text('{"step": 0, "time": 1, "eval_reward": 0.1}\n{"step": 1}\n{"step": 2}\n{"ste')
    callback = MetricsFileCallback()
    for logs in ({"eval_reward": 0.1}, {"eval_math_reward": 0.2}):  # the script begins again
        callback.on_log(args, state(0), TrainerControl(), logs)
    callback.on_train_begin(args, state(1), TrainerControl())
    callback.on_log(args, state(2), TrainerControl(), {"reward": 1.0})
    records = [
        (record["step"], *[name for name in record if name.endswith("reward")])
        for record in read_metrics(path)
    ]
    assert records == [(0, "eval_reward"), (0, "eval_math_reward"), (1,), (2, "reward")]


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    args = config(tmp_path / "run")
    (tmp_path / "run" / METRICS_FILE).mkdir(parents=True)
    MetricsFileCallback().on_log(args, state(1), TrainerControl(), {"reward": 1.0})
    assert "step 1 was not written: IsADirectoryError" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("last", [2, 3])
def test_a_run_that_was_resumed_has_every_step_once(tmp_path, last):
    settings = {"logging_steps": 1, "save_steps": 2, "save_strategy": "steps"}
    trainer(tmp_path, **settings, max_steps=last).train()
    resumed = trainer(tmp_path, **settings, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    records = read_metrics(tmp_path / METRICS_FILE)
    rewards = [(record["step"], record["reward"]) for record in records if "reward" in record]
    history = [(log["step"], log["reward"]) for log in resumed.state.log_history if "reward" in log]
    assert rewards == history and [step for step, _ in rewards] == [1, 2, 3, 4]
    assert all(json.dumps(record) for record in records)


TORN = b'{"step": 1}\n{"st\n\x00\xff\n[1]\n5\n{"step": "x"}\n{"step": 2}\n{"step": 3}\n'


def test_lines_that_are_no_log_are_read_past_and_dropped_by_a_resumed_run(tmp_path, caplog):
    args, path = config(tmp_path), tmp_path / METRICS_FILE
    path.write_bytes(TORN)
    for _ in range(2):
        assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    assert [m for m in caplog.messages if "torn" in m] == [
        f"{path}: no log in line 2, 3, 4, 5, 6, torn by a full disk or a kill"
    ]
    MetricsFileCallback().on_train_begin(args, state(2), TrainerControl())
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_log_after_a_torn_line_has_a_line_of_its_own(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_bytes(b'{"step": 1}\n{"ste')
    callback = MetricsFileCallback()
    for step in (2, 3):
        callback.on_log(config(tmp_path), state(step), TrainerControl(), {"reward": 0.5})
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


def test_a_log_keeps_step_and_time_of_the_user_beside_those_of_the_record(tmp_path):
    logs = {"step": -1, "time": "noon", "time_": "one", "reward": 1.0}
    MetricsFileCallback().on_log(config(tmp_path), state(7), TrainerControl(), logs)
    (record,) = read_metrics(tmp_path / METRICS_FILE)
    assert (record["step"], record["step_"], record["time_"], record["time__"]) == (7, -1, "noon", "one")
    assert record["time"] > 1e9


def test_a_log_that_cannot_be_saved_does_not_end_the_run(tmp_path, caplog):
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    callback = MetricsFileCallback()
    callback.on_log(config(tmp_path), state(1), TrainerControl(), {"odd": Odd()})
    callback.on_log(config(tmp_path), state(1), TrainerControl(), {(1, 2): 1.0})
    callback.on_log(config(tmp_path), state(2), TrainerControl(), {"reward": 1.0})
    assert [record["step"] for record in read_metrics(tmp_path / METRICS_FILE)] == [2]
    assert "step 1 was not written: RuntimeError: no text" in caplog.text


def test_earlier_runs_of_one_second_are_all_kept(tmp_path):
    args, path = config(tmp_path), tmp_path / METRICS_FILE
    for number in range(3):
        path.write_text(f'{{"step": {number}}}\n')
        os.utime(path, (1e9, 1e9))
        MetricsFileCallback().on_train_begin(args, state(0), TrainerControl())
    kept = [read_metrics(path)[0]["step"] for path in sorted(tmp_path.glob("metrics-*.jsonl"))]
    assert sorted(kept) == [0, 1, 2]
