from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.runs import chats, trainer
from support.saved_runs import save_run

from groupwise.commands.report.html_report import write_report
from groupwise.commands.report.run_files import read_run, saved_text
from groupwise.errors import ConfigError


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no logs in metrics\.jsonl and no completions"):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["settings.json", "completions/completions_00001.parquet"])
def test_a_damaged_file_is_named(name, tmp_path):
    save_run(tmp_path / "run", [{"reward": 1.0}], {"max_steps": 3})
    path = tmp_path / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"half')
    with pytest.raises(ConfigError, match=f"reading '.*{path.name}' raised"):
        read_run(tmp_path / "run")


def table(**columns):
    rows = {"step": [1, 2], "prompt": ["p", "q"], "completion": ["a", "b"], "correct": [1.0, 0.0]}
    given = {**rows, "advantage": [0.5, -0.5], **columns}
    return pa.table({name: values for name, values in given.items() if values is not None})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"completion": None}, "ValueError: 'completion' is not in list"),
        ({"prompt": [[{"content": "x"}], [{"content": "y"}]]}, "KeyError: 'role'"),
    ],
    ids=["no completions", "a message without a role"],
)
def test_a_table_that_is_none_of_completions_is_named(columns, message, tmp_path):
    run = save_run(tmp_path / "run", [{"reward": 1.0}])
    (run / "completions").mkdir()
    pq.write_table(table(**columns), run / "completions" / "completions_00001.parquet")
    with pytest.raises(ConfigError, match=rf"reading '.*completions_00001.parquet' raised {message}"):
        read_run(run)


@pytest.mark.parametrize("saved", [{}, {"settings": None}, {"settings": [1]}], ids=str)
def test_settings_without_their_mapping_are_named(saved, tmp_path):
    run = save_run(tmp_path / "run", [{"reward": 1.0}])
    (run / "settings.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"settings\.json\['settings'\] is .*, not dict"):
        read_run(run)


def test_logs_and_texts_that_are_odd_are_shown(tmp_path):
    """A time that is no number, a half of a surrogate pair."""
    settings = {"run_name": "\ud83d"}
    logs = [{"time": "noon", "reward": 1.0}, {"reward": 0.5}]
    run = save_run(tmp_path / "run", logs, settings, rows=[(1, "p", "a", 1.0, 0.0)])
    assert "?" in write_report([run]).read_text(encoding="utf-8")


def test_checkpoints_are_listed(tmp_path):
    run = save_run(tmp_path / "run", [{"reward": 1.0}], {"max_steps": 3})
    for step in (10, 2):
        (run / f"checkpoint-{step}").mkdir()
    assert read_run(run).checkpoints == [2, 10]


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
