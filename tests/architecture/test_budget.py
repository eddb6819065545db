"""The size of the library: lines, files, public names, the files of a plain step, comments in hard code.

A commit that adds a file or a public name says what was looked for and not found to replace.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import reading_list
from support.runs import trainer as make_trainer
from transformers import TrainerCallback

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "groupwise"
SURFACE = Path(__file__).with_name("public_surface.json")
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}

#: Lines of all of ``src``, blank lines and docstrings included, its files, and its public names: exports,
#: settings and public methods. They only fall.
LINES, SOURCE_FILES, PUBLIC_NAMES = 42_018, 224, 164

#: Files of the algorithm, as ``docs/reading.md`` lists them.
READING_FILES = 38

#: Files of the package that importing the trainer loads, and those in which a plain step calls a function.
LOADED_FILES, STEP_FILES = 120, 68

#: Share of comments: comments per 100 lines.
COMMENTED = {
    "trainer.py": ("trainer.py",),
    "mixins": ("mixins/",),
    "core": ("core/",),
    "layouts": ("policy/layouts/",),
    "rebalancing": ("data/rebalancing.py",),
}
LEAST_COMMENTS = 8.0

#: Members of GRPOTrainer and its own bases. Attributes that only read a setting are one table, and names of
#: TRL that are refused do not count.
MEMBERS = 120


def lines(name: str) -> int:
    return FILES[name].count("\n")


def comments(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def test_the_library_keeps_its_size() -> None:
    assert sum(map(lines, FILES)) <= LINES
    assert len(FILES) <= SOURCE_FILES


def test_public_names_only_fall() -> None:
    assert 0 < sum(map(len, json.loads(SURFACE.read_text()).values())) <= PUBLIC_NAMES


def test_the_algorithm_has_few_files() -> None:
    assert len(reading_list.FILES) == len(set(reading_list.FILES)) <= READING_FILES


@pytest.mark.slow
def test_importing_the_trainer_loads_few_files() -> None:
    code = (
        "import sys; from groupwise import GRPOTrainer; "
        "print(sum(name.split('.')[0] == 'groupwise' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) <= LOADED_FILES


class StepProfile(TrainerCallback):
    """Record the files of the package in which the second optimizer step calls functions."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 1:  # the first one also checks the layout and builds what later ones use
            sys.setprofile(self._record)

    def on_step_end(self, args, state, control, **_):
        sys.setprofile(None)

    def _record(self, frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.files.add(str(path.relative_to(PACKAGE)))


@pytest.mark.slow
def test_a_plain_step_runs_few_files(tmp_path: Path) -> None:
    profile = StepProfile()
    make_trainer(tmp_path, callbacks=[profile], max_steps=2, save_strategy="no").train()
    assert "trainer.py" in profile.files and len(profile.files) <= STEP_FILES
    # The files that are read are those that run, but for terms of the loss and a layout that are off by
    # default, and the order of the prompts, which was made before.
    unused = {"core/entropy.py", "core/kl.py"}
    unused |= {"policy/layouts/padded.py", "data/sampler.py"}
    assert set(reading_list.FILES) - profile.files == unused


@pytest.mark.parametrize("part", COMMENTED)
def test_hard_code_has_comments(part: str) -> None:
    names = [name for name in FILES if name.startswith(COMMENTED[part])]
    share = 100 * sum(comments(FILES[name]) for name in names) / sum(map(lines, names))
    assert names and share >= LEAST_COMMENTS


def test_comments_are_counted_and_strings_are_not() -> None:
    assert comments('x = "# no"  # one\n# two\n"""# no"""\n') == 2


def test_members_of_the_trainer() -> None:
    """What a reader of the trainer has to know: everything that is not ``transformers.Trainer``'s own."""
    from groupwise import GRPOTrainer
    from groupwise.compat.trl import AbsentAttribute
    from groupwise.config.changes import SettingAttribute

    own = [cls for cls in GRPOTrainer.__mro__ if cls.__module__.startswith("groupwise.")]
    members = {name: value for cls in own for name, value in vars(cls).items() if not name.startswith("__")}
    apart = (AbsentAttribute, SettingAttribute)
    assert 0 < sum(not isinstance(value, apart) for value in members.values()) <= MEMBERS
