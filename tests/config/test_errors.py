"""The error hierarchy and the boundary to user code."""

from __future__ import annotations

import pytest

from groupwise.errors import BackendError, ConfigError, GroupwiseError, RewardError, boundary


@pytest.mark.parametrize(
    ("error", "family"), [(ConfigError, ValueError), (RewardError, ValueError), (BackendError, RuntimeError)]
)
def test_errors_belong_to_the_package_and_to_a_builtin_family(error, family):
    assert issubclass(error, GroupwiseError)
    assert issubclass(error, family)


def test_boundary_names_the_function_the_sample_and_the_cause():
    cause = KeyError("answer")
    with (
        pytest.raises(RewardError) as caught,
        boundary(RewardError, "reward function 'exact'", row=3, prompt="2+2="),
    ):
        raise cause
    assert (
        str(caught.value) == "reward function 'exact' (given row=3, prompt='2+2=') raised KeyError: 'answer'"
    )
    assert caught.value.__cause__ is cause


def test_boundary_without_a_sample():
    with (
        pytest.raises(BackendError, match=r"^engine raised RuntimeError: gone$"),
        boundary(BackendError, "engine"),
    ):
        raise RuntimeError("gone")


def test_long_samples_are_shortened():
    with pytest.raises(RewardError) as caught, boundary(RewardError, "f", prompt="x" * 10_000):
        raise ValueError("bad")
    assert len(str(caught.value)) < 300


def test_boundary_lets_results_and_interrupts_through():
    with boundary(RewardError, "f"):
        value = 1
    assert value == 1
    with pytest.raises(KeyboardInterrupt), boundary(RewardError, "f"):
        raise KeyboardInterrupt


def test_stop_iteration_is_a_failure_like_any_other():
    with pytest.raises(RewardError, match="raised StopIteration"), boundary(RewardError, "f"):
        next(iter(()))
