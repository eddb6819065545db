from __future__ import annotations

import builtins
import logging
import sys

import pytest
from tqdm.auto import tqdm

from groupwise.reporting import console
from groupwise.reporting.console import plain_table, print_table

TABLE = {"step": [3], "completion": ["a [red]b[/red]"], "accuracy": [1 / 3], "form": [None]}


@pytest.fixture
def without_rich(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    console._warn_rich_missing.cache_clear()


def test_rich_table_shows_texts_as_they_are(capsys):
    pytest.importorskip("rich")
    print_table(TABLE, "completions, step 3")
    printed = capsys.readouterr().out
    for text in ("completions, step 3", "step", "a [red]b[/red]", "0.333", "┃"):
        assert text in printed


def test_without_rich_the_table_is_plain_and_one_warning_is_logged(without_rich, capsys, caplog):
    with caplog.at_level(logging.WARNING, "groupwise.reporting.console"):
        print_table(TABLE, "completions, step 3")
        print_table(TABLE, "completions, step 4")
    assert capsys.readouterr().out.splitlines()[:4] == [
        "completions, step 3",
        "step | completion     | accuracy | form",
        "-----+----------------+----------+-----",
        "3    | a [red]b[/red] | 0.333    |",
    ]
    assert [record.getMessage().endswith("pip install rich") for record in caplog.records] == [True]


def test_plain_table_folds_long_cells_into_the_width():
    # 60 wide: 4 for "step", 3 for the separator, 53 left for the text
    words = " ".join(f"word{i:02d}" for i in range(20))
    lines = plain_table({"step": ["3"], "text": [f"{words}\nend"]}, "t", width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(line[7:] for line in lines[3:-1]) == f"{words} end"
    assert lines[3].startswith("3    | word00")


@pytest.mark.parametrize("rich", [True, False])
def test_control_characters_do_not_reach_the_terminal(rich, capsys, request):
    pytest.importorskip("rich") if rich else request.getfixturevalue("without_rich")
    print_table({"step": [1], "completion": ["\x1b[2Jgone\rover\tx"]}, "t")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\r" not in printed
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
