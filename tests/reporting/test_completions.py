"""Files: ``reporting/table.py``."""

from __future__ import annotations

import copy
import errno
import logging
import os
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import load_dataset
from huggingface_hub import HfApi
from PIL import Image
from tqdm.auto import tqdm

from groupwise.records import Completion, RewardBatch, RolloutBatch
from groupwise.reporting import completions
from groupwise.reporting.completions import best_and_worst, print_table, report_completions, write_parquet
from groupwise.reporting.table import completion_rows, row_text


def read(path):
    return pq.read_table(path).to_pylist()


def test_parquet_holds_every_field_and_rows_stay_untouched(tmp_path, make_args, make_row):
    rows = [make_row(), make_row(completion="5", rewards={"accuracy": 0.0, "form": 0.25}, columns={})]
    before = copy.deepcopy(rows)
    report_completions(rows, 3, make_args(num_completions_to_print=0), str(tmp_path))
    assert rows == before
    shared = {"step": 3, "prompt": "What is 2+2?", "advantage": 0.5}
    assert read(tmp_path / "completions" / "completions_00003.parquet") == [
        shared | {"completion": "4", "accuracy": 1.0, "form": None, "length": 1.0},
        shared | {"completion": "5", "accuracy": 0.0, "form": 0.25, "length": None},
    ]
    assert os.listdir(tmp_path / "completions") == ["completions_00003.parquet"]


def test_files_of_a_run_load_together(tmp_path, make_args, make_row):
    """A reward that is missing in one file and an extra column of other kinds must not split the types."""
    args = make_args(num_completions_to_print=0)
    first = make_row(rewards={"accuracy": None}, columns={"length": 1, "note": None})
    second = make_row(step=13, rewards={"accuracy": 0.5}, columns={"length": 2.5, "note": "long"})
    report_completions([first], 3, args, str(tmp_path))
    report_completions([second], 13, args, str(tmp_path))
    data = load_dataset("parquet", data_dir=str(tmp_path / "completions"), cache_dir=str(tmp_path / "cache"))
    assert data["train"]["step"][:] == [3, 13]
    assert data["train"]["accuracy"][:] == [None, 0.5]
    assert data["train"]["length"][:] == [1.0, 2.5]
    assert data["train"]["note"][:] == [None, "long"]


def test_every_reward_missing_is_still_a_number_column(tmp_path, make_args, make_row):
    args = make_args(num_completions_to_print=0)
    report_completions([make_row(rewards={"accuracy": None})], 3, args, str(tmp_path))
    schema = pq.read_schema(tmp_path / "completions" / "completions_00003.parquet")
    assert schema.field("accuracy").type == pa.float64()


def test_types_of_extra_columns(tmp_path):
    table = {"step": [1, 2], "flag": [True, None], "count": [1, 2.5], "mixed": [1, "a"], "none": [None, None]}
    write_parquet(table, tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet") == [
        {"step": 1, "flag": True, "count": 1.0, "mixed": "1", "none": None},
        {"step": 2, "flag": None, "count": 2.5, "mixed": "a", "none": None},
    ]


def test_duplicate_column_names_and_invalid_unicode(tmp_path, make_args, make_row):
    row = make_row(completion="a\ud800b", rewards={"step": 1.0}, columns={"step": "x", "prompt": "y"})
    report_completions([row], 3, make_args(num_completions_to_print=0), str(tmp_path))
    (saved,) = read(tmp_path / "completions" / "completions_00003.parquet")
    assert saved["completion"] == "a\ufffdb"
    assert (saved["step"], saved["step_"], saved["step__"], saved["prompt_"]) == (3, 1.0, "x", "y")


def message(role, content, **given):
    """A message as parquet files hold it."""
    return {
        **{"role": role, "content": content, "reasoning_content": None, "thinking": None},
        **{"name": None, "tool_calls": None, **given},
    }


def test_chats_are_saved_as_messages(tmp_path, make_args, make_row, capsys):
    question = [{"role": "user", "content": "2+2?\ud800"}]
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    turns = [
        {"role": "assistant", "content": "", "reasoning_content": "Use the tool.", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": "Four."},
    ]
    args = make_args(log_unique_prompts=True)
    report_completions([make_row(question, turns), make_row(question, turns[2:])], 3, args, str(tmp_path))
    (saved,) = read(tmp_path / "completions" / "completions_00003.parquet")
    assert saved["prompt"] == [message("user", "2+2?\ufffd")]
    assert saved["completion"] == [
        message("assistant", "", reasoning_content="Use the tool.", tool_calls=[call]),
        message("tool", "4", name="add"),
        message("assistant", "Four."),
    ]
    assert "2+2?\ufffd" in capsys.readouterr().out
    assert row_text(turns) == (
        'assistant: <think>Use the tool.</think> add({"a": 2, "b": 2})\ntool: 4\nassistant: Four.'
    )


def test_files_of_a_chat_load_together(tmp_path, make_args, make_row):
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    plain, calling = [{"role": "assistant", "content": "4"}], [{"role": "assistant", "tool_calls": [call]}]
    for step, completion in ((3, plain), (13, calling)):
        row = make_row([{"role": "user", "content": "?"}], completion, step=step)
        row["completion"][0].setdefault("content", "")
        report_completions([row], step, make_args(num_completions_to_print=0), str(tmp_path))
    data = load_dataset("parquet", data_dir=str(tmp_path / "completions"), cache_dir=str(tmp_path / "cache"))
    completions_of_run = [row[0] for row in data["train"]["completion"]]
    assert [row["content"] for row in completions_of_run] == ["4", ""]
    assert [bool(row["tool_calls"]) for row in completions_of_run] == [False, True]


def test_prompts_with_images_are_saved_as_content_blocks(tmp_path, make_args):
    """As TRL saves them: an image block without its image; the table on the console has "<image>"."""
    image = Image.new("RGB", (2, 2))
    asked = [{"type": "image", "image": image}, {"type": "text", "text": "What is\ud800 this?"}]
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}]
    answers = [[{"role": "assistant", "content": answer}] for answer in ("A dot.", "Nothing.")]
    for step in (3, 13):
        rollouts = RolloutBatch([{}] * 2, [prompt] * 2, [[1]] * 2, [Completion([2])] * 2, answers)
        rewards = RewardBatch(torch.ones(2, 1), torch.ones(1), 2, local=slice(0, 2))
        rows = completion_rows(rollouts, rewards, torch.zeros(2), ["accuracy"], step)
        assert row_text(rows[0]["prompt"]) == "system: Be brief.\nuser: <image>What is\ud800 this?"
        report_completions(rows, step, make_args(num_completions_to_print=0), str(tmp_path))
    data = load_dataset("parquet", data_dir=str(tmp_path / "completions"), cache_dir=str(tmp_path / "cache"))
    assert data["train"]["step"][:] == [3, 3, 13, 13]
    for saved in data["train"]["prompt"]:
        assert [message["content"] for message in saved] == [
            [{"type": "text", "text": "Be brief."}],
            [{"type": "image", "text": None}, {"type": "text", "text": "What is\ufffd this?"}],
        ]
    assert [chat[0]["content"] for chat in data["train"]["completion"]] == ["A dot.", "Nothing."] * 2


def test_chats_beside_texts_are_saved_as_text(tmp_path, make_args, make_row):
    rows = [make_row([{"role": "user", "content": "a"}], "b"), make_row("c", "d")]
    report_completions(rows, 3, make_args(num_completions_to_print=0), str(tmp_path))
    saved = read(tmp_path / "completions" / "completions_00003.parquet")
    assert [(row["prompt"], row["completion"]) for row in saved] == [("user: a", "b"), ("c", "d")]


def test_unique_prompts_keep_the_first_row_of_each(tmp_path, make_args, make_row, capsys):
    rows = [make_row("p", "one"), make_row("p", "two"), make_row("q", "three"), make_row("p", "four", step=4)]
    report_completions(rows, 4, make_args(log_unique_prompts=True), str(tmp_path))
    saved = read(tmp_path / "completions" / "completions_00004.parquet")
    assert [(row["prompt"], row["completion"]) for row in saved] == [("p", "one"), ("q", "three")]
    printed = capsys.readouterr().out
    assert "one" in printed and "three" in printed and "two" not in printed and "four" not in printed


@pytest.mark.parametrize(
    ("count", "kept"), [(0, ""), (1, "f"), (2, "fd"), (3, "fed"), (4, "fedc"), (9, "fedcba")]
)
def test_printed_rows_are_the_best_and_the_worst_of_a_group(count, kept, make_row):
    """Advantages differ by 2 in the group of q, by 0.5 in that of p, whose rows follow."""
    advantages = {"a": 0.0, "b": 0.25, "c": 0.5, "d": -1.0, "e": 0.0, "f": 1.0}
    rows = [
        make_row("p" if name in "abc" else "q", name, advantage=value) for name, value in advantages.items()
    ]
    assert [row["completion"] for row in best_and_worst(rows, count)] == list(kept)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    write_parquet({"step": [1]}, path)

    def interrupted(self, content):
        with open(self, "wb") as file:
            file.write(b"PAR1 half")
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(OSError, match="disk full"):
        write_parquet({"step": [2]}, path)
    monkeypatch.undo()
    assert read(path) == [{"step": 1}]
    assert (
        len(load_dataset("parquet", data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"))["train"]) == 1
    )


def test_evaluation_does_not_overwrite_the_training_log_of_its_step(tmp_path, make_args, make_row):
    args = make_args(num_completions_to_print=0)
    report_completions([make_row(completion="t")], 3, args, str(tmp_path))
    report_completions([make_row(completion="e")], 3, args, str(tmp_path), mode="eval_a/b")
    assert read(tmp_path / "completions" / "completions_00003.parquet")[0]["completion"] == "t"
    assert read(tmp_path / "completions_eval_a_b" / "completions_00003.parquet")[0]["completion"] == "e"


def test_the_random_state_is_left_alone(tmp_path, monkeypatch, make_args, make_row):
    """Importing rich for the first time draws from ``random``."""
    drawn = []
    monkeypatch.setattr(completions, "print_table", lambda *_: drawn.append(random.random()))
    before = random.getstate()
    report_completions([make_row()], 3, make_args(), str(tmp_path))
    assert len(drawn) == 1
    assert random.getstate() == before


def test_no_rows_report_nothing(tmp_path, make_args, capsys):
    report_completions([], 3, make_args(), str(tmp_path))
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


# On the console.

TABLE = {"step": [3], "completion": ["a [red]b[/red]"], "accuracy": [1 / 3], "form": [None]}


@pytest.mark.parametrize(("given", "printed"), [(None, 4), (2, 2), (9, 9)])
def test_a_few_rows_are_printed_unless_a_number_is_set(tmp_path, make_args, make_row, capsys, given, printed):
    rows = [make_row(completion=f"answer{i}") for i in range(9)]
    args = make_args(log_completions=True, num_completions_to_print=given)
    report_completions(rows, 3, args, str(tmp_path))
    assert capsys.readouterr().out.count("answer") == printed
    assert len(read(tmp_path / "completions" / "completions_00003.parquet")) == 9


def test_the_middle_of_a_long_text_is_left_out(capsys):
    # 600 characters are shown: the first and the last 300
    print_table({"step": [1], "completion": ["a" * 300 + "b" * 1234 + "c" * 300]}, "t")
    printed = capsys.readouterr().out
    assert (printed.count("a"), printed.count("b"), printed.count("c")) == (302, 0, 304)  # and the titles
    assert "[1234 characters]" in printed


def test_the_table_shows_texts_as_they_are(capsys):
    print_table(TABLE, "completions, step 3")
    printed = capsys.readouterr().out
    for text in ("completions, step 3", "step 3", "a [red]b[/red]", "accuracy 0.333", "┃"):
        assert text in printed
    assert "form" not in printed


def test_control_characters_do_not_reach_the_terminal(capsys):
    order = "".join(
        map(chr, [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029])
    )
    print_table({"step": [1], "completion": ["\x1b[2Jgone\rover\tx"], order: [order]}, "t")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\r" not in printed and not set(order) & set(printed)
    assert "\\x1b[2Jgone\\rover x" in printed


def test_a_table_without_rows_prints_nothing(capsys):
    print_table({"step": [], "completion": []}, "t")
    assert capsys.readouterr().out == ""


def test_the_bar_is_cleared_while_printing(capsys):
    with tqdm(total=2, file=sys.stdout, ncols=40) as bar:
        print_table({"step": [1], "completion": ["text"]}, "the title")
        bar.update(2)
    printed = capsys.readouterr().out
    line = next(line for line in printed.split("\n") if "the title" in line)
    assert "0/2" not in line.split("\r")[-1]


# On the Hub.


@pytest.fixture
def api(monkeypatch):
    """A real client without a server: nothing listens on the discard port of this machine."""
    client = HfApi(endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(completions, "_API", client)
    return client


def test_the_folder_is_uploaded_as_a_dataset(api, tmp_path, monkeypatch, make_args, make_row):
    calls = []
    monkeypatch.setattr(api, "create_repo", lambda repo, **kwargs: calls.append((repo, kwargs)))
    monkeypatch.setattr(api, "upload_folder", lambda **kwargs: calls.append(kwargs))
    args = make_args(
        num_completions_to_print=0,
        log_completions=True,
        log_completions_hub_repo="someone/texts",
        hub_token="hf_abc",
        hub_private_repo=True,
    )
    report_completions([make_row()], 3, args, str(tmp_path), mode="eval")
    api.run_as_future(lambda: None).result()  # jobs run in order
    (repo, made), sent = calls
    assert repo == "someone/texts"
    assert made == {"repo_type": "dataset", "private": True, "exist_ok": True, "token": "hf_abc"}
    assert (sent["repo_id"], sent["repo_type"], sent["path_in_repo"]) == ("someone/texts", "dataset", "eval")
    assert (sent["folder_path"], sent["token"]) == (tmp_path / "completions_eval", "hf_abc")


def test_an_unreachable_hub_is_a_warning(api, tmp_path, caplog, make_args, make_row):
    args = make_args(
        num_completions_to_print=0,
        log_completions=True,
        log_completions_hub_repo="someone/texts",
        hub_token="hf_abc",
    )
    with caplog.at_level(logging.WARNING, "groupwise.reporting.completions"):
        report_completions([make_row()], 3, args, str(tmp_path))
        api.run_as_future(lambda: None).result()
    (record,) = [record for record in caplog.records if record.name == "groupwise.reporting.completions"]
    assert "the dataset someone/texts of completions was not written" in record.getMessage()
    assert "hf_abc" not in caplog.text
    assert (tmp_path / "completions" / "completions_00003.parquet").exists()


def test_no_repository_no_upload(api, tmp_path, monkeypatch, make_args, make_row):
    jobs = []
    monkeypatch.setattr(api, "run_as_future", lambda *job: jobs.append(job))
    report_completions([make_row()], 3, make_args(num_completions_to_print=0), str(tmp_path))
    assert jobs == []


def test_a_full_disk_loses_the_file_and_not_the_run(tmp_path, make_args, make_row, caplog, monkeypatch):
    def full_disk(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    report_completions([make_row()], 3, make_args(), str(tmp_path))
    assert "completions_00003.parquet was not written: OSError: [Errno 28]" in caplog.text
