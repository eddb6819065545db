"""The error hierarchy and the boundary to user code."""

from __future__ import annotations

import functools
import json
import logging

import pytest

from groupwise import GRPOConfig
from groupwise.errors import BackendError, ConfigError, GroupwiseError, RewardError, boundary, nearest_name
from groupwise.generation.settings import warn_about_run_settings
from groupwise.rewards.runtime.calling import reward_invocation


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
    message = (
        "reward function 'exact' (given row=3, prompt='2+2=') raised KeyError: 'answer' (test_errors.py, "
    )
    assert str(caught.value).startswith(message) and str(caught.value).endswith(": raise cause)")
    assert caught.value.__cause__ is cause


def test_boundary_without_a_sample():
    with (
        pytest.raises(BackendError, match=r"^engine raised RuntimeError: gone \(test_errors.py, line \d+: "),
        boundary(BackendError, "engine"),
    ):
        raise RuntimeError("gone")


def test_boundary_names_the_callers_line_of_an_error_in_a_library_and_none_of_its_own():
    with (
        pytest.raises(ConfigError, match=r'\(test_errors.py, line \d+: json.loads\("\{"\)\)$'),
        boundary(ConfigError, "f"),
    ):
        json.loads("{")
    own = functools.partial(nearest_name, 3, ["a"])  # no line of a user between boundary and error
    with pytest.raises(RewardError, match=r"no attribute 'lower'$"):
        reward_invocation(own, "f", {}, []).function()


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


def test_long_lists_of_the_user_are_shortened(caplog):
    ids = list(range(24_000))
    with caplog.at_level(logging.WARNING):
        given = {"generation_kwargs": {"suppress_tokens": ids}, "vllm_engine_kwargs": {"a": ids}}
        config = GRPOConfig("out", use_cpu=True, bf16=False, **given)
        warn_about_run_settings(config)
    assert "'suppress_tokens': [0, 1, 2" in caplog.text and "vllm_engine_kwargs={'a': [0, 1" in caplog.text
    for given, shown in (
        ({"loss_type": "dapo", "loss_kwargs": {"unknown": ids}}, "loss_kwargs={'unknown': [0, 1, 2"),
        ({"loss_type": "gmpo", "loss_kwargs": {"unknown": ids}}, "loss_kwargs['unknown']=[0, 1, 2"),
        ({"beta": ids}, "beta=[0, 1, 2"),
    ):
        with pytest.raises(ConfigError) as error:
            GRPOConfig("out", use_cpu=True, bf16=False, **given)
        assert shown in str(error.value)
        assert max(map(len, [*caplog.messages, str(error.value)])) < 1500
