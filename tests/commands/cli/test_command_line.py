"""The command line: valid and invalid input, and its error messages.

Files: ``cli.py``, ``commands/cli/environment.py``, ``commands/cli/sources.py``, ``commands/cli/train.py``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import tomllib
from support.saved_runs import files
from support.workers.launch import EXTRAS, run, without_extras
from transformers import AutoTokenizer

from groupwise.commands.cli import COMMANDS, main
from groupwise.commands.cli.run_file import read_run
from groupwise.commands.cli.sources import load_datasets, load_rows, resolve_reward
from groupwise.errors import ConfigError


def test_help_and_mistyped_commands_load_nothing_heavy():
    code = (
        "import sys; from groupwise.commands.cli import main\n"
        "codes = [main([]), main(['--help']), main(['trian'])]; "
        "print(codes, [m for m in ('torch', 'transformers', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 2] []"
    assert "nearest: train" in done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_a_run_trains_and_saves_a_model_with_a_card(run_file, capsys):
    assert main(["train", "--config", run_file(), "--learning_rate", "1e-3", "--max-steps", "2"]) == 0
    written = {path.name for path in Path("out").iterdir()}
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= written
    card = Path("out/README.md").read_text()
    assert "| learning_rate | 0.001 |" in card and "| max_steps | 2 |" in card
    assert "my_rewards" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_resumes(run_file):
    path = run_file(save_strategy="steps", save_steps=1)
    assert main(["train", "--config", path]) == 0
    resumed = ["--resume_from_checkpoint", "true", "--max_steps", "2"]
    assert main(["train", "--config", path, *resumed]) == 0
    state = json.loads(Path("out/checkpoint-2/trainer_state.json").read_text())
    assert [log["step"] for log in state["log_history"]] == [1, 2]
    before = files(Path("out"))
    assert main(["train", "--config", path, *resumed]) == 0
    assert files(Path("out")) == before


@pytest.mark.slow
def test_a_run_iterates_and_trains_its_reward_model(run_file, tmp_path):
    from support.iterative_runs import reward_model
    from support.runs import tokenizer

    reward_model(vocab_size=32).save_pretrained(tmp_path / "judge")
    tokenizer().save_pretrained(tmp_path / "judge")
    loop = {"iterations": 2, "reward_prompts": 2, "label_func": "my_rewards:even"}
    given = {"rewards": str(tmp_path / "judge"), "max_steps": 2, "beta": 0.1, "iterative": loop}
    assert main(["train", "--config", run_file(**given)]) == 0
    saved = Path("out").glob("checkpoint-*/reward-model")
    assert {path.parent.name for path in saved} == {"checkpoint-1", "checkpoint-2"}
    assert Path("out/README.md").is_file()
    assert main(["train", "--config", run_file(**given), "--resume_from_checkpoint", "out/checkpoint-1"]) == 0


def test_a_run_trains_an_adapter(run_file):
    assert main(["train", "--config", run_file(lora={"r": 2, "target_modules": ["q_proj"]})]) == 0
    assert Path("out/adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"num_generation": 4}, [], "unknown key 'num_generation'; nearest: 'num_generations'"),
        (
            {"reward_funcs": "x"},
            [],
            "rewards='my_rewards:even' and ['x'] of TRL's keys contradict each other",
        ),
        ({}, ["--betta", "0.1"], "unknown flag '--betta'; nearest: '--beta'"),
        ({}, ["--max-step=1"], "unknown flag '--max-step'; nearest: '--max_steps'"),
        ({}, ["--num_gen", "4"], "unknown flag '--num_gen'"),
        ({}, ["0.1"], "'0.1' is not the value of a flag"),
        ({"rewards": "my_rewards"}, [], "or the id of a reward model; nearest: 'my_rewards:function'"),
        ({"rewards": "my_rewards.even"}, [], "nearest: 'my_rewards:even'"),
        ({}, ["--beta", "much"], "invalid float value: 'much'"),
        ({"loss_type": "grop"}, [], "nearest valid: 'grpo'"),
        ({"num_generations": 3}, [], "nearest valid: generation_batch_size 12, or num_generations 2 or 4"),
        ({"model": ...}, [], "model is missing"),
        ({"dataset": ...}, [], "dataset is missing"),
        ({"model": "no/such-model-here"}, [], "model 'no/such-model-here'"),
        ({"dataset": "none.jsonl"}, [], "no such file"),
        ({"dataset": "my_rewards.py"}, [], "allowed: .json, .jsonl, .csv, .parquet"),
        ({"rewards": ...}, [], "reward_funcs is missing"),
        ({"rewards": "acuracy_reward"}, [], "nearest: 'accuracy_reward'"),
        ({"rewards": "get_cosine_scaled_reward"}, [], "{get_cosine_scaled_reward: {argument: value}}"),
        ({"rewards": "my_rewards:evn"}, [], "module 'my_rewards' has no 'evn'; nearest: 'even'"),
        (
            {"rewards": "my_reward:even"},
            [],
            "or the installed packages raised ModuleNotFoundError: No module named 'my_reward'",
        ),
        (
            {"rewards": [{"my_rewards:with_threshold": {"limit": 3}}]},
            [],
            "unexpected keyword argument 'limit'",
        ),
        ({"rewards": "my_rewards:not_a_number"}, [], "reward function 'not_a_number' returned nan"),
        ({"eval_strategy": "steps"}, [], "needs an eval_dataset"),
        ({"eval_strategy": "sometimes"}, [], "sometimes is not a valid IntervalStrategy"),
        ({"lora": "r=4"}, [], "lora='r=4' is not a mapping"),
        ({"lora": {"rank": 4}}, [], "lora['rank'] is unknown to PEFT; nearest valid: "),
    ],
)
def test_invalid_input_is_reported_without_a_traceback(run_file, capfd, changes, flags, message):
    assert main(["train", "--config", run_file(**changes), *flags]) == 2
    shown = capfd.readouterr().err
    assert "groupwise: error: " in shown and message in shown
    assert "Traceback" not in shown


def test_a_run_file_is_the_first_argument_and_its_off_is_a_word(run_file):
    path = run_file(save_strategy=False, logprob_mismatch_check=False)  # as YAML reads no and off
    for command in ("train", "doctor"):
        _, config = read_run([path, "--max_steps", "3"], command)
        assert config.save_strategy == "no" and config.max_steps == 3
        assert config.logprob_mismatch_check == "off"


def test_a_key_that_is_given_twice_is_named_with_file_and_line(run_file):
    path = Path(run_file())
    lines = path.read_text().splitlines()
    for text, key, line in (("max_steps: 4", "max_steps", 1), ("lora:\n  r: 4\n  r: 8", "r", 3)):
        path.write_text("\n".join([*lines, text]))
        place = rf'the key {key!r} is given twice; keep one\n +in "{path}", line {len(lines) + line}'
        with pytest.raises(ConfigError, match=place):
            read_run([str(path)], "train")


def test_a_broken_line_of_a_dataset_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"\n{"prompt": "c"}\n')
    with pytest.raises(ConfigError, match=rf"{path}, line 3: Expecting ',' delimiter: .*JSON parse error"):
        load_rows(str(path), "train")
    table = tmp_path / "rows.csv"
    table.write_text("prompt,answer\na,b\na,b,c\n")
    with pytest.raises(ConfigError, match=rf"{table}: .*Expected 2 fields in line 3, saw 3"):
        load_rows(str(table), "train")


def test_the_traceback_is_shown_on_request(run_file, capfd):
    assert main(["train", "--config", run_file(loss_type="grop"), "--traceback"]) == 2
    shown = capfd.readouterr().err
    assert "Traceback" in shown and "groupwise: error: " in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains NoneType"),
        ("- a\n- b\n", "contains list"),
        ("a: [1", "reading"),
        (None, "no such file"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run(["--config", str(path)], "train")


def test_numbers_that_yaml_reads_as_text_become_numbers(run_file, tmp_path):
    path = Path(run_file())
    path.write_text(path.read_text() + "learning_rate: 1e-5\nepsilon: 1e-1\nweight_decay: 1e-2\n")
    _, config = read_run(["--config", str(path)], "train")
    assert (config.learning_rate, config.epsilon, config.weight_decay) == (1e-5, 0.1, 0.01)


def test_flags_alone_describe_a_run(run_file, tiny):
    flags = [
        "--model",
        str(tiny),
        "--dataset=rows.jsonl",
        "--rewards",
        "my_rewards:even",
        "think_format_reward",
    ]
    flags += ["--output_dir", "out", "--use_cpu", "--bf16", "false", "--no_shuffle_dataset"]
    flags += [
        "--model_init_kwargs",
        '{"dtype": "float32"}',
        "--lora",
        '{"r": 4}',
        "--reward_weights",
        "1",
        "0.5",
    ]
    run, config = read_run(flags, "train")
    assert (run.model, run.rewards) == (str(tiny), ["my_rewards:even", "think_format_reward"])
    assert run.lora == {"r": 4} and config.model_init_kwargs == {"dtype": "float32"}
    assert (config.shuffle_dataset, config.use_cpu, config.bf16) == (False, True, False)
    assert config.reward_weights == [1.0, 0.5]


def test_rewards_by_name_path_arguments_and_model(run_file):
    from groupwise.rewards import think_format_reward

    run_file()
    assert resolve_reward("think_format_reward") is think_format_reward
    assert resolve_reward("my_rewards:even")(completion_ids=[[2, 3, 4]]) == [2.0]
    made = resolve_reward({"my_rewards:with_threshold": {"threshold": 1}})
    assert made(completion_ids=[[1], [1, 2]]) == [0.0, 1.0]
    punish = {"get_soft_overlong_punishment": {"max_completion_len": 4, "soft_punish_cache": 2}}
    assert resolve_reward(punish)(completion_ids=[[0] * 2, [0] * 3, [0] * 4]) == [0.0, -0.5, -1.0]
    assert resolve_reward("someone/reward-model") == "someone/reward-model"


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "saved"])
def test_rows_of_files_and_directories(tmp_path, kind):
    from datasets import Dataset

    rows = Dataset.from_dict({"prompt": ["a", "b"], "row": [1, 2]})
    path = tmp_path / f"rows.{kind}"
    writers = {
        "json": rows.to_json,
        "csv": rows.to_csv,
        "parquet": rows.to_parquet,
        "saved": rows.save_to_disk,
    }
    writers[kind](str(path))
    loaded = load_rows(str(path), "train")
    assert loaded["prompt"] == ["a", "b"] and loaded["row"] == [1, 2]


def test_the_evaluation_set_may_be_a_file_or_a_split(tmp_path):
    from datasets import Dataset, DatasetDict

    from groupwise.commands.cli.run_file import RunArguments

    one, two = Dataset.from_dict({"prompt": ["a"]}), Dataset.from_dict({"prompt": ["b"]})
    DatasetDict(train=one, held_out=two).save_to_disk(str(tmp_path / "both"))
    two.to_json(tmp_path / "two.jsonl")
    both, file = str(tmp_path / "both"), str(tmp_path / "two.jsonl")
    assert load_datasets(RunArguments("m", both))[1] is None
    assert load_datasets(RunArguments("m", both, eval_split="held_out"))[1]["prompt"] == ["b"]
    assert load_datasets(RunArguments("m", both, eval_dataset=file))[1]["prompt"] == ["b"]
    with pytest.raises(ConfigError, match="held_aut"):
        load_datasets(RunArguments("m", both, eval_split="held_aut"))


def test_a_file_has_the_split_that_is_trained_on(tmp_path):
    from datasets import Dataset

    from groupwise.commands.cli.run_file import RunArguments

    rows, file, saved = Dataset.from_dict({"prompt": [*"abcd"]}), tmp_path / "rows.jsonl", tmp_path / "saved"
    rows.to_json(file)
    rows.save_to_disk(str(saved))
    for source in (file, saved):  # its rows would be evaluated on
        with pytest.raises(ConfigError, match=r"eval_split='test' is not in .*; set eval_dataset"):
            load_datasets(RunArguments("m", str(source), eval_split="test"))
    parts = {"dataset_split": "train[:3]", "eval_split": "train[3:]"}
    train, evaluated = load_datasets(RunArguments("m", str(file), **parts))
    assert (train["prompt"], evaluated["prompt"]) == ([*"abc"], ["d"])
    given = {"eval_dataset": str(file), "eval_split": "test[:1]"}
    assert load_datasets(RunArguments("m", str(saved), **given))[1]["prompt"] == ["a"]


def test_env_names_versions(capsys):
    import torch

    assert main(["env"]) == 0
    shown = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    # That of the distribution, which may lack the "+cu130" of torch.__version__; CUDA has its own line.
    assert shown["torch"].strip() == version("torch")
    assert shown["CUDA of torch"].strip() == str(torch.version.cuda)
    assert {"groupwise", "transformers", "python", "processor cores", "memory", "bfloat16"} <= set(shown)


def groupwise(*arguments: object, installed: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command in an installation with these extras alone."""
    return run("-m", "groupwise.cli", *arguments, imports=without_extras(*installed))


def test_the_extras_are_those_of_the_package():
    pyproject = Path(__file__).resolve().parents[3] / "pyproject.toml"
    declared = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(declared) - {"test", "docs"}


@pytest.mark.slow
def test_commands_run_without_extras(run_file):
    """Each in a process that cannot import an extra; the sweep trains its runs without adapters in turn."""
    sweep = Path(run_file(runs={"low": {}, "high": {"learning_rate": 1e-3}})).rename("sweep.yaml")
    path = run_file(save_rollouts=True, save_strategy="steps", save_steps=1)
    for command in (
        ("env",),
        ("train", "--config", path),
        ("report", "out"),
        ("replay", "out"),
        ("doctor", "--config", path),
        ("vllm-serve", "--config", path, "--device", "cuda", "--dry_run"),
        ("sweep", "--config", sweep, "--output_dir", "sweep"),
    ):
        done = groupwise(*command)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"runs": {"low": {}, "high": {"learning_rate": 1e-3}}}])
def test_adapters_need_peft_alone(run_file, changes):
    path = run_file(lora={"r": 2, "target_modules": ["q_proj"]}, **changes)
    done = groupwise("sweep" if changes else "train", "--config", path, installed=("peft",))
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "changes"),
    [
        ("peft", {"lora": {"r": 2}}),
        ("server", {"use_vllm": True, "vllm_mode": "server"}),
        ("vllm", {"use_vllm": True, "vllm_mode": "colocate"}),
        ("liger", {"use_liger_kernel": True}),
        ("rewards", {"rewards": "accuracy_reward"}),
        ("trackio", {"report_to": "trackio"}),
        ("dashboards", {"report_to": "wandb"}),
        ("deepspeed", {"deepspeed": {"zero_optimization": {"stage": 2}}}),
    ],
)
def test_a_run_that_needs_an_extra_names_it(run_file, extra, changes):
    done = groupwise("train", "--config", run_file(**changes))
    assert done.returncode == 2 and f"pip install 'groupwise[{extra}]'" in done.stderr, done.stderr[-3000:]


def test_env_loads_no_torch(capsys):
    code = (
        "import sys; from groupwise.commands.cli import main; print(main(['env'])); "
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *facts, code, loaded = done.stdout.splitlines()
    assert (code, loaded) == ("0", "[]")
    names = {fact.partition(":")[0] for fact in facts}
    assert {
        "groupwise",
        "torch",
        "transformers",
        "python",
        "processor cores",
        "memory",
        "CUDA of torch",
    } <= names


@pytest.mark.parametrize("arguments", [["--help"], ["env"], ["no-command"]])
def test_a_reader_that_ends_early_ends_a_command_without_a_traceback(arguments):
    """The pipe of ``| head`` is closed before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys; from groupwise.commands.cli import main; sys.exit(main({arguments}))"
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == (2 if arguments == ["no-command"] else 0)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.slow
def test_a_run_ends_with_its_model_and_the_command_of_its_report(run_file, capsys):
    assert main(["train", "--config", run_file()]) == 0
    *_, model, report = capsys.readouterr().out.splitlines()
    assert (model, report) == ("model:  out", "report: groupwise report out")
    assert main(shlex.split(report)[2:]) == 0


@pytest.mark.slow
def test_tables_of_completions_are_printed_below_the_line_of_their_log(run_file, capsys):
    settings = {"log_completions": True, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    more = {"eval_dataset": "rows.jsonl", "num_completions_to_print": 2}
    assert main(["train", "--config", run_file(**settings, **more)]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [
        re.match(r" +(\d) +\d\.|(eval) at step (\d)| +(completions\S*), step (\d)|  (step)", line)
        for line in lines
    ]
    order = ["".join(filter(None, match.groups())) for match in found if match]
    steps = [("step", f"{n}", f"completions{n}", f"eval{n}", f"completions_eval{n}") for n in (1, 2)]
    assert order == [*steps[0], *steps[1]]


def test_datasets_of_trl_are_concatenated_by_their_fractions(tmp_path):
    from groupwise.commands.cli.run_file import RunArguments

    for name, count in (("maths", 6), ("code", 3)):
        rows = [{"prompt": f"{name} {i}", f"of_{name}": i} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    maths, code = ({"path": str(tmp_path / f"{name}.jsonl")} for name in ("maths", "code"))
    train, evaluated = load_datasets(RunArguments("m", datasets=[maths, code]))
    assert evaluated is None and train["prompt"][5:7] == ["maths 5", "code 0"] and len(train) == 9
    assert train["of_code"][5:7] == [None, 0]  # a column that only the other has
    shares = [{**maths, "fraction": 1}, {**code, "fraction": 3, "columns": ["prompt"]}]
    assert load_datasets(RunArguments("m", datasets=shares))[0]["prompt"] == [
        "maths 0",
        *(f"code {i}" for i in range(3)),
    ]
    for entries, message in [
        ([maths, {"fraction": 1, **code}], r"datasets\[0\] has fraction=None; give all a number"),
        ([{**maths, "fraction": 0}], "above 0"),
        ([{**maths, "colums": []}], "'colums'.*columns"),
        (["maths"], "a mapping with a path"),
        ([{**maths, "source": "x"}, code], r"datasets\[1\] has no source; give all a source, or none"),
        ([{**maths, "columns": ["answer"]}], "answer"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_datasets(RunArguments("m", datasets=entries))
    with pytest.raises(ConfigError, match="set eval_dataset"):
        load_datasets(RunArguments("m", datasets=[maths], eval_split="test"))
    for flag, value in (("--dataset", "maths.jsonl"), ("--dataset_split", "test")):
        with pytest.raises(ConfigError, match=f"{flag[2:]}='{value}' and datasets are both given"):
            read_run(["--model", "m", "--datasets", json.dumps(maths), flag, value], "train")
    named = [{**maths, "source": "a"}, {**code, "source": "b"}, {**maths, "source": "a"}]
    train, _ = load_datasets(RunArguments("m", datasets=named))
    assert {name: len(rows) for name, rows in train.items()} == {"a": 12, "b": 3}


@pytest.mark.slow
def test_a_run_file_has_sources_their_weights_and_their_rewards(run_file, capsys):
    for name in ("maths", "code"):
        Path(f"{name}.jsonl").write_text('{"prompt": "w2 w3"}\n' * 8)
    datasets = [{"path": f"{name}.jsonl", "source": name} for name in ("maths", "code")]
    rewards = {"maths": ["my_rewards:even", "think_format_reward"], "code": "my_rewards:even"}
    given = {"dataset": ..., "datasets": datasets, "dataset_weights": {"maths": 2, "code": 1}}
    Path("held.jsonl").write_text('{"prompt": "w2 w3", "source": "code"}\n' * 8)
    given["eval_dataset"] = "held.jsonl"
    # A function of two sources has one weight; an evaluation set needs the columns of its sources alone.
    solved = "def solved(completions, answer, **_):\n    return completions\n"
    Path("my_rewards.py").write_text(Path("my_rewards.py").read_text() + solved)
    Path("answers.jsonl").write_text('{"prompt": "w2 w3", "answer": "w1"}\n' * 8)
    path = run_file(
        **{**given, "datasets": [{"path": "answers.jsonl", "source": "maths"}, datasets[1]]},
        rewards={**rewards, "maths": ["my_rewards:even", "my_rewards:solved"]},
        reward_weights=[1.0, 0.5],
    )
    assert main(["doctor", "--config", path, "--no_model"]) == 0
    path = run_file(**given, rewards=rewards)
    assert main(["doctor", "--config", path, "--no_model"]) == 0
    assert main(["train", "--config", path]) == 0
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert {"reward/maths", "reward/code"} & {name for row in rows for name in row}
    capsys.readouterr()
    path = run_file(**given, rewards={"maths": "my_rewards:even", "cod": "my_rewards:even"})
    assert main(["train", "--config", path]) == 2
    assert "has 'cod', no source of train_dataset" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "doctor", "sweep"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_weights": {"maths": 1, "cod": 1}}, "dataset_weights has 'cod', no source"),
        ({"rewards": {"maths": "my_rewards:even"}}, "rewards has 'maths' and lacks 'code'; give each source"),
        ({"rewards": {"math": ["my_rewards:even"], "cod": []}}, "rewards has 'cod', no source"),
        (
            {"rewards": {"maths": ["my_rewards:even"]}, "datasets": ..., "dataset": "rows.jsonl"},
            "rewards by source needs datasets by name",
        ),
    ],
)
def test_unknown_sources_are_named_before_model_and_data_are_read(command, changes, message, run_file, capfd):
    given = {
        "model": "no/such-model",
        "dataset": ...,
        "datasets": [{"path": f"{name}.jsonl", "source": name} for name in ("maths", "code")],
        **({"runs": {"low": {}}} if command == "sweep" else {}),
    }
    assert main([command, "--config", run_file(**{**given, **changes})]) > 0
    assert message in " ".join("".join(capfd.readouterr()).split())


@pytest.mark.slow
def test_a_run_file_names_a_chat_template_which_is_saved_with_the_model(run_file, tiny):
    template = "{% for m in messages %}w3 {{ m['content'] }} {% endfor %}"
    Path("mine.jinja").write_text(template)
    Path("talks.jsonl").write_text('{"prompt": [{"role": "user", "content": "w2"}]}\n' * 8)
    file = run_file(dataset="talks.jsonl", chat_template="mine.jinja", rewards="my_rewards:even")
    assert main(["train", "--config", file]) == 0
    assert AutoTokenizer.from_pretrained("out").chat_template == template
    assert main(["doctor", "--config", file, "--no_model", "--output_dir", "checked"]) == 0
    # A tokenizer that has it, by its directory; and one that has none.
    assert main(["doctor", "--config", file, "--no_model", "--chat_template", "out"]) == 0
    bare = AutoTokenizer.from_pretrained(tiny)
    bare.chat_template = None
    bare.save_pretrained("bare")
    assert main(["doctor", "--config", file, "--no_model", "--chat_template", "bare"]) == 1


def test_a_chat_template_that_is_missing_is_named(run_file, capsys):
    assert main(["train", "--config", run_file(chat_template="nowhere.jinja")]) == 2
    assert "chat_template 'nowhere.jinja' (a file, or the hub id" in capsys.readouterr().err
