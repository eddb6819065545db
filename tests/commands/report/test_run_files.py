from __future__ import annotations

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.runs import chats, trainer
from support.saved_runs import save_run

from groupwise.commands.report.html_report import write_report
from groupwise.commands.report.run_files import read_run, saved_text
from groupwise.errors import ConfigError


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no logs in metrics\.jsonl or checkpoint"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "name", ["settings.json", "checkpoint-5/trainer_state.json", "completions/completions_00001.parquet"]
)
def test_a_damaged_file_is_named(name, tmp_path):
    save_run(tmp_path / "run", [{"reward": 1.0}], {"max_steps": 3})
    path = tmp_path / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"half')
    with pytest.raises(ConfigError, match=f"reading '.*{path.name}' raised"):
        read_run(tmp_path / "run")


def table(**columns):
    rows = {"step": [1, 2], "prompt": ["p", "q"], "completion": ["a", "b"], "correct": [1.0, 0.0]}
    return pa.table({**rows, "advantage": [0.5, -0.5], **columns})


@pytest.mark.parametrize(
    ("columns", "steps", "warning"),
    [
        ({"prompt": [None, "q"], "completion": ["a", None]}, [1, 2], ""),
        ({"advantage": pa.array([None, None], pa.float64()), "correct": [None, 1.0]}, [1, 2], ""),
        ({"step": [None, 2]}, [2], "row 0 of .*completions_00001.parquet is left out: TypeError"),
        ({"correct": ["yes", "1"]}, [2], "row 0 of .* is left out: ValueError"),
        ({"prompt": [[{"content": "x"}], [{"content": "y"}]]}, [], "row 1 of .* is left out: KeyError"),
    ],
    ids=["no text", "no numbers", "no step", "a reward that is no number", "a message without a role"],
)
def test_rows_that_can_be_shown_are_read(columns, steps, warning, tmp_path, caplog):
    run = save_run(tmp_path / "run", [{"reward": 1.0}])
    (run / "completions").mkdir()
    pq.write_table(table(**columns), run / "completions" / "completions_00001.parquet")
    assert [row.step for row in read_run(run).completions] == steps
    assert re.search(warning, caplog.text) and bool(warning) == bool(caplog.text)
    write_report([run])


def test_a_table_without_a_column_is_left_out_by_name(tmp_path, caplog):
    run = save_run(tmp_path / "run", [{"reward": 1.0}])
    (run / "completions").mkdir()
    pq.write_table(table().drop_columns(["advantage"]), run / "completions" / "completions_00001.parquet")
    assert read_run(run).completions == []
    assert "completions_00001.parquet is left out: it has no column advantage" in caplog.text


@pytest.mark.parametrize(
    "saved",
    [{}, {"settings": None}, {"model": None, "settings": {"reward_weights": ["a"]}}, {"settings": [1]}],
    ids=str,
)
def test_settings_are_shown_as_far_as_they_are_there(saved, tmp_path):
    run = save_run(tmp_path / "run", [{"reward": 1.0}], rows=[(1, "p", "a", 1.0, 0.0)])
    (run / "settings.json").write_text(json.dumps(saved))
    assert write_report([run]).is_file()


def test_logs_and_texts_that_are_odd_are_shown(tmp_path):
    """A time that is no number, an entry of the history that is no log, a half of a surrogate pair."""
    run = save_run(
        tmp_path / "run", [{"time": "noon", "reward": 1.0}, {"reward": 0.5}], {"run_name": "\ud83d"}
    )
    assert "?" in write_report([run]).read_text(encoding="utf-8")
    (tmp_path / "other" / "checkpoint-1").mkdir(parents=True)
    state = {"log_history": [None, 7, {"step": 1, "reward": 1.0}]}
    (tmp_path / "other" / "checkpoint-1" / "trainer_state.json").write_text(json.dumps(state))
    assert [log["reward"] for log in read_run(tmp_path / "other").logs] == [1.0]


def test_logs_of_a_checkpoint_stand_in_for_the_file(tmp_path):
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        history = [{"step": at, "reward": at / 10} for at in range(1, step + 1)]
        state = {"log_history": history, "max_steps": 20, "save_steps": 2, "global_step": step}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    run = read_run(tmp_path)
    assert run.checkpoints == [2, 10]
    assert [log["step"] for log in run.logs] == list(range(1, 11))
    assert run.settings == {"max_steps": 20, "save_steps": 2}
    saved = save_run(tmp_path / "with_file", [{"reward": 1.0}], {"max_steps": 3})
    (tmp_path / "checkpoint-10").rename(saved / "checkpoint-10")
    run = read_run(saved)
    assert len(run.logs) == 1 and run.settings["max_steps"] == 3 and run.checkpoints == [10]


def test_a_saved_chat_is_read_as_text():
    def message(role, content, **given):
        return {"role": role, "content": content, "name": None, "thinking": None, "tool_calls": None, **given}

    assert saved_text("plain") == "plain"
    assert saved_text([message("assistant", "Four.")], only=True) == "Four."
    assert saved_text([message("assistant", "Four.")]) == "assistant: Four."
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert saved_text([message("assistant", "", tool_calls=[call])], only=True) == "assistant: add({})"
    blocks = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    assert saved_text([message("user", blocks)]) == "user: <image>What?"


def test_the_files_of_a_trained_run_are_read(tmp_path):
    """Settings are those of the run, without the token; completions have prompt, text and reward."""
    run = trainer(
        tmp_path, train_dataset=chats(), max_steps=2, logging_steps=1, log_completions=True, seed=7,
        hub_token="hf_" + "a" * 30, num_completions_to_print=0, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    run.train()
    read = read_run(tmp_path)
    assert read.settings["seed"] == 7 and read.settings["world_size"] == 1 and read.checkpoints == [2]
    assert read.settings["beta"] == run.args.beta
    assert "hf_aaaa" not in (tmp_path / "settings.json").read_text()
    rewarded = [log["reward"] for log in read.logs if "reward" in log]
    assert rewarded == [log["reward"] for log in run.state.log_history if "reward" in log]
    first = [row for row in read.completions if row.step == 0]
    assert len(first) == run.args.generation_batch_size and {row.mode for row in first} == {"train"}
    assert all(row.prompt.startswith("user: w") for row in first)
    mean = sum(row.rewards["count_reward"] for row in first) / len(first)
    assert mean == pytest.approx(rewarded[0], abs=1e-6)
