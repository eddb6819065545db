"""Runs of a sweep have the history of their run alone, and are stopped and resumed without a trace.

Files: ``commands/sweeps/scheduler.py``, ``commands/sweeps/sampler.py``.
"""

from __future__ import annotations

import errno
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support import runs
from support.saved_runs import files
from support.sweep_runs import assert_equal, config, history
from transformers import GenerationConfig, TrainerCallback

from groupwise import ConfigError, GRPOTrainer, RewardError, Sweep
from groupwise.commands.sweeps.sampler import SharedBackend
from groupwise.cpu.multinomial import unchecked_multinomial
from groupwise.generation import decoding

#: Configurations that differ in everything that a run may choose.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.5, "learning_rate": 3e-2, "loss_type": "grpo"},
    "masked": {"top_p": 0.7, "beta": 0.1, "num_generations": 2, "max_completion_length": 9},
    # With seed 7 a sample lies within rounding of the boundary between two tokens.
    # The penalty applies to the padding token in the rows that have padding, and a joint batch has more.
    "late": {
        **{"num_iterations": 2, "gradient_accumulation_steps": 2, "seed": 8},
        **{"repetition_penalty": 1.3, "generation_kwargs": {"suppress_tokens": [0]}},
    },
}
ADAPTERS = {
    "plain": {"r": 2},
    "hot": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]},
    "masked": {"r": 3, "use_rslora": True, "target_modules": "all-linear"},
    "late": {"r": 2, "lora_dropout": 0.2},
}


def policy() -> Any:
    return runs.policy(hidden_size=128, intermediate_size=128)  # layers that oneDNN computes


def adapters(names: Any) -> dict[str, LoraConfig]:
    return {name: LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name]) for name in names}


def sweep(
    directory: Path, names: Any, rewards: Any = runs.count_reward, changes: Any = None, **given: Any
) -> Sweep:
    made = {name: config(directory / name, **{**SETTINGS[name], **(changes or {})}) for name in names}
    arguments = {"train_dataset": runs.prompts(), "processing_class": runs.tokenizer(), **given}
    arguments.setdefault("peft_config", adapters(names))
    return Sweep(policy(), rewards, made, **arguments)


def alone(directory: Path, name: str, **changes: Any) -> GRPOTrainer:
    return GRPOTrainer(
        policy(),
        runs.count_reward,
        config(directory / "alone" / name, **{**SETTINGS[name], **changes}),
        runs.prompts(),
        runs.prompts(3),
        processing_class=runs.tokenizer(),
        peft_config=adapters([name])[name],
    )


@pytest.mark.slow
def test_each_history_is_that_of_the_run_alone(tmp_path):
    found = sweep(tmp_path, SETTINGS).run()
    for name in SETTINGS:
        solo = alone(tmp_path, name)
        solo.train()
        assert found[name].status == "finished" and found[name].state.global_step == 4
        assert_equal(found[name], solo)


@pytest.mark.slow
def test_a_sweep_resumes_from_the_checkpoints_of_its_runs(tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 1}
    names = "masked", "late"
    sweep(tmp_path, names, changes={**saved, "max_steps": 2, "lr_scheduler_type": "constant"}).run()
    found = sweep(tmp_path, names, changes={**saved, "lr_scheduler_type": "constant"}).run(
        resume_from_checkpoint=True
    )
    for name in names:
        solo = alone(tmp_path, name, lr_scheduler_type="constant")
        solo.train()
        assert found[name].state.global_step == 4
        assert_equal(found[name], solo)


@pytest.mark.slow
def test_finished_runs_of_a_sweep_are_not_trained_further(tmp_path):
    """The step after the third is within an epoch, where ``Trainer`` would train it."""
    saved = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}

    def make(steps):
        found = sweep(tmp_path, ["plain", "hot"], changes=saved)
        for name, last in steps.items():
            found.runs[name].args.max_steps = last
        return found

    make({"plain": 3, "hot": 3}).run()
    before = files(tmp_path / "plain")
    found = make({"plain": 3, "hot": 4}).run(resume_from_checkpoint=True)
    assert {name: (run.status, run.state.global_step) for name, run in found.items()} == {
        "plain": ("finished", 3),
        "hot": ("finished", 4),
    }
    assert files(tmp_path / "plain") == before


@pytest.mark.slow
def test_a_stopped_run_continues_as_if_it_had_not_been_stopped(tmp_path):
    made = sweep(tmp_path, ("plain", "hot"), changes={"save_strategy": "steps", "save_steps": 100})
    seen: list[str] = []

    class Control(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 1:
                seen.append(made.stop("plain"))
            elif state.global_step == 3:
                seen.append(f"{made.runs['plain'].status} at {made.runs['plain'].state.global_step}")
                made.resume("plain")

    made.runs["hot"].trainer.add_callback(Control())
    found = made.run()
    assert seen[1] == "stopped at 1" or seen[1] == "stopped at 2"
    assert (tmp_path / "plain" / f"checkpoint-{seen[1][-1]}" / "trainer_state.json").is_file()
    solo = alone(tmp_path, "plain")
    solo.train()
    assert_equal(found["plain"], solo)


@pytest.mark.slow
def test_a_run_that_is_stopped_until_the_end_keeps_its_checkpoint(tmp_path):
    made = sweep(tmp_path, ("plain", "hot"), changes={"save_strategy": "steps", "save_steps": 100})
    made.stop("hot")
    found = made.run()
    assert (found["plain"].status, found["hot"].status) == ("finished", "stopped")
    assert found["hot"].state.global_step == 0
    with pytest.raises(ConfigError, match="'hot' is stopped; a run takes stop while waiting"):
        made.stop("hot")
    with pytest.raises(ConfigError, match="nearest: 'plain'"):
        made.resume("plane")


@pytest.mark.slow
def test_a_run_that_fails_does_not_end_the_others(tmp_path, caplog):
    def count_or_fail(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 2:
            raise ValueError("no reward today")
        return runs.count_reward(completion_ids)

    made = sweep(tmp_path, ("plain", "hot"))
    made.runs["hot"].trainer.reward_funcs = [count_or_fail]
    found = made.run()
    assert (found["plain"].status, found["hot"].status) == ("finished", "failed")
    assert "no reward today" in str(found["hot"].error) and "run 'hot' failed" in caplog.text
    solo = alone(tmp_path, "plain")
    solo.train()
    assert_equal(found["plain"], solo)


@pytest.mark.slow
@pytest.mark.parametrize("on_accelerator", [False, True])
def test_logits_that_are_not_finite_fail_their_run_alone(tmp_path, on_accelerator, monkeypatch):
    if on_accelerator:  # the error is read a token later
        monkeypatch.setattr(decoding, "multinomial", unchecked_multinomial)
    made = sweep(tmp_path, ("plain", "hot"))
    with torch.no_grad():
        for name, parameter in made.runs["hot"].trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(torch.nan)
    found = made.run()
    assert found["plain"].status == "finished" and "NaN" in str(found["hot"].error)
    solo = alone(tmp_path, "plain")
    solo.train()
    assert_equal(found["plain"], solo)


@pytest.mark.slow
def test_a_setting_that_the_sampler_refuses_fails_its_run_alone(tmp_path, caplog):
    made = sweep(tmp_path, ("plain", "hot"))
    settings = made.runs["hot"].trainer.backend.generation_config
    made.runs["hot"].trainer.add_callback(AtStep(1, lambda: setattr(settings, "suppress_tokens", ["w2"])))
    found = made.run()
    assert (found["plain"].status, found["hot"].status) == ("finished", "failed")
    assert found["hot"].state.global_step == 1 and caplog.text.count("sampled one by one") == 1
    solo = alone(tmp_path, "plain")
    solo.train()
    assert_equal(found["plain"], solo)


def test_the_error_is_raised_if_all_runs_fail(tmp_path):
    def fail(**_: Any) -> list[float]:
        raise ValueError("no reward today")

    made = sweep(tmp_path, ("plain", "hot"))
    for run in made.runs.values():
        run.trainer.reward_funcs = [fail]
    with pytest.raises(RewardError, match="no reward today"):
        made.run()


@pytest.mark.slow
def test_runs_of_all_weights_follow_one_after_the_other(tmp_path, caplog):
    started: list[str] = []

    def note(trainer_state: Any, completion_ids: Any, **_: Any) -> list[float]:
        started.append(threading.current_thread().name)
        return runs.count_reward(completion_ids)

    names = ("plain", "hot", "late")
    given = {"plain": None, "hot": adapters(["hot"])["hot"], "late": None}
    made = Sweep(
        policy(),
        note,
        {name: config(tmp_path / name, **SETTINGS[name]) for name in names},
        runs.prompts(),
        processing_class=runs.tokenizer(),
        peft_config=given,
    )
    found = made.run()
    assert list(dict.fromkeys(started)) == ["hot", "plain", "late"]
    assert started == sorted(started, key=["hot", "plain", "late"].index)
    assert "one after the other: plain, late" in caplog.text
    solo = GRPOTrainer(
        policy(),
        note,
        config(tmp_path / "alone" / "late", **SETTINGS["late"]),
        runs.prompts(),
        processing_class=runs.tokenizer(),
    )
    solo.train()
    assert found["late"].trainer is None  # its memory is free for the next run
    for log, other in zip(history(found["late"].state), history(solo.state), strict=True):
        assert log == pytest.approx(other, rel=1e-6, abs=1e-6, nan_ok=True)


@pytest.mark.slow
def test_rewards_may_differ_between_runs(tmp_path):
    def odd(completion_ids: Any, **_: Any) -> list[float]:
        return [float(sum(token % 2 for token in ids)) for ids in completion_ids]

    names, mixture = ("plain", "hot"), {"maths": runs.prompts(), "code": runs.prompts()}
    by_source = {"maths": [runs.count_reward], "code": runs.count_reward}
    one = Sweep(  # one dictionary by source for all runs
        *(policy(), by_source, {name: config(tmp_path / name) for name in names}, mixture),
        processing_class=runs.tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM"),
    )
    assert all(run.trainer.reward_func_names == ["count_reward"] for run in one.runs.values())
    made = Sweep(
        policy(),
        {"plain": by_source, "hot": odd},
        {name: config(tmp_path / name) for name in names},
        mixture,
        processing_class=runs.tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM"),
    )
    found = made.run()
    assert [name for name in found["hot"].state.log_history[0] if "odd" in name]
    assert not [name for name in found["plain"].state.log_history[0] if "odd" in name]


def test_a_run_may_have_the_name_of_a_source(tmp_path):
    by_source = {"plain": runs.count_reward, "code": [runs.count_reward]}
    mixture = {name: runs.prompts() for name in by_source}
    made = sweep(tmp_path, ("plain", "hot"), by_source, train_dataset=mixture)
    assert all(run.reward_funcs is by_source for run in made.runs.values())
    with pytest.raises(ConfigError, match="reward_funcs is missing"):  # of the other run
        sweep(tmp_path, ("plain", "hot"), {"plain": runs.count_reward})


@pytest.mark.slow
def test_a_run_that_replays_the_experts_of_its_samples_is_refused(tmp_path):
    """The shared sampler does not record them."""
    backend = SharedBackend(policy, GenerationConfig(), config(tmp_path, router_replay="R3"))
    backend.thread = SimpleNamespace(name="one")  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"run 'one': .*router_replay='R3' needs another decoding loop"):
        backend.check()


def test_a_text_that_a_callback_logs_as_reward_is_not_in_the_table(tmp_path):
    made = sweep(tmp_path, ("plain",))
    made.runs["plain"].state.log_history = [{"reward": 0.5}, {"reward": "good"}, {"reward": None}]
    assert "plain 0: 0.500 waiting" in made.table_line()


def test_a_line_of_the_table_has_every_run(tmp_path, capsys):
    sweep(tmp_path, ("plain", "hot")).run()
    lines = capsys.readouterr().out.splitlines()
    assert "plain 1: " in lines[1] and "hot 1: " in lines[1]
    assert "plain 4: " in lines[-1] and "hot 4: " in lines[-1] and "finished" in lines[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_vllm": True, "vllm_mode": "server"}, "use_vllm must be the same"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode"),
        ({"vllm_engine_kwargs": {"enable_lora": False}}, "sends merged weights"),
        ({"report_to": "wandb"}, "one run per process"),
        ({"output_dir": "elsewhere"}, "one directory each"),
        ({"cast_lm_head_to_fp32": True}, "share a base model cannot have"),
        ({"fp16": True}, "must be the same"),
        ({"generation_kwargs": {"num_beams": 2}}, "another decoding loop"),
        ({"cache_implementation": "static"}, "another decoding loop"),
    ],
)
def test_settings_that_runs_of_a_process_cannot_have(changes, message, tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.config.validation.report_to_is_installed", lambda c: ())
    made = {name: config(tmp_path / name) for name in ("one", "two")}
    for name, value in changes.items():
        setattr(made["two"], name, [value] if name == "report_to" else value)
    with pytest.raises(ConfigError, match=message):
        Sweep(
            policy(),
            runs.count_reward,
            made,
            runs.prompts(),
            processing_class=runs.tokenizer(),
            peft_config=LoraConfig(task_type="CAUSAL_LM"),
        )


@pytest.mark.parametrize("shared", [{"hub_model_id": "me/model", "push_to_hub": True}, {"run_name": "mine"}])
def test_runs_that_would_write_to_one_place_are_refused(shared, tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.config.validation.report_to_is_installed", lambda c: ())
    reported = {"report_to": ["tensorboard"], "hub_model_id": None, "push_to_hub": False}
    made = {name: config(tmp_path / name, run_name=name) for name in ("one", "two")}
    for args in made.values():
        vars(args).update({**reported, **shared})
    with pytest.raises(ConfigError, match=f"{next(iter(shared))} must differ between runs"):
        Sweep(policy(), runs.count_reward, made, runs.prompts(), processing_class=runs.tokenizer())


def test_a_clone_is_not_pushed_to_the_repository_of_its_source(tmp_path):
    made = sweep(tmp_path, ("plain",), changes={"hub_model_id": "me/model"})
    assert made._clone_settings(made.runs["plain"], "twin", {}).hub_model_id is None


def cloned(directory: Path, at: int, name: str = "plain", **changes: Any) -> dict[str, Any]:
    made = sweep(directory, ("plain", "hot"), changes={"save_strategy": "steps", "save_steps": 100})

    class Control(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == at:
                made.clone(name, "twin", **changes)

    made.runs[name].trainer.add_callback(Control())
    return made.run()


@pytest.mark.slow
def test_a_clone_without_changes_has_the_history_of_its_source(tmp_path):
    found = cloned(tmp_path, at=2)
    twin, source = found["twin"], found["plain"]
    assert (twin.status, twin.state.global_step, twin.resume_from) == (
        *("finished", 4),
        str(tmp_path / "plain" / "checkpoint-2"),
    )
    assert_equal(twin, source.trainer)
    lines = (tmp_path / "twin" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if '"reward"' in line] == [3, 4]


@pytest.mark.slow
def test_a_clone_starts_warm_with_its_own_learning_rate(tmp_path):
    found = cloned(tmp_path, at=2, learning_rate=5e-2, beta=0.0)
    twin, source = (history(found[name].state) for name in ("twin", "plain"))
    assert twin[2]["reward"] == source[2]["reward"]  # same adapter, same random numbers
    assert twin[3]["learning_rate"] == pytest.approx(5 * source[3]["learning_rate"])
    moved = [
        torch.dist(a, b).item()
        for a, b in zip(
            found["twin"].trainer.model.parameters(), found["plain"].trainer.model.parameters(), strict=True
        )
    ]
    assert max(moved) > 1e-3


@pytest.mark.slow
def test_a_run_that_is_stopped_can_be_cloned(tmp_path):
    made = sweep(tmp_path, ("plain", "hot"), changes={"save_strategy": "steps", "save_steps": 100})
    made.stop("plain")
    made.clone("plain", "twin")
    found = made.run()
    assert found["plain"].status == "stopped" and found["twin"].state.global_step == 4


@pytest.mark.parametrize(
    ("name", "new_name", "changes", "message"),
    [
        ("plane", "twin", {}, "nearest: 'plain'"),
        ("plain", "hot", {}, "not a new name"),
        *[("plain", name, {}, "not a new name") for name in ("../twin", "", ".", "..", "_commands")],
        ("plain", "twin", {"learning_rat": 1}, "can: 'learning_rate'"),
        *[
            ("plain", "twin", {name: 5}, f"'{name}' cannot be changed: a clone has .* of 'plain'")
            for name in ("output_dir", "lora", "save_steps", "use_vllm")
        ],
        ("hot", "twin", {}, "save_strategy='no'"),
    ],
)
def test_clones_that_are_refused(name, new_name, changes, message, tmp_path):
    made = sweep(tmp_path, ("plain", "hot"))
    made.runs["plain"].args.save_strategy = "steps"
    with pytest.raises(ConfigError, match=message):
        made.clone(name, new_name, **changes)


@pytest.mark.slow
def test_a_clone_continues_as_a_run_of_a_sweep_that_is_resumed(tmp_path, caplog):
    cloned(tmp_path, at=2, learning_rate=5e-2)
    names = ("plain", "hot")
    changes = {"save_strategy": "steps", "save_steps": 100}
    of_runs = {name: config(tmp_path / name, **{**SETTINGS[name], **changes}) for name in names}
    of_runs["twin"] = config(tmp_path / "twin", **{**SETTINGS["plain"], **changes, "learning_rate": 5e-2})
    own = adapters(names)
    found = Sweep(
        policy(),
        runs.count_reward,
        of_runs,
        runs.prompts(),
        processing_class=runs.tokenizer(),
        peft_config={**own, "twin": own["plain"]},
    ).run(resume_from_checkpoint=True)
    # From its own checkpoint, whose optimizer and schedule have the rate already.
    twin = found["twin"]
    assert (twin.status, twin.resume_from, twin.learning_rate_factor) == ("finished", True, 1.0)
    assert twin.state.global_step == 4
    assert "does not continue" not in caplog.text
    assert "twin" not in sweep(tmp_path, names, changes=changes).run(resume_from_checkpoint=True)
    assert f"{tmp_path / 'twin'} does not continue" in caplog.text


@pytest.mark.slow
def test_a_clone_with_invalid_settings_is_a_failed_run(tmp_path, caplog):
    found = cloned(tmp_path, at=1, learning_rate=-1.0)
    assert found["twin"].status == "failed" and "learning_rate" in str(found["twin"].error)
    assert found["plain"].status == "finished"


@pytest.mark.slow
def test_a_clone_of_a_run_that_ends_is_reported(tmp_path, caplog):
    found = cloned(tmp_path, at=4)
    assert "twin" not in found and "'twin' was not started: 'plain' ended" in caplog.text


SAVED = {"save_strategy": "steps", "save_steps": 100}


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def assert_plain_and_hot_finish(found: Any) -> None:
    assert {found[name].status for name in ("plain", "hot")} == {"finished"}
    assert found["plain"].state.global_step == found["hot"].state.global_step == 4


#: Changes of a clone that fail at different places, and words of the error.
FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "settings": ({"max_steps": "many"}, "max_steps='many' is of type str"),
    "seed": ({"seed": -5}, "seed=-5 is out of range"),
    "enum": ({"hub_strategy": "sometimes"}, "sometimes"),
    "processor": ({"generation_kwargs": {"bad_words_ids": [5]}}, "bad_words_ids"),
    "build": ({"push_to_hub": True}, "No space left"),
    "save": ({}, "No space left"),
}


@pytest.mark.slow
def test_whatever_a_clone_raises_ends_the_clone_alone(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("groupwise.GRPOTrainer.init_hf_repo", full_disk)  # as without network
    made = sweep(tmp_path, ("plain", "hot"), changes=SAVED)

    def request() -> None:
        for name, (changes, _) in FAILING.items():
            made.clone("hot" if name == "save" else "plain", name, **changes)

    made.runs["plain"].trainer.add_callback(AtStep(2, request))
    monkeypatch.setattr(made.runs["hot"].trainer, "save_last_completed_step", full_disk)
    found = made.run()
    for name, (_, message) in FAILING.items():
        assert found[name].status == "failed" and re.search(message, str(found[name].error)), name
        assert f"run {name!r} failed: " in caplog.text
    assert_plain_and_hot_finish(found)


@pytest.mark.slow
def test_a_rate_of_zero_cannot_be_scaled(tmp_path):
    made = sweep(tmp_path, ("plain", "hot"), changes={**SAVED, "learning_rate": 0.0})
    answers, changes = list[str](), {"learning_rate": 1e-3}

    def send() -> None:
        for _ in range(2):  # the request that was refused is gone: its name is free
            with pytest.raises(ConfigError) as error:
                made._execute({"action": "clone", "name": "plain", "new_name": "twin", "changes": changes})
            answers.append(str(error.value))

    made.runs["plain"].trainer.add_callback(AtStep(2, send))
    assert_plain_and_hot_finish(made.run())
    assert len(answers) == 2 and all("whose learning_rate is 0" in answer for answer in answers)


@pytest.mark.slow
def test_a_run_of_all_weights_that_cannot_be_built_fails_alone(tmp_path, monkeypatch):
    made = Sweep(
        policy(),
        {"plain": runs.count_reward, "hot": runs.count_reward, "late": runs.count_reward},
        {name: config(tmp_path / name, **SETTINGS[name]) for name in ("plain", "hot", "late")},
        runs.prompts(),
        processing_class=runs.tokenizer(),
        peft_config={"plain": adapters(["plain"])["plain"]},
    )
    made.runs["hot"].reward_funcs = 7
    found = made.run()
    assert [found[name].status for name in ("plain", "hot", "late")] == ["finished", "failed", "finished"]


@pytest.mark.parametrize("name", ["twin\0", "tw\nin", "\u202etwin"])
def test_names_with_control_characters_are_refused(name, tmp_path):
    made = sweep(tmp_path, ("plain",), changes=SAVED)
    with pytest.raises(ConfigError, match="not a new name"):
        made.clone("plain", name)


def test_an_error_of_the_sampler_is_raised_in_the_runs_that_wait(tmp_path, monkeypatch):
    made = sweep(tmp_path, ("plain", "hot"))
    monkeypatch.setattr(made.sampler, "sample", full_disk)
    with pytest.raises(OSError, match="No space"):
        made.run()
    assert {run.error.errno for run in made.runs.values()} == {errno.ENOSPC}


@pytest.mark.slow
def test_a_stopped_run_that_cannot_be_saved_has_failed(tmp_path, monkeypatch):
    made = sweep(tmp_path, ("plain", "hot"), changes=SAVED)
    monkeypatch.setattr(made.runs["hot"].trainer, "_save_checkpoint", full_disk)
    made.runs["hot"].trainer.add_callback(AtStep(2, lambda: made.stop("hot")))
    found = made.run()
    assert (found["hot"].status, found["hot"].error.errno) == ("failed", errno.ENOSPC)
    assert found["hot"].thread.has_ended and found["plain"].status == "finished"
    with pytest.raises(ConfigError, match="'hot' is failed"):
        made.resume("hot")


#: Statuses after each command that is accepted.
AFTER = {
    "waiting": {"stop": "stopping", "clone": "waiting"},
    "running": {"stop": "stopping", "clone": "running"},
    "stopping": {"stop": "stopping", "resume": "running", "clone": "stopping"},
    "stopped": {"resume": "running", "clone": "stopped"},
    "finished": {},
    "failed": {},
}


def test_every_command_in_every_state_of_a_run(tmp_path):
    made = sweep(tmp_path, ("plain",), changes=SAVED)
    run = made.runs["plain"]
    for status, after in AFTER.items():
        for action in ("stop", "resume", "clone"):
            run.status, run.clones = status, []
            command = {"action": action, "name": "plain", "new_name": "twin"}
            if action in after:
                made._execute(command)
                assert (run.status, len(run.clones)) == (after[action], int(action == "clone"))
            else:
                with pytest.raises(ConfigError, match=f"'plain' is {status}; a run takes {action} while"):
                    made._execute(command)
                assert (run.status, run.clones) == (status, [])


@pytest.mark.slow
def test_a_stopped_run_is_cloned_after_all_others_have_ended(tmp_path):
    made = sweep(tmp_path, ("plain", "hot"), changes=SAVED)
    made.stop("plain")
    made.runs["hot"].trainer.add_callback(AtStep(4, lambda: made.clone("plain", "twin")))
    found = made.run()
    assert found["plain"].status == "stopped" and found["twin"].state.global_step == 4


class AtStep(TrainerCallback):
    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.act()
