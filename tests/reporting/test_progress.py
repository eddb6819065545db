from __future__ import annotations

import pytest
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from groupwise.reporting import RewardProgressCallback


@pytest.fixture
def handler():
    return CallbackHandler([RewardProgressCallback], None, None, None, None)


def start(handler, args, first=True):
    state = TrainerState(max_steps=4, is_world_process_zero=first, is_local_process_zero=first)
    handler.on_train_begin(args, state, TrainerControl())
    (callback,) = handler.callbacks
    return state, callback


def test_the_bar_shows_loss_and_reward(handler, make_args, capsys):
    args = make_args()
    state, callback = start(handler, args)
    state.global_step = 2
    handler.on_step_end(args, state, TrainerControl())
    logs = {"loss": 0.123456, "reward": 0.75, "entropy": 2.0}
    handler.on_log(args, state, TrainerControl(), logs)
    assert callback.training_bar.n == 2
    assert callback.training_bar.postfix == "loss=0.1235, reward=0.75"
    assert logs == {"loss": 0.123456, "reward": 0.75, "entropy": 2.0}
    handler.on_train_end(args, state, TrainerControl())
    assert callback.training_bar is None
    assert "'entropy': '2'" in capsys.readouterr().out  # the full log is still written


def test_an_evaluation_log_leaves_the_last_values(handler, make_args):
    args = make_args()
    state, callback = start(handler, args)
    handler.on_log(args, state, TrainerControl(), {"loss": 0.5, "reward": 1.0})
    handler.on_log(args, state, TrainerControl(), {"eval_reward": 0.0, "eval_loss": 9.0})
    assert callback.training_bar.postfix == "loss=0.5, reward=1"
    handler.on_log(args, state, TrainerControl(), {"reward": 0.25})
    assert callback.training_bar.postfix == "loss=0.5, reward=0.25"
    handler.on_train_end(args, state, TrainerControl())


def test_a_second_training_starts_without_old_values(handler, make_args):
    args = make_args()
    state, _ = start(handler, args)
    handler.on_log(args, state, TrainerControl(), {"loss": 0.5, "reward": 1.0})
    handler.on_train_end(args, state, TrainerControl())
    state, callback = start(handler, args)
    handler.on_log(args, state, TrainerControl(), {"grad_norm": 1.0})
    assert not callback.training_bar.postfix
    handler.on_train_end(args, state, TrainerControl())


def test_other_processes_and_logs_outside_training_show_nothing(handler, make_args, capsys):
    args = make_args()
    handler.on_log(args, TrainerState(), TrainerControl(), {"eval_reward": 1.0})
    state, callback = start(handler, args, first=False)
    handler.on_log(args, state, TrainerControl(), {"loss": 0.5, "reward": 1.0})
    handler.on_train_end(args, state, TrainerControl())
    assert callback.training_bar is None
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""
