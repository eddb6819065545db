"""The runner of learning benchmarks with a tiny random model: files, resumption, tables and figures."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import figures
import methods
import pytest
import run
import sub_agent
import tasks
from datasets import Dataset
from support.runs import policy, tokenizer, trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise import GRPOConfig

SMALL = ["--tiny", "--steps", "1", "--test_questions", "2", "--samples", "2"]


@pytest.mark.slow
def test_cells_leave_files_that_a_second_call_skips(tmp_path, capsys):
    cells = ["sft", "grpo_process", "grpo_process_solution"]
    arguments = [*SMALL, "--cells", *cells, "--seeds", "0", "--output", str(tmp_path)]
    written = run.main(arguments)
    assert [path.name for path in written] == [f"{cell}-0.json" for cell in ("instruct", *cells)]
    first = {path.name: path.read_text() for path in tmp_path.iterdir()}
    (tmp_path / "grpo_process-0.json").unlink()
    assert [path.name for path in run.main(arguments)] == ["grpo_process-0.json"]
    assert (tmp_path / "sft-0.json").read_text() == first["sft-0.json"]
    assert "sft-0.json: finished before" in capsys.readouterr().out

    initial, result = (json.loads(first[f"{cell}-0.json"]) for cell in ("instruct", "sft"))
    assert "history" not in initial and result["num_train_questions"] == 2 and result["seed"] == 0
    (logged,) = [log for log in result["history"] if "reward" in log]
    assert logged["reward"] == 1.0  # replayed solutions are correct
    assert len(result["step_seconds"]) == len(result["step_processor_seconds"]) == 1
    for task in tasks.TRAINED:
        names = {f"eval_{task}_{name}" for name in ("pass@1", "pass@2", "maj@2")}
        assert names <= set(initial["evaluation"]) and names <= set(result["evaluation"])
        assert f"eval_{task}_pass@1_gain_low" in result["evaluation"]
    # The same sample of the same seed trains again to the same numbers.
    again = json.loads((tmp_path / "grpo_process-0.json").read_text())
    once = json.loads(first["grpo_process-0.json"])
    rewards = [[log["reward"] for log in r["history"] if "reward" in log] for r in (once, again)]
    losses = [[log["loss"] for log in r["history"] if "loss" in log] for r in (once, again)]
    assert rewards[0] == rewards[1] and losses[0] == losses[1]


@pytest.mark.slow
def test_runs_of_other_sampling_seeds_have_the_same_questions_in_files_of_their_own(tmp_path):
    arguments = [*SMALL, "--cells", "resampled", "--seeds", "0", "--output", str(tmp_path)]
    run.main(arguments)
    written = run.main([*arguments, "--sampling_seeds", "7", "8", "--tasks", "chains"])
    folder = tmp_path / run.SAMPLING_SEEDS
    assert written == [folder / "resampled-0-7.json", folder / "resampled-0-8.json"]
    plain, *others = (json.loads(p.read_text()) for p in (tmp_path / "resampled-0.json", *written))
    assert [one["settings"]["seed"] for one in (plain, *others)] == [100, 7, 8]
    assert {one["settings"]["data_seed"] for one in (plain, *others)} == {0}
    assert [one["fields"]["sampling_seed"] for one in (plain, *others)] == [100, 7, 8]
    assert others[0]["history"][0]["num_tokens"] != others[1]["history"][0]["num_tokens"]  # other samples
    assert "eval_stories_pass@1" in plain["evaluation"]
    assert all("eval_stories_pass@1" not in one["evaluation"] for one in others)
    assert "eval_chains_pass@1_gain" in others[0]["evaluation"]  # compared with the file of instruct
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", plain["versions"]["commit"])


@pytest.mark.slow
def test_iterative_grpo_and_trl_train_every_step_and_change_the_model(tmp_path, monkeypatch):
    """Two steps of each; the policy's own samples earn no reward, so that a constant would train nothing."""

    def first_letter(completions, **_):
        return [float(ord(c[-1]["content"][:1] or " ") % 2) for c in completions]

    monkeypatch.setattr(tasks, "correct", first_letter)
    path = run.tiny_model(tmp_path / "model")
    for cell in ("grpo_iterative", "trl"):
        scale = run.Scale(2, 2, 4, 4, 2, 2, 1e-2)
        model, words = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        args = run.config(run.CELLS[cell], scale, 0, str(tmp_path / cell))
        result = run.train_cell(run.CELLS[cell], model, words, scale, args)
        assert len(result["step_seconds"]) == 2 and result["step_seconds"][0] < result["step_seconds"][1]
        assert len([log for log in result["history"] if "reward" in log]) == 2
        assert any((now != then).any() for now, then in zip(model.parameters(), before, strict=True)), cell


@pytest.mark.slow
def test_an_agent_of_two_turns_trains_both_as_two_rows_and_as_one(tmp_path, monkeypatch):
    scores = iter(range(10**6))
    monkeypatch.setattr(tasks, "correct", lambda texts, *_: [float(next(scores) % 2) for _ in texts])
    path, scale = run.tiny_model(tmp_path / "model"), run.Scale(1, 2, 4, 8, 2, 2, 1e-2)
    for cell, rows in (("sub_agent", 2.0), ("one_conversation", None)):
        result = run.run_cell(cell, path, scale, 0, None)
        (logged,) = [log for log in result["history"] if "reward" in log]
        assert logged["reward"] == 0.5 and logged["grad_norm"] > 0 and logged.get("rollouts/rows") == rows
        assert "eval_chains_pass@1" in result["initial"]
        assert "eval_chains_pass@1_gain_ci95" in result["evaluation"]


def test_the_turns_of_an_agent_hold_the_same_pieces(tmp_path):
    """The main agent gets the sub-agent's answer as text; in one row both turns alone are trained."""
    words = AutoTokenizer.from_pretrained(run.tiny_model(tmp_path))
    end = words.eos_token_id

    class Backend:
        def generate(self, prompts, sampling):
            self.prompts = [words.decode(ids) for ids in prompts]
            return [SimpleNamespace(token_ids=[*words("7")["input_ids"], end]) for _ in prompts]

    backend = Backend()
    trainer_ = SimpleNamespace(processing_class=words, backend=backend)
    question = [{"role": "user", "content": "Start with 7. Add 5. Subtract 2. What is the result?"}]
    rows = sub_agent.two_rows([question] * 2, trainer_)
    assert rows["rollout_ids"] == [0, 0, 1, 1] and rows["final_text"] == ["7", "7"]
    first, second = (words.decode(ids) for ids in rows["prompt_ids"][:2])
    assert first.endswith("Start with 7. Add 5.") and second == backend.prompts[0]
    request = "Found: 7\nSubtract 2. What is the result?"
    assert second.endswith(request)
    whole = sub_agent.one_row([question] * 2, trainer_)
    assert whole["env_mask"][0] == [1, 1, *[0] * len(request), 1, 1] and backend.prompts[0].endswith(request)


def test_every_cell_is_a_valid_configuration(tmp_path):
    methods.register()
    for name, cell in run.CELLS.items():
        config = run.config(cell, run.Scale(), 3, str(tmp_path))
        ablation = name in run.ABLATIONS
        half = name == "trl" or (ablation and config.num_iterations == 1)
        assert config.max_steps == (20 if name in run.AGENTS else 15 if half else 30), name
        assert (config.seed, config.data_seed) == (103 if ablation else 3, 3), name
        stored = cell.source in ("solutions", "filtered", "pairs")
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
        assert rows == config.generation_batch_size == (16 if stored else 64), name
    plain, tried = (
        run.config(run.CELLS[c], run.TINY, 0, str(tmp_path)) for c in ("grpo_outcome", "beta_0.04")
    )
    assert (plain.beta, tried.beta) == (0.0, 0.04)


def result_file(directory, cell: str, seed: int, after: float) -> None:
    metrics = {
        f"eval_{task}_{name}": after
        for task in tasks.TRAINED
        for name in ("pass@1", "pass@4", "maj@4", "pass@1_ci95")
    }
    history = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": after}, {"train_loss": 0.0}]
    metrics |= {"eval_chains_pass@1_gain" + end: x for end, x in (("", 0.1), ("_ci95", 0.05))}
    fields = {"step_processor_seconds": [3.0, 60.0], "scale": {"test_questions": 48}}
    result = {"cell": cell, "seed": seed, "evaluation": metrics, "history": history, **fields}
    (directory / f"{cell}-{seed}.json").write_text(json.dumps(result))


@pytest.mark.slow
def test_the_table_has_means_and_student_intervals_over_seeds(tmp_path):
    """0.2, 0.4, 0.6: mean 0.4, deviation 0.2, half-width 4.303 · 0.2 / √3 = 0.497.

    The gain of a run, 0.1 ± 0.05 over 48 questions: their variance is (0.05 / 1.96)² · 48 = 0.0312. With the
    observations -1 and 1 the mean is 0.096, the sum of squares around it 47 · 0.0312 + 48 · 0.1² + 2 - 50 ·
    0.096² = 3.487, the standard error √(3.487 / 49 / 50) = 0.0377, and the half-width 2.312 · 0.0377 = 0.087.
    """
    for seed, after in enumerate([0.2, 0.4, 0.6]):
        result_file(tmp_path, "grpo_outcome", seed, after)
    result_file(tmp_path, "sft", 0, 0.25)
    shown = figures.main([str(tmp_path)]).splitlines()
    assert (
        shown[0]
        == "| run | seeds | pass@1, in | maj@4, in | pass@4, in | pass@1, out | maj@4, out | pass@4, out |"
    )
    assert shown[2] == "| grpo_outcome | 3 |" + " 40.0% ± 49.7% |" * 3 + " - |" * 3
    assert shown[3] == "| sft | 1 |" + " 25.0% |" * 3 + " - |" * 3
    assert shown[7] == "| grpo_outcome | +10.0% ± 5.0%: **gain** | - | - | - |"
    assert shown[10] == "- In `chains` a gain was seen after `grpo_outcome`, `sft`."
    assert shown[14] == "| grpo_outcome | 0 | +10.0% (+0.9% to +18.3%) | - | - | - |"
    assert {"curves.png", "against_trl.png", "samples.png"} <= {path.name for path in tmp_path.iterdir()}


def run_of(seed, rewards, accuracy=0.5, seconds=()):
    evaluation = {f"eval_{task}_pass@1": accuracy for task in figures.TASKS}
    history = [{"reward": reward} for reward in rewards]
    return {
        "seed": seed,
        "history": history,
        "evaluation": evaluation,
        "step_processor_seconds": list(seconds),
    }


#: Two orders of questions with two unchanged runs each: rewards 0.3, 0.5 and 0.5, 0.7 of the first two steps.
EQUAL = {
    "resampled": [run_of(0, [0.2, 0.4], 0.5, [6.0, 9.0]), run_of(1, [0.4, 0.6], 0.6, [6.0, 9.0])],
    "grpo_outcome": [
        run_of(seed, [first, 0.6, 1.0], 0.9, [2.0, 3.0, 7.0]) for seed, first in ((0, 0.4), (1, 0.8))
    ],
}


def test_unchanged_runs_of_one_order_of_questions_give_the_noise():
    """Deviations of ± 0.1 in two orders: variance 4 · 0.01 / 2 = 0.02, with two degrees of freedom."""
    assert figures.noise_table(EQUAL).splitlines()[2:] == [
        "| 0 | 30.0%, 50.0% | 50.0% |",
        "| 1 | 50.0%, 70.0% | 60.0% |",
        "| standard deviation | 14.1% (2 degrees of freedom) | - |",
    ]
    more = {**EQUAL, figures.OTHER_SAMPLES: [run_of(0, [0.1, 0.1], 0.7)]}
    # 0.3, 0.5, 0.1 and 0.5, 0.7: (0.08 + 0.02) / 3; accuracies 0.5, 0.7: the longer run does not count.
    assert figures.noise_table(more).splitlines()[2:] == [
        "| 0 | 30.0%, 50.0%, 10.0% | 50.0%, 70.0% |",
        "| 1 | 50.0%, 70.0% | 60.0% |",
        "| standard deviation | 18.3% (3 degrees of freedom) | 14.1% (1 degrees of freedom) |",
    ]


def test_runs_of_a_second_family_of_samples_have_a_row_of_their_own_and_count_as_unchanged(tmp_path):
    folder = tmp_path / figures.SAMPLING_SEEDS
    folder.mkdir()
    gained = {"eval_chains_pass@1_gain": 0.5, "eval_chains_pass@1_gain_ci95": 0.1}
    for seed in (0, 1):
        made = {**run_of(seed, [0.1, 0.3, 0.9], 0.8), "cell": "grpo_outcome", "scale": {"test_questions": 48}}
        made["evaluation"] |= gained
        (folder / f"grpo_outcome-{seed}-400.json").write_text(json.dumps(made))
    results = {**EQUAL, **figures.load(tmp_path)}
    assert figures.noise_table(results).splitlines()[2] == "| 0 | 30.0%, 50.0%, 20.0% | 50.0% |"
    assert figures.verdicts({figures.OTHER_OUTCOME: results[figures.OTHER_OUTCOME]}).splitlines()[2] == (
        "| grpo_outcome, other samples | +50.0% ± 10.0%: **gain** | - | - | - |"
    )
    assert figures.OTHER_OUTCOME not in figures.without_ablations(results)
    assert figures.OTHER_OUTCOME in figures.blocks(results)["verdicts"]


def test_ablations_are_compared_with_all_unchanged_runs_of_the_same_order():
    results = {**EQUAL, "group_4": [run_of(1, [0.5, 0.1], 0.25)], "stale_1": [run_of(0, [0.0, 0.0], 0.1)]}
    results["stale_1_corrected"] = [run_of(0, [1.0, 1.0], 0.2)]
    # 0.3 - 0.6; half-width 4.303 · 0.1414 · √(1 + 1/2) = 0.745.
    shown = figures.ablations(results).splitlines()[2:]
    assert shown[0] == "| group_4 | 1 | 30.0% | -30.0% ± 74.5% | 25.0% | - | 25.0% |"
    # The corrected run beside the one without: 1.0 - 0.0; half-width 4.303 · 0.1414 · √2 = 0.861: seen.
    reported = figures.reported(results).splitlines()
    assert reported[2].endswith("| - | `stale_1` reward -40.0% ± 74.5% |")
    assert reported[3].endswith("| `stale_1_corrected` reward +100.0% ± 86.1% | - |")


def test_differences_against_the_report_are_not_called_seen():
    results = {**EQUAL, "dynamic_sampling": [run_of(0, [-2.0, -2.0])]}
    (line,) = [line for line in figures.reported(results).splitlines() if "dynamic_sampling" in line]
    assert line.split(" | ")[1] == "-" and line.endswith("-240.0% ± 74.5% (seen in the opposite direction) |")


def test_all_unchanged_runs_stand_beside_those_of_trl():
    theirs = [run_of(0, [0.5, 0.5], 0.4, [9.0, 15.0]), run_of(1, [0.0, 0.2], 0.6, [3.0, 9.0])]
    shown = figures.against_trl({**EQUAL, "trl": theirs}).splitlines()[2:]
    # Medians of 2, 1 and 9, 6 or 3, 6 seconds; differences -0.1 and 0.5 of the mean rewards: mean 0.2,
    # half-width 4.303 · 0.1414 · √(2 · 1.5) / 2 = 0.527.
    assert shown == [
        "| 0 | 2 | 40.0% | 50.0% | 50.0% | 40.0% | 1.5 | 7.5 | 5.0 |",
        "| 1 | 2 | 60.0% | 10.0% | 60.0% | 60.0% | 1.5 | 4.5 | 3.0 |",
        "| mean | | 50.0% | 30.0% | 55.0% | 50.0% | 1.5 | 6.0 | 4.0 |",
        "| difference | | +20.0% ± 52.7% | | - | | | | |",
    ]


def test_the_time_to_the_same_reward_ends_at_a_level_that_both_reach():
    theirs = [run_of(0, [0.2, 0.3], 0.4, [60.0, 240.0])]
    shown = figures.same_reward({**EQUAL, "trl": theirs}, window=1).splitlines()[2:]
    # grpo_outcome reaches 0.3 in its first step, after 2 s; resampled in its second, after 9 s.
    assert shown == [
        "| 0 | grpo_outcome | 30.0% | 1 | 2 | 0.0 | 4.0 | 120.0 |",
        "| 0 | resampled | 30.0% | 2 | 2 | 0.1 | 4.0 | 26.7 |",
    ]


def test_gains_are_over_one_baseline_of_many_samples_if_it_was_run():
    metrics = {"eval_chains_pass@1": 0.5, "eval_chains_pass@1_gain": 0.4, "eval_chains_pass@1_gain_ci95": 0.1}
    runs = [{"seed": 0, "evaluation": metrics}]
    initial = {"evaluation": {"eval_chains_pass@1": 0.2}}
    (changed,) = figures.over_initial(runs, initial)
    assert changed["evaluation"] == {**metrics, "eval_chains_pass@1_gain": 0.3}
    assert figures.over_initial(runs, None) == runs and metrics["eval_chains_pass@1_gain"] == 0.4


def test_many_samples_are_read_from_their_folder_and_shown_up_to_k_64(tmp_path):
    folder = tmp_path / figures.MANY_SAMPLES
    folder.mkdir()
    ks = [2**n for n in range(7)]
    initial = {f"eval_chains_pass@{k}": k / 100 for k in ks}
    gained = {f"eval_chains_pass@{k}_gain": 0.1 for k in ks} | {
        f"eval_chains_pass@{k}_gain_ci95": 0.2 for k in ks
    }
    trained = {name: value + 0.1 for name, value in initial.items()} | gained
    for cell, evaluation in (("instruct", initial), ("grpo_outcome", trained)):
        content = {"cell": cell, "seed": 0, "scale": {"test_questions": 48}, "evaluation": evaluation}
        (folder / f"{cell}-0.json").write_text(json.dumps(content))
    results = figures.load(tmp_path)
    assert figures.without_ablations(results) == {}
    lines = figures.figure_7(results).splitlines()[2:]
    assert len(lines) == 7 and lines[-1].startswith(
        "| 64 | 64.0% | 74.0% | +10.0% ± 20.0%: none above 30 points | - "
    )


def test_times_on_one_machine_are_divided_by_those_of_the_same_run():
    def timed(total: float, rows: int) -> list[dict]:
        settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 64 // rows}
        return [{"settings": settings, "step_processor_seconds": [0.0] * 14 + [total]}]

    results = {"resampled one_machine": timed(100.0, 64), "micro_batches_4 one_machine": timed(80.0, 16)}
    results["trl one_machine"] = timed(400.0, 16)
    assert figures.without_ablations(results) == {}
    assert figures.equal_micro_batches(results).splitlines()[2:] == [
        "| resampled | 1 of 64 rows | 100 | 4.0 |",
        "| micro_batches_4 | 4 of 16 rows | 80 | 5.0 |",
        "| trl | 4 of 16 rows | 400 | 1.0 |",
    ]


def test_a_refreshed_reference_is_compared_by_seed():
    results = {**EQUAL, "grpo_iterative": [run_of(0, [0.5], 0.7), run_of(1, [0.5], 0.7)]}
    results["grpo_beta_0.04"] = [run_of(0, [0.25], 0.5)]
    results[figures.OTHER_SAMPLES] = [run_of(0, [0.1, 0.1], 0.7)]  # gives the noise of accuracy
    shown = figures.refresh(results).splitlines()[2:]
    assert [line.rpartition(" ±")[0] for line in shown] == [
        "| mean reward | 50.0% | 25.0% | +25.0%",
        "| pass@1, chains | 70.0% | 50.0% | +20.0%",
    ]


def test_curves_are_means_over_steps_and_seeds():
    runs = [{"history": [{"reward": r} for r in values]} for values in ([0, 1, 1, 0], [1, 1, 0])]
    assert figures.rewards(runs[0], 2) == [0.5, 1.0, 0.5]
    assert figures.mean_curve([figures.rewards(one, 2) for one in runs]) == [0.75, 0.75]
    assert figures.rewards({}, 2) == []


def test_the_page_shows_the_results():
    page = Path(run.__file__).parents[2].joinpath("docs", "learning.md").read_text()
    assert figures.with_blocks(page, figures.blocks(figures.load(run.RESULTS))) == page


def test_a_page_without_a_block_is_an_error():
    page = "a\n\n<!-- noise -->\n\nold\n\n<!-- end -->\n\nb\n"
    assert figures.with_blocks(page, {"noise": "new"}) == page.replace("old", "new")
    with pytest.raises(ValueError, match="no line <!-- trl -->"):
        figures.with_blocks(page, {"trl": "new"})


def test_an_empty_directory_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="has no finished run"):
        figures.main([str(tmp_path)])


def test_intervals_of_few_seeds():
    for values in ([0.5], [0.25, 0.75]):
        assert figures.interval(values)[0] == 0.5 and math.isnan(figures.interval(values)[1])
    with pytest.raises(ValueError, match="0 seeds; allowed: 1 to 21"):
        figures.interval([])


def test_samples_of_the_policy_are_sorted_by_their_answer(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "w0 w1"}], "answer": "x"}]
    sampled = trainer(tmp_path, max_completion_length=2)

    def reward(completions, answer):
        assert answer == ["x"]
        return [float("w1" in completions[0][0]["content"])]

    correct, wrong = methods.sort_samples(sampled, rows, 16, reward)
    found = [*correct.get("w0 w1", []), *wrong["w0 w1"]]
    assert len(set(found)) == len(found) > 4
    assert all("w1" in text for text in correct.get("w0 w1", []))
    assert not any("w1" in text for text in wrong["w0 w1"])


def test_rows_without_the_needed_samples_are_left_out():
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": name}]} for name in "abc"])
    stored, wrong = {"a": ["1"], "b": ["2"]}, {"b": ["3"], "c": ["4"]}

    def kept(name: str) -> list[str]:
        found = run.with_samples(rows, stored, wrong, run.CELLS[name])
        return [row["prompt"][0]["content"] for row in found]

    assert (kept("rft"), kept("dpo"), kept("grpo_outcome")) == (["a", "b"], ["b"], ["a", "b", "c"])


@pytest.mark.parity
def test_dpo_trains_on_pairs_of_samples(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"w{i}"}]} for i in range(2)]
    words, model = tokenizer(), policy()
    words.chat_template = words.chat_template.replace(
        "<user> {{ m['content'] }} ",
        "{{ '<user> ' if m['role'] == 'user' else '<assistant> ' }}{{ m['content'] }} ",
    )
    args = GRPOConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, num_generations=2, use_cpu=True, bf16=False
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    correct, wrong = ({f"w{i}": [f"w{i + shift}"] for i in range(2)} for shift in (5, 9))
    history = run.train_dpo(model, words, rows, args, correct, wrong, run.Clock())
    assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)  # policy and reference are equal
    assert any((now != then).any() for now, then in zip(model.parameters(), before, strict=True))
