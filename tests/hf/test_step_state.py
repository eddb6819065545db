"""One mark of all components: where it is taken, and who returns to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from groupwise.hf.step_state import Attribute, StepState


class Cursor:
    """A component; every restored snapshot is noted."""

    def __init__(self):
        self.value, self.restored = 0, []

    def snapshot(self):
        return self.value

    def restore(self, snapshot):
        self.value = snapshot
        self.restored.append(snapshot)


def state_of():
    """Return the state, its cursor, and the object with the attribute ``coef`` and the global ``step``."""
    cursor, owner = Cursor(), SimpleNamespace(coef=(0.1,), step=0)
    components = {"cursor": cursor, "coef": Attribute(owner, "coef")}
    return StepState(lambda: owner.step, lambda: components), cursor, owner


def test_a_checkpoint_inside_a_step_holds_the_state_at_its_beginning():
    state, cursor, owner = state_of()
    cursor.value = 3
    assert not state.is_inside_step and state.marks == {"cursor": 3, "coef": (0.1,)}
    state.begin_step()
    cursor.value, owner.coef = 5, (0.2,)
    assert state.is_inside_step and state.marks == {"cursor": 3, "coef": (0.1,)}
    owner.step = 1  # the optimizer step is counted: the boundary is the present
    assert not state.is_inside_step and state.marks == {"cursor": 5, "coef": (0.2,)}


def test_a_step_that_is_begun_again_has_a_mark_of_its_own():
    state, cursor, _ = state_of()
    state.begin_step()
    cursor.value = 2  # Trainer was interrupted before it counted the step
    state.begin_step()
    assert state.marks["cursor"] == 2


@pytest.mark.parametrize(("inside", "expected"), [(True, 1), (False, 4)])
def test_a_failure_returns_to_the_mark_or_to_the_beginning_of_the_block(inside, expected):
    state, cursor, owner = state_of()
    cursor.value = 1
    if inside:
        state.begin_step()
    cursor.value = 4
    with pytest.raises(KeyboardInterrupt), state.rollback_on_failure():
        cursor.value, owner.coef = 9, (0.9,)
        raise KeyboardInterrupt
    assert (cursor.value, owner.coef, cursor.restored) == (expected, (0.1,), [expected])
    assert not state.is_inside_step
    with state.rollback_on_failure():
        cursor.value = 7
    assert cursor.value == 7


def test_the_marks_of_a_checkpoint_are_changed_without_those_of_the_step():
    state, _, _ = state_of()
    state.begin_step()
    marks = state.marks
    marks["settings"] = {}
    assert "settings" not in state.marks


def test_a_restored_checkpoint_is_a_step_boundary():
    state, cursor, owner = state_of()
    state.begin_step()
    state.restore({"cursor": 6, "coef": (0.5,), "settings": {}})
    assert (cursor.value, owner.coef, state.is_inside_step) == (6, (0.5,), False)
