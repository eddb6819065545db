from __future__ import annotations

import sys

from tqdm.auto import tqdm

from groupwise.reporting.console import print_table

TABLE = {"step": [3], "completion": ["a [red]b[/red]"], "accuracy": [1 / 3], "form": [None]}


def test_the_table_shows_texts_as_they_are(capsys):
    print_table(TABLE, "completions, step 3")
    printed = capsys.readouterr().out
    for text in ("completions, step 3", "step", "a [red]b[/red]", "0.333", "┃"):
        assert text in printed


def test_control_characters_do_not_reach_the_terminal(capsys):
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
