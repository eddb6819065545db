"""``groupwise sweep``: the runs of a file, and commands to a running sweep."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from groupwise.commands.cli import main
from groupwise.commands.cli.sweep import make_sweep

RUNS = {
    "low": {"learning_rate": 1e-4},
    "high": {"learning_rate": 1e-1, "beta": 0.1, "rewards": ["my_rewards:constant", "my_rewards:even"]},
}
LORA = {"r": 2}


@pytest.mark.slow
def test_the_runs_of_a_file_are_trained_and_compared(run_file, capsys):
    assert main(["sweep", "--config", run_file(runs=RUNS, lora=LORA, max_steps=2)]) == 0
    assert "groupwise report out/high out/low --output out/report.html" in capsys.readouterr().out
    for name, rate in (("low", 1e-4), ("high", 1e-1)):
        directory = Path("out", name)
        settings = json.loads((directory / "settings.json").read_text())["settings"]
        assert settings["learning_rate"] == rate and settings["run_name"] == name
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "reward" in line] == [1, 2]
        assert ("rewards/constant/mean" in lines[0]) is (name == "high")
        assert (directory / "adapter_model.safetensors").is_file() and (directory / "README.md").is_file()
    assert main(["report", "out/low", "out/high", "--output", "out/report.html"]) == 0


@pytest.mark.slow
def test_runs_share_a_mixture_and_have_rewards_and_weights_by_source(run_file):
    for name in ("maths", "code"):
        Path(f"{name}.jsonl").write_text('{"prompt": "w2 w3"}\n' * 8)
    by_source = {"maths": ["my_rewards:even", "my_rewards:constant"], "code": "my_rewards:even"}
    given = {"datasets": [{"path": f"{name}.jsonl", "source": name} for name in ("maths", "code")]}
    runs = {"low": {"dataset_weights": {"maths": 3, "code": 1}}, "high": {"rewards": "my_rewards:even"}}
    path = run_file(dataset=..., rewards=by_source, runs=runs, lora=LORA, max_steps=2, **given)
    assert main(["sweep", "--config", path]) == 0
    lines = {name: Path("out", name, "metrics.jsonl").read_text() for name in runs}
    assert all('"reward/maths"' in text or '"reward/code"' in text for text in lines.values())
    assert "rewards/constant/mean" in lines["low"] and "rewards/constant/mean" not in lines["high"]


def test_flags_act_on_all_runs(run_file, tmp_path):
    flags = ["--config", run_file(runs=RUNS, lora=LORA), "--output_dir", "elsewhere", "--max_steps", "7"]
    sweep, resume, dataset = make_sweep(flags)
    assert {run.args.max_steps for run in sweep.runs.values()} == {7} and not resume
    assert sweep.directory == tmp_path / "elsewhere" and dataset == "rows.jsonl"
    assert sweep.runs["high"].args.beta == 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": ...}, "has no runs"),
        ({"runs": {"low": {"model": "other"}}}, "'model', which runs of a sweep have in common"),
        (
            {"runs": {"low": {"dataset_name": "other"}}},
            "'dataset_name', which runs of a sweep have in common",
        ),
        ({"runs": {"low": {"learning_rat": 1}}}, "nearest: 'learning_rate'"),
        ({"tools": "my_rewards:even"}, "does not support"),
        (
            {"runs": {"low": {"environment": "my_rewards:Room"}}},
            "'low' has environment, which a sweep does not",
        ),
        ({"lora": {"use_dora": True}}, "use_dora"),
        (
            {"resume_from_checkpoint": "out/low/checkpoint-2"},
            "its own newest checkpoint; allowed: true, false",
        ),
        ({"runs": {"_a": {}}}, "must be that of a directory"),
    ],
)
def test_files_that_cannot_be_trained(changes, message, run_file, capsys):
    assert main(["sweep", "--config", run_file(**{"runs": RUNS, "lora": LORA, **changes})]) == 2
    assert message in capsys.readouterr().err


def test_flags_that_a_sweep_does_not_support_are_refused(run_file, capsys):
    flags = ["--rollout_func", "my_rewards:even"]
    assert main(["sweep", "--config", run_file(runs=RUNS, lora=LORA), *flags]) == 2
    assert "rollout_func, which a sweep does not support" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "resumes"), [(True, True), ("false", False), (False, False)])
def test_a_sweep_resumes_only_if_asked_to(given, resumes, run_file):
    assert (
        make_sweep(["--config", run_file(runs=RUNS, lora=LORA, resume_from_checkpoint=given)])[1] == resumes
    )


def test_a_failed_run_is_an_exit_code(run_file, capsys):
    runs = {"low": {}, "none": {"rewards": ["my_rewards:not_a_number"]}}
    assert main(["sweep", "--config", run_file(runs=runs, lora=LORA)]) == 1
    assert Path("out/low/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_command_reaches_a_running_sweep(run_file, capsys, monkeypatch):
    """No run reaches its last step: however slow the commands are, each finds the runs training."""
    settings = {"max_steps": 1_000_000, "save_strategy": "steps", "save_steps": 1_000_000}
    sweep, _, _ = make_sweep(["--config", run_file(runs=RUNS, lora=LORA, **settings)])
    answers: list[object] = []

    def wait_for_a_step(name: str, step: int = 0) -> None:
        while sweep.runs[name].state.global_step <= step:
            assert sweep.runs[name].is_active
            time.sleep(0.05)

    def control() -> None:
        wait_for_a_step("low")
        answers.append(main(["sweep", "out", "--stop", "high"]))
        answers.append(main(["sweep", "out", "--resume", "low"]))
        clone = ["sweep", "out", "--clone", "low", "twin", "--set"]
        answers.append(main([*clone, "learning_rate=-1"]))
        answers.append(main([*clone, "lr_scheduler_type=constnt"]))  # an error of transformers
        answers.append(main([*clone, "name=x"]))
        answers.append(main([*clone, "weight_decay=0.1"]))
        answers.append(main([*clone, "max_steps=1"]))
        begins = sweep.runs["low"].state.global_step
        answers.append(main([*clone, "learning_rate=1e-3", "max_steps=2_000_000"]))
        while sweep.runs["low"].clones:
            time.sleep(0.05)
        wait_for_a_step("twin", begins)

    def control_and_stop() -> None:
        try:
            control()
        finally:  # also after a failure: the sweep ends when no run is active
            for run in list(sweep.runs.values()):
                if run.is_active:
                    sweep.stop(run.name)

    thread = threading.Thread(target=control_and_stop)
    thread.start()
    sweep.run()
    thread.join()
    captured = capsys.readouterr()
    assert answers == [0, 2, 2, 2, 2, 2, 2, 0] and "high stops after optimizer step" in captured.out
    for message in (
        "a run takes resume while stopping, stopped",
        *("learning_rate=-1", "constnt is not a valid SchedulerType"),
        *("'name' cannot be changed", "'weight_decay' cannot be changed", "nearest valid:"),
    ):
        assert message in captured.err
    assert {name: run.status for name, run in sweep.runs.items()} == dict.fromkeys(
        ("low", "high", "twin"), "stopped"
    )
    twin = sweep.runs["twin"]
    assert twin.args.learning_rate == 1e-3 and twin.state.global_step > 1


def test_commands_without_a_sweep(tmp_path, capsys):
    assert main(["sweep", str(tmp_path), "--stop", "low"]) == 2
    assert "no sweep is running" in capsys.readouterr().err
    for arguments in ([str(tmp_path)], ["--stop", "low"]):
        assert main(["sweep", *arguments]) == 2
        assert "one command" in capsys.readouterr().err
    assert main(["sweep", str(tmp_path), "--stop", "low", "--set", "beta=0"]) == 2
    assert "--set has the changes of a clone" in capsys.readouterr().err


def test_commands_do_not_load_torch(tmp_path):
    code = (
        "import sys; from groupwise.commands.cli import main; main(sys.argv[1:]); "
        "sys.exit('torch' in sys.modules)"
    )
    arguments = [sys.executable, "-c", code, "sweep", str(tmp_path), "--stop", "low"]
    assert subprocess.run(arguments, capture_output=True).returncode == 0


def test_a_run_without_logs_is_not_in_the_command_of_the_report(run_file, capsys):
    runs = {"a b": {}, "none": {"rewards": ["my_rewards:not_a_number"]}}
    assert main(["sweep", "--config", run_file(runs=runs, lora=LORA)]) == 1
    assert capsys.readouterr().out.endswith("groupwise report 'out/a b' --output out/report.html\n")
