"""The doctor reports what would fail, and valid runs pass.

Files: ``commands/cli/checks.py``, ``commands/cli/findings.py``, ``commands/cli/trial.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import runs

from groupwise import GRPOConfig
from groupwise.commands.cli import findings, main, trial
from groupwise.commands.cli.checks import batch_findings, length_findings, tokenizer_findings
from groupwise.commands.cli.trial import step_findings, trial_config
from groupwise.compat import unmet


def config(**changes) -> GRPOConfig:
    settings = {"per_device_train_batch_size": 4, "num_generations": 4, "use_cpu": True, "bf16": False}
    return GRPOConfig("out", **{**settings, **changes})


def texts(findings, status: str) -> list[str]:
    return [finding.text for finding in findings if finding.status == status]


def test_a_valid_run_trains_its_longest_prompts_for_one_step(run_file, capfd, monkeypatch):
    trained: list[Any] = []
    monkeypatch.setattr(
        trial, "step_findings", lambda run: [*(trained.append(run) or ()), *step_findings(run)]
    )
    path = run_file(rewards=["my_rewards:even", "my_rewards:undecided"], max_steps=7, save_strategy="epoch")
    lengths = (2, 1, 8, 2, 5, 2, 2, 2)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": "w1 " * n}) + "\n" for n in lengths))
    assert main(["doctor", "--config", path]) == 0
    assert [len(row["prompt"].split()) for row in trained[0].train_dataset][:3] == [8, 5, 2]
    assert trained[0].state.global_step == 1
    assert trained[0].state.log_history[0]["num_tokens"] >= 4 * (8 + 1)  # one group of the longest prompt
    shown = " ".join(capfd.readouterr().out.split())  # lines are cut to the width of the terminal
    assert "4 completions at a time = 4 per device x 1 process(es) x 1 micro-batch(es)" in shown
    assert "8 prompts, 8 optimizer steps per epoch, 7 in all" in shown
    assert "longest prompt and completion: 14 of 128 positions" in shown
    assert "every constraint holds: learning_rate=1e-06" in shown and "loss_type=dapo" in shown
    assert re.search(r"ok +step +[\d.]+ s: generate [\d.]+, .*; completions of up to 6 of 6 tokens", shown)
    assert re.search(r"ok +memory +[\d.]+ GB were free at the peak", shown)
    assert re.search(r"ok +reward +even: mean [\d.]+, standard deviation [\d.]+ ", shown)
    assert re.search(r"warn +reward +undecided: None for every completion", shown)
    for part in ("none (beta=0)", "decoding: own loop", "layout: shared_prefix", "head: chunked"):
        assert part in shown
    assert shown.rpartition("(none is large enough) ")[2].startswith("0 problem(s)")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_port": 9}, [], "no vLLM server was ready"),
        ({"num_generations": 3}, [], "nearest valid: generation_batch_size 12, or num_generations 2 or 4"),
        (
            {"num_generations": 8},
            ["--num_processes", "3"],
            "generation_batch_size 24, or num_generations 6 or 12",
        ),
        ({"dataset": "none.jsonl"}, [], "no such file"),
        ({"rewards": "my_rewards:evn"}, [], "nearest: 'even'"),
        ({"model": "no/such-model-here"}, [], "no/such-model-here"),
        ({"max_completion_length": 127}, [], "row 0: the prompt has 2 tokens, but a context of 128"),
        (
            {"gradient_accumulation_steps": 9},
            [],
            "train_dataset has 8 prompts, but one generation batch takes 9",
        ),
        ({"dataset": "empty.jsonl"}, [], "train_dataset, row 1: the prompt is empty"),
        ({"rewards": "my_rewards:not_a_number"}, [], "returned nan"),
        ({"router_aux_loss_coef": 0.1}, [], "has no expert router"),
        ({"tools": "my_rewards:untyped"}, ["--no_model"], "tool 'untyped' cannot be described to the model"),
        ({"rewards": ...}, ["--no_model"], "reward_funcs is missing"),
        ({"dataset": "tasks.jsonl"}, ["--no_model"], "no 'prompt' column"),
        (
            {"model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}},
            ["--no_model"],
            "quantized by bitsandbytes to 4 bits and has no adapter",
        ),
        ({"lora": {"target_modules": ["c_attn"]}}, ["--no_model"], "match nothing in LlamaForCausalLM"),
        ({"lora": {"task_type": "SEQ_CLS"}}, ["--no_model"], "a policy is a causal language model"),
    ],
)
def test_problems_are_reported(run_file, capfd, monkeypatch, changes, flags, message):
    monkeypatch.setattr("groupwise.commands.cli.doctor._SERVER_TIMEOUT", 0.5)
    assert main(["doctor", "--config", run_file(**changes), *flags]) == 1
    shown = " ".join(capfd.readouterr().out.split())
    assert message in shown and "fail" in shown


def test_a_server_that_is_not_up_yet_is_not_asked(run_file, capfd):
    path = run_file(use_vllm=True, vllm_mode="server", vllm_server_port=9)
    assert main(["doctor", "--config", path, "--no_model", "--no_server"]) == 0
    assert "was not asked (--no_server)" in " ".join(capfd.readouterr().out.split())


def test_the_memory_of_a_device_is_that_of_the_launch(run_file, capfd, monkeypatch):
    flags = ["--config", run_file(), "--no_model", "--accelerate_config"]
    assert main(["doctor", *flags, "zero3"]) == 0  # its number of processes is 8
    shown = " ".join(capfd.readouterr().out.split())
    assert (
        "on each of 8 device(s), ZeRO-3: weights" in shown and "bf16=False, fp16=False on this cpu" in shown
    )
    assert main(["doctor", *flags, "zero4"]) != 0
    monkeypatch.setattr("groupwise.commands.cli.doctor.shapes_of_policy", lambda *_: 1 / 0)
    assert main(["doctor", *flags, "ddp"]) == 0
    assert "of each device is not computed: division by zero" in " ".join(capfd.readouterr().out.split())


def test_heads_that_do_not_divide_over_the_engine_s_gpus_are_reported(run_file, capfd, monkeypatch):
    monkeypatch.setattr("groupwise.commands.cli.doctor.check_backend", lambda *_, **__: None)  # needs vLLM
    path = run_file(use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=3)
    assert main(["doctor", "--config", path, "--no_model", "--num_processes", "3"]) == 1
    assert "vllm_tensor_parallel_size=3 does not divide" in " ".join(capfd.readouterr().out.split())


def test_the_report_is_json_and_nothing_else_is_on_stdout(run_file, capfd):
    flags = ["--json", "--no_model"]
    assert (
        main(["doctor", "--config", run_file(beta=0.0, ref_model_sync_steps=7, num_generations=3), *flags])
        == 1
    )
    shown = json.loads(capfd.readouterr().out)
    assert shown["failed"] is True and shown["first"] == shown["findings"][:1]
    assert shown["first"][0]["status"] == "fail" and "num_generations 2 or 4" in shown["first"][0]["text"]
    assert main(["doctor", "--config", run_file(rewards=["my_rewards:even"]), "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["failed"] is False and {one["subject"] for one in shown["findings"]} >= {
        "settings",
        "reward",
    }


def test_problems_come_before_warnings_in_what_to_change_first(capsys):
    found = findings.Report()
    found.add(
        [findings.warn("a", "1"), findings.ok("b", "2"), findings.fail("c", "3"), findings.warn("d", "4")]
    )
    found.add([findings.fail("e", "5")])
    assert found.close() == 1
    end = capsys.readouterr().out.partition("Change first:\n")[2]
    assert [line.split() for line in end.splitlines()] == [
        ["fail", "c", "3"],
        ["fail", "e", "5"],
        ["warn", "a", "1"],
    ]


def test_every_wrong_setting_is_a_finding_of_its_own(run_file, capsys):
    wrong = {"learning_rate": -1, "beta": -1, "temperature": 0, "loss_type": "gpro"}
    assert main(["doctor", "--config", run_file(**wrong), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["findings"]) == 4 and len(found["first"]) == 3
    assert {one["text"].split("=")[0] for one in found["findings"]} == wrong.keys()


def test_a_check_that_was_skipped_is_nothing_to_change(run_file, capsys):
    assert main(["doctor", "--config", run_file(lora={"use_dorra": True}), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["text"] for one in found["first"]] == [
        "lora['use_dorra'] is unknown to PEFT; nearest valid: 'use_dora'"
    ]
    assert "skipped" in found["findings"][-1]["text"]


def test_a_refused_sampler_is_one_finding_and_hides_none_of_the_data(run_file, capsys):
    refused = {"generation_kwargs": {"stop_strings": ["w1"]}, "dataset": "empty.jsonl"}
    assert main(["doctor", "--no_model", "--config", run_file(**refused), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [one["subject"] for one in found if one["status"] == "fail"] == ["sampler", "prompts"]
    assert "batches" in {one["subject"] for one in found}


def test_the_number_of_processes_is_positive(run_file, capsys):
    assert main(["doctor", "--config", run_file(), "--num_processes", "0"]) == 2
    assert "--num_processes 0: allowed: 1 or more" in capsys.readouterr().err


def test_a_reward_that_requires_an_absent_column_is_a_problem(run_file, capfd):
    Path("by_solution.py").write_text("def reward(completions, solution, **_):\n    return [1.0]\n")
    assert main(["doctor", "--no_model", "--config", run_file(rewards="by_solution:reward")]) == 1
    assert "'reward' requires 'solution', which is no column of" in " ".join(capfd.readouterr().out.split())


def test_texts_that_were_meant_as_messages_are_a_warning(run_file, capfd):
    line = json.dumps({"prompt": json.dumps([{"role": "user", "content": "w1"}])})
    Path("json.jsonl").write_text(f"{line}\n" * 8)
    assert main(["doctor", "--no_model", "--config", run_file(dataset="json.jsonl")]) == 0
    assert "warn prompts the prompt is a string that looks like a list" in " ".join(
        capfd.readouterr().out.split()
    )


def test_settings_without_effect_are_a_warning(run_file, capfd):
    assert main(["doctor", "--no_model", "--config", run_file(entropy_target=0.3)]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "warn settings entropy_target=0.3 has no effect unless use_adaptive_entropy=True" in shown


def test_rows_of_environments_need_no_prompt(run_file, capfd):
    path = run_file(dataset="tasks.jsonl", environment="my_rewards:Room")
    assert main(["doctor", "--no_model", "--config", path]) == 0
    assert "8 prompts, 8 optimizer steps per epoch" in " ".join(capfd.readouterr().out.split())


def test_constant_rewards_are_a_warning(run_file, capfd):
    assert main(["doctor", "--config", run_file(rewards="my_rewards:constant")]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "constant: mean 1, standard deviation 0 (0.00 s): constant, it gives no gradient" in shown
    assert "frac_reward_zero_std is 1, healthy: 0.1 to 0.7; otherwise: near 1: easier or harder" in shown


def test_without_the_model_nothing_is_trained(run_file, capfd, monkeypatch):
    monkeypatch.setattr(trial, "trial_config", None)
    assert main(["doctor", "--no_model", "--config", run_file()]) == 0
    assert not re.search(r"(ok|warn|fail) +step ", capfd.readouterr().out)


def test_the_arithmetic_of_several_processes(run_file, capfd):
    flags = ["--num_processes", "2", "--no_model"]
    assert main(["doctor", "--config", run_file(steps_per_generation=2, num_iterations=2), *flags]) == 0
    shown = capfd.readouterr().out
    # 4 x 2 x 2 = 16 completions for 4 prompts; 2 micro-batches, each used twice, one per optimizer step.
    assert "16 completions at a time = 4 per device x 2 process(es) x 2 micro-batch(es) = 4 prompt(s)" in (
        " ".join(shown.split())
    )
    assert "a generation batch is used in 4 optimizer steps" in shown
    assert "8 prompts, 8 optimizer steps per epoch" in shown


def test_the_trial_of_any_run_is_one_step_without_side_effects(tmp_path):
    run = config(
        use_vllm=True,
        vllm_mode="server",
        vllm_server_timeout=5.0,
        rollout_staleness=1,
        steps_per_generation=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        per_device_eval_batch_size=4,
        save_steps=7,
        push_to_hub=True,
        log_completions=True,
        max_completion_length=512,
        report_to=["tensorboard"],
    )
    step = trial_config(run, str(tmp_path))
    assert (step.use_vllm, step.push_to_hub, step.log_completions, step.report_to) == (False,) * 3 + ([],)
    assert (step.save_strategy, step.eval_strategy, step.max_steps) == ("no", "no", 1)
    assert (step.generation_batch_size, step.gradient_accumulation_steps) == (16, 2)
    assert (step.loss_type, step.world_size, step.max_completion_length) == (run.loss_type, 1, 512)


def test_the_trial_uses_one_of_several_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOConfig, "n_gpu", 8)
    assert trial_config(config(), str(tmp_path)).n_gpu == 1


def test_the_trial_has_whole_groups_of_a_run_that_splits_them(tmp_path):
    """6 x 2 completions of a process: with groups of 8, two processes have whole groups, 24."""
    processes = {"world_size": property(lambda self: 4)}
    given = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "num_generations": 8}
    run = type("Config", (GRPOConfig,), processes)("out", use_cpu=True, bf16=False, **given)
    step = trial_config(run, str(tmp_path))
    assert (run.generation_batch_size, step.generation_batch_size) == (48, 24)
    assert (step.per_device_train_batch_size, step.gradient_accumulation_steps) == (6, 4)


def test_prompts_that_fill_no_batch_are_named():
    found = list(batch_findings(config(gradient_accumulation_steps=3), prompts=8))
    # 3 prompts a batch: two batches an epoch, two prompts left.
    assert "8 prompts, 2 optimizer steps per epoch, 6 in all (3 epochs)" in found[2].text
    assert found[3].text.startswith("2 prompt(s)")


def test_strings_among_chats_are_a_warning(run_file, capfd):
    path = run_file(dataset="chats.jsonl")
    assert main(["doctor", "--no_model", "--config", path]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "warn prompts some prompts are strings, others messages; write all as messages" in shown


def test_lengths_against_limits():
    lengths = [1] * 10 + [5] * 9 + [90]
    (found,) = length_findings(lengths, config(), None, "20 prompts")
    assert found.text == "tokens of 20 prompts: min 1, median 5, 95% 90, max 90"
    cut = list(length_findings(lengths, config(max_prompt_length=4), 300, "them"))
    assert texts(cut, "warn") == [
        "max_prompt_length=4 truncates 10 of 20 from the left; set it to 90 to keep all whole"
    ]
    assert texts(cut, "ok")[1] == "longest prompt and completion: 260 of 300 positions"


CHAT = [{"role": "user", "content": "w1"}]
CLOSED = (
    "{% for m in messages %}<user> {{ m['content'] }} %s {% endfor %}"
    "{% if add_generation_prompt %}<user> {% endif %}"
)


def test_tokenizers():
    tokenizer = runs.tokenizer()
    assert not texts(tokenizer_findings(tokenizer, [1], "w1", {}), "fail")
    assert "can end; set eos_token" in texts(tokenizer_findings(tokenizer, [], "w1", {}), "fail")[0]
    assert "ends prompts" in texts(tokenizer_findings(tokenizer, [1], "w1 <eos>", {}), "fail")[0]


def test_templates():
    tokenizer = runs.tokenizer()
    tokenizer.chat_template = CLOSED.replace("%s", "<eos>")
    assert not texts(tokenizer_findings(tokenizer, [1], CHAT, {}), "warn")
    tokenizer.chat_template = CLOSED.replace("%s", "w3")
    assert (
        "length limit; make the last token" in texts(tokenizer_findings(tokenizer, [1], CHAT, {}), "warn")[0]
    )
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    assert "no effect" in texts(tokenizer_findings(tokenizer, [1], CHAT, {}), "warn")[0]


def test_the_table_wraps(monkeypatch):
    monkeypatch.setenv("COLUMNS", "51")
    rows = [findings.ok("one", "a b"), findings.warn("two", "word " * 12), findings.fail("three", "x\ny")]
    shown = findings.table(rows)
    assert shown == (
        "ok    one            a b\n"
        "warn  two            word word word word word word\n"
        "                     word word word word word word\n"
        "fail  three          x\n"
        "                     y"
    )
    assert findings.summary(rows) == "1 problem(s), 1 warning(s), 1 fine"


def test_versions_that_transformers_does_not_support_are_named(monkeypatch):
    asked = ["kernels<0.19,>=0.18.2; extra == 'kernels'", "tokenizers<0.24,>=0.23.1", "huggingface-hub>=1.31"]
    installed = {"kernels": "0.17.2", "tokenizers": "0.23.1", "absent": None}
    monkeypatch.setattr("importlib.metadata.requires", lambda _: [*asked, "numpy>=9", "absent>=1"])
    monkeypatch.setattr("importlib.metadata.version", installed.__getitem__)
    assert unmet("transformers", ("kernels", "tokenizers")) == ["kernels<0.19,>=0.18.2 (installed: 0.17.2)"]
