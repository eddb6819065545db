"""Every figure of README, and of its pictures, is that of a file of results, or of the code.

A sentence without an entry here fails, as does an entry whose sentence README does not have.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import reading_list
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
#: Blocks that other tests execute or compare, targets of links, attributes, and numbers that belong to names.
NO_FIGURES = re.compile(
    r"```(?:python|text|diff)\n.*?```|\]\([^)]*\)|\b(?:href|src|srcset|width)=\"[^\"]*\"|`gpu[^`]*`"
    r"|GSM8K|January 2025|SmolLM2-135M|Qwen2\.5-0\.5B|Apache 2\.0|float64|\bbf16|AVX512_BF16|AVX-512"
    r"|OMP_NUM_THREADS=1",
    flags=re.DOTALL,
)


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"


def listed(values: Sequence[float], digits: int = 2) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def found(path: str, pattern: str) -> str:
    """Return what the pattern finds once in a file of the repository."""
    (value,) = re.findall(pattern, (ROOT / path).read_text(), flags=re.MULTILINE)
    return str(value)


def cell(page: str, row: str, column: int) -> str:
    """Return a cell of a table of a page that a script writes from files, which another test compares."""
    lines = {line for line in (ROOT / page).read_text().splitlines() if line.startswith(f"| {row} |")}
    (line,) = [line for line in lines if "| pass" not in line and len(line.split(" | ")) == 8]
    return line.split(" | ")[column].partition("%")[0]


def sentences() -> Iterator[str]:
    """Yield what README says with figures, each computed from where it is recorded."""
    run, installation = results("quickstart.json"), results("installation.json")
    memory = 2 ** math.ceil(math.log2(1.5 * run["peak_bytes"] / 1e9))  # half as much again, of a usual size
    disk = (installation["bytes"] + 2 * run["output_bytes"]) / 1e9  # the model is as large as the output
    rest = (40 - run["max_steps"]) * fmean(log["step_time"] for log in run["logs"])
    minutes = math.floor((run["seconds"] + rest) / 60)
    time = f"{installation['seconds']:.0f} s to install and {minutes} to {minutes + 1} minutes to train"
    yield f"takes 2 cores, {memory} GB of memory, {disk:.1f} GB of disk, {time}"
    yield f"two cores | {minutes} to {minutes + 1} min |"
    python = found("pyproject.toml", r'^requires-python = ">=(.*)"')
    yield f'alt="Python {python} or newer"'
    yield f"of yours, Python {python} or newer"
    versions = (
        r'"transformers>=(.*)"',
        r"^\"\"\"Private symbols of transformers, seen in [\d.]+ to ([\d.]+\d)",
    )
    oldest = found("pyproject.toml", versions[0])
    newest = found("src/groupwise/compat/transformers.py", versions[1])
    yield f"transformers {oldest} to {newest}"
    accuracies = [run for run in results("quickstart_accuracies.json") if not run["settings"]["use_vllm"]]
    before, after = ([100 * run[name] for run in accuracies] for name in ("before", "after"))
    yield f"accuracy {fmean(before):.0f} % before, {fmean(after):.0f} % after"
    yield f"accuracy {listed(before, 1)} → {listed(after, 1)} %"
    for task, page in (("calling a tool", "agents"), ("colours in images", "vlm")):
        runs = [run for run in results("first_runs.json") if run["page"] == page]
        first, last = (listed([run["reward"][index] for run in runs]) for index in (0, -1))
        seconds = spread([run["processor_seconds"] for run in runs])
        model = "a tiny random LLaVA" if page == "vlm" else "-Instruct"
        yield f"| [{task}] | {model} | one core | {seconds} s | reward {first} → {last} |"
    runs = [run for run in results("first_runs.json") if run["page"] == "README"]
    first, last = (listed([run["reward"][index] for run in runs]) for index in (0, -1))
    steps = [line.split()[0] for line in runs[0]["lines"] if line.split()[0] != "step"]
    seconds = spread([run["processor_seconds"] for run in runs])
    yield (
        f"Three seeds: mean reward {first} in steps 1 to {steps[0]} and {last} in the last log of "
        f"{steps[-1]} steps. A run takes {seconds} processor seconds"
    )
    trained = [results(f"learning/grpo_outcome-{seed}.json") for seed in range(3)]
    theirs = [results(f"learning/trl-{seed}.json") for seed in range(3)]
    minutes = spread([run["train_seconds"] / 60 for run in trained])
    start, end = (cell("docs/learning.md", run, 2) for run in ("instruct", "grpo_outcome"))
    yield f"| one core | {minutes} min | accuracy {start} → {end} % |"
    ours, other = (
        fmean(run["step_processor_seconds"][14] / 60 for run in runs) for runs in (trained, theirs)
    )
    yield f"reaches the 15th step in {ours:.0f} minutes, TRL in {other:.0f}"
    scores = re.findall(
        r"^\| (?:GRPO with LoRA|P\w+) \| ([\d.]+) \|", (ROOT / "docs/learning.md").read_text(), re.M
    )
    yield f"others report {spread([float(score) for score in scores])} %"
    default = found("docs/configuration.md", r"^`max_completion_length`\n(?::.*\n)*?.*?\bdefault:? `?(\d+)")
    theirs = found("src/groupwise/compat/trl.py", r'"max_completion_length": (\d+)')
    yield f"`max_completion_length` ({default}, TRL {theirs})"
    recipes = [*(ROOT / "examples" / "papers").glob("*.py")]
    lines = found("tests/examples/test_papers.py", r"num_lines\(recipe\)\) > (\d+)\}")
    yield f"[{len(recipes)}] recipes of at most {lines} lines"
    exponent = found("src/groupwise/commands/replay/bundle.py", r"^LIMIT, \w+ = 10\*\*(\d+),")
    yield f"at most [{10 ** int(exponent) / 1e6:.0f} MB]"
    source = (ROOT / "tests" / "generation" / "test_weight_check.py").read_text()
    (names,) = re.findall(r"^FAULTS = \[(.*?)^\]", source, flags=re.DOTALL | re.MULTILINE)
    times = [int(times or 1) for times in re.findall(r"range\((?:(\d+) \* )?len\(FAULTS\)\)", source)]
    adapters = found("tests/generation/test_weight_check.py", r"for seed in range\((\d+)\)")
    faults = sum(times) * len(re.findall(r"\w+", names)) + int(adapters)
    yield f"find all [{faults}] injected faults"
    counts = [*(each * len(re.findall(r"\w+", names)) for each in times), adapters]
    page = (ROOT / "docs" / "vllm_weights.md").read_text()
    assert f"inject {faults} faults" in page and all(f"{count} " in page for count in counts)
    ratios = results("sweep_generation_float32.json")["sweep_over_alone"]
    yield f"[{ratios['seconds']['ratio']:.2f}] of the time of four separate runs"
    limit = found("benchmarks/gpu.py", r"calls of at most (\d+) minutes")
    yield f"take at most {limit} minutes each"
    for case, words in (("short", "short prompts"), ("long", "one prompt of 480 tokens")):
        record = results(f"step_time_{case}_natural_bf16_zero0.json")
        time, memory = (record["groupwise_over_trl"][name]["ratio"] for name in ("time", "peak_memory"))
        yield f"Step on a CPU, {words} | [{time:.2f} of the time, {memory:.2f} of the memory] | 1 |"
    yield f"at most {record['settings']['new_tokens']} tokens"
    record = results("step_time_short_natural_bf16_zero0_rows8.json")["groupwise_over_trl"]
    time, memory = (record[name]["ratio"] for name in ("time", "peak_memory"))
    yield f"short prompts take {time:.2f} of TRL's time and {memory:.2f}"
    difference = results("learning/same_step.json")["difference_of_updates"]
    yield f"relative difference of [{difference:.1e}]".replace("e-0", "e-")
    version = found("src/groupwise/compat/trl.py", r'^TRL_VERSION = "(.*)"')
    yield f"## Beside TRL {version}"
    yield f"experimental in {version}"
    yield f"The algorithm in {len(reading_list.FILES)} files"


def test_both_pictures_of_the_quickstart_are_of_one_recorded_run_and_the_pages_have_its_figures() -> None:
    """The terminal is drawn from the logs, as another test compares; that of the report has its sentence."""
    run, page = results("quickstart.json"), (ROOT / "docs" / "getting_started.md").read_text()
    described = Image.open(ROOT / "docs" / "images" / "report.png").text["Description"]
    assert described == run["sentence"] and f"in {run['max_steps']} steps" in described
    (minutes,) = re.findall(r"\(([\d.]+) minutes\)", described)
    seconds = [log["step_time"] for log in run["logs"]]
    assert 4 * sum(seconds) / 60 < float(minutes) < run["seconds"] / 60
    assert f"its steps took {min(seconds):.1f} to {max(seconds):.1f} s" in page
    assert f": {minutes} minutes" in (ROOT / "docs" / "report.md").read_text()
    for name in ("getting_started", "report"):  # the command that records both pictures again
        assert "`scripts/record_runs.py quickstart`" in (ROOT / "docs" / f"{name}.md").read_text()


def test_the_memory_on_the_page_of_eight_gpus_is_the_doctor_s() -> None:
    import torch
    import yaml
    from memory_table import SHAPES, make_config
    from transformers import AutoModelForCausalLM

    from groupwise import GRPOConfig
    from groupwise.commands.cli.checks import memory_finding
    from groupwise.commands.cli.launch import CONFIGS

    config = type("GRPOConfig", (GRPOConfig,), {"world_size": 8})("out", use_cpu=True, bf16=True)
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(make_config(*SHAPES["Qwen2.5-7B"]))
    sizes = []
    for name in ("zero3", "fsdp2"):
        text = memory_finding(policy, config, yaml.safe_load(CONFIGS[name].read_text())).text
        sizes.append(text.partition(" GB on each of 8 device(s)")[0])
    row = f"| weights, gradients, AdamW | {sizes[0]} (ZeRO-3), {sizes[1]} (FSDP2) |"
    assert row in (ROOT / "docs" / "eight_gpus.md").read_text()


def test_every_figure_of_readme_is_computed_from_what_was_recorded() -> None:
    text = NO_FIGURES.sub(lambda found: "]" if found[0].startswith("]") else "", README)
    expected = [NO_FIGURES.sub("", sentence) for sentence in sentences()]
    assert [sentence for sentence in expected if text.count(sentence) != 1] == []
    for sentence in expected:
        text = text.replace(sentence, "")
    assert [line for line in text.splitlines() if re.search(r"\d", line)] == []


def test_the_page_of_agents_has_the_recorded_shares_of_waiting() -> None:
    """The summary, and every row of the table, follow from the recorded steps."""
    page, record = (ROOT / "docs" / "agents.md").read_text(), results("later_turns.json")
    assert len(record["rounds"]) == 2 and {len(s) for r in record["rounds"] for s in r["steps"].values()} == {
        6
    }
    names = {"`rollout_staleness=0`": "sequential", "first turns alone ahead": "first_turns"}
    for label, name in (names | {"`rollout_staleness=1`": "ahead"}).items():
        runs = [each["steps"][name] for each in record["rounds"]]
        times = [sum(step["step_time"] for step in run) for run in runs]
        waits = [sum(step["time/generate"] + step["time/idle"] for step in run) for run in runs]
        shares = ", ".join(f"{100 * wait / time:.0f} %" for wait, time in zip(waits, times, strict=True))
        assert f"| {label} | {shares} | {listed([60 * 6 / time for time in times], 1)} |" in page
