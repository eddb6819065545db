"""Record the runs that the documentation shows, with SmolLM2-135M-Instruct on a CPU.

    OMP_NUM_THREADS=1 PYTHONPATH=src:examples python scripts/record_runs.py adapters --seeds 0
    OMP_NUM_THREADS=1 PYTHONPATH=src:examples python scripts/record_runs.py first --seeds 0 1 2 --names README
    python scripts/record_runs.py installation --directory /tmp/fresh
    PYTHONPATH=src python scripts/record_runs.py quickstart --directory build
    PYTHONPATH=src python scripts/record_runs.py accuracies --seeds 0 1 2
    PYTHONPATH=src:examples python scripts/record_runs.py notebook
    OMP_NUM_THREADS=1 PYTHONPATH=src python scripts/record_runs.py sources

``adapters`` trains the task of ``examples/quickstart.py`` with an adapter and with all weights;
``first`` runs the first block of pages, and ``examples/vlm.py``, and keeps what they print, their rewards,
and a completion of the first and of the last step;
``installation`` clones this repository, makes the environment of the quickstart, and keeps time and size;
``quickstart`` runs ``examples/quickstart.py`` and keeps its time, memory and disk, its logs, completions of
one log, and a picture of its report (with Chromium); ``accuracies`` runs it with every seed, sampling with
transformers and with vLLM; ``notebook`` executes the notebook of ``examples/`` and keeps its outputs in it
(with nbclient and ipykernel); ``sources`` trains a random model on a
mixture and draws the charts by source of its report (with Chromium). The others write to
``benchmarks/results/``; ``scripts/draw_images.py`` and ``scripts/generate_docs.py`` read the files.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ADAPTERS, FIRST = RESULTS / "adapters.json", RESULTS / "first_runs.json"
INSTALLATION = RESULTS / "installation.json"
QUICKSTART, ACCURACIES = RESULTS / "quickstart.json", RESULTS / "quickstart_accuracies.json"
NOTEBOOK = ROOT / "examples" / "notebooks" / "grpo_in_30_minutes.ipynb"
REPORT = ROOT / "docs" / "images" / "report.png"
SOURCES = ROOT / "docs" / "images" / "sources.png"
#: Pages whose first block is a run that learns; the page of images shows that of an example.
FIRST_PAGES = {
    "README": ROOT / "README.md",
    **{name: ROOT / "docs" / f"{name}.md" for name in ("getting_started", "lora", "agents")},
    "vlm": ROOT / "examples" / "vlm.py",
}
#: Arguments of a model in a block; with tools SmolLM2 needs another chat template.
MODEL_ARGUMENT = re.compile(r'(?P<name>model=)?"(?:HuggingFaceTB/SmolLM2-135M-Instruct|Qwen/[\w.-]+)"')
STEPS = 40
#: Settings beside those that both share.
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"learning_rate": 1e-5},
    "lora": {"learning_rate": 5e-4},
}
#: Arguments of the adapter.
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


def conditions() -> dict[str, str]:
    """Return commit, versions and processor."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    )
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")}
    processor = platform.machine()
    if Path("/proc/cpuinfo").exists():
        text = Path("/proc/cpuinfo").read_text()
        processor = next(line.partition(": ")[2] for line in text.splitlines() if "model name" in line)
        processor += ", " + ("AVX-512" if " avx512f" in text else "AVX2" if " avx2" in text else "no AVX2")
    return {
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        **versions,
        "processor": processor,
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def record_adapters(seeds: list[int], names: list[str]) -> None:
    """Train all weights and an adapter with every seed that the file lacks."""
    runs = json.loads(ADAPTERS.read_text()) if ADAPTERS.exists() else []
    for seed in seeds:
        for name in names:
            if not any((run["recipe"], run["seed"]) == (name, seed) for run in runs):
                runs.append(train_once(name, seed))
                ADAPTERS.write_text(json.dumps(runs, indent=1) + "\n")
                print(name, seed, runs[-1]["processor_seconds"], runs[-1]["accuracy"], flush=True)


def train_once(name: str, seed: int) -> dict[str, Any]:
    """Train and evaluate the held-out reviews."""
    import quickstart
    import smollm2
    from peft import LoraConfig

    from groupwise import GRPOConfig, GRPOTrainer

    started = conditions()  # of the sources that are imported; a run takes minutes
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=str(smollm2.local_model()),
            reward_funcs=quickstart.correct,
            args=GRPOConfig(
                output,
                seed=seed,
                max_steps=STEPS,
                per_device_train_batch_size=64,
                max_completion_length=8,
                per_device_eval_batch_size=100,
                num_generations_eval=1,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                **SETTINGS[name],
            ),
            train_dataset=quickstart.reviews(8 * STEPS, seed, words=slice(12)),
            eval_dataset=quickstart.reviews(200, seed=-1, words=slice(12, None)),
            peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if name == "lora" else None,
        )
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        accuracy = trainer.evaluate()["eval_rewards/correct/mean"]
    logs = [log for log in trainer.state.log_history if "reward" in log]
    return {
        "recipe": name,
        "seed": seed,
        "settings": SETTINGS[name],
        "trainable_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "reward": [round(log["reward"], 4) for log in logs],
        "processor_seconds": round(seconds, 1),
        "accuracy": accuracy,
        "conditions": started,
    }


def record_first(seeds: list[int], names: list[str]) -> None:
    """Run what the pages show, with every seed that the file lacks."""
    runs = json.loads(FIRST.read_text()) if FIRST.exists() else []
    for name in names:
        for seed in seeds:
            if not any((run["page"], run["seed"]) == (name, seed) for run in runs):
                runs.append(run_first(name, seed))
                FIRST.write_text(json.dumps(runs, indent=1) + "\n")
                print(name, seed, runs[-1]["seconds"], runs[-1]["reward"], flush=True)


def run_first(name: str, seed: int) -> dict[str, Any]:
    """Run the first block of a page with the model of the package index and this seed."""
    import pandas
    import smollm2

    code = FIRST_PAGES[name].read_text()
    if name != "vlm":
        code = re.findall(r"```python\n(.*?)```", code, flags=re.DOTALL)[0]
        model = repr(str(smollm2.local_model()))
        if name == "agents":  # SmolLM2's own chat template has no tools
            code = f"from smollm2 import tool_tokenizer\n{code}"
            model += f', processing_class=tool_tokenizer({model}, "item")'
        code, replaced = MODEL_ARGUMENT.subn(lambda found: (found["name"] or "") + model, code)
        assert replaced == 1, name
    code, seeded = re.subn(r'(GRPOConfig\(\s*(?:"[\w-]+"|options\.output_dir),)', rf"\1 seed={seed},", code)
    assert seeded == 1, name
    started = conditions()
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples")])
        environment = {**os.environ, "CI": "1", "COLUMNS": "118", "PYTHONPATH": paths}
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        (metrics,) = Path(folder).glob("*/metrics.jsonl")
        logs = [log for log in map(json.loads, metrics.read_text().splitlines()) if "reward" in log]
        tables = [pandas.read_parquet(path) for path in sorted(metrics.parent.glob("completions/*.parquet"))]
        completions = []
        if tables:
            table = pandas.concat(tables)
            ends = [table[table.step == step] for step in (table.step.min(), table.step.max())]
            completions = [json.loads(rows.head(1).to_json(orient="records"))[0] for rows in ends]
    return {
        "page": name,
        "seed": seed,
        "lines": [line.rstrip() for line in done.stdout.splitlines() if re.match(r" +(step|\d+) ", line)],
        "reward": [round(log["reward"], 4) for log in logs],
        "seconds": round(seconds, 1),
        "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "completions": completions,
        "conditions": started,
    }


def record_installation(directory: Path | None) -> None:
    """Clone the repository and make the environment of the quickstart, as its first lines of README do."""
    with tempfile.TemporaryDirectory() as folder:
        clone = (directory or Path(folder)) / "groupwise"
        started, start = {**conditions(), "load": os.getloadavg()[0]}, time.perf_counter()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(["make", ".venv/quickstart"], cwd=clone, env=environment, check=True)
        seconds = round(time.perf_counter() - start, 1)
        record = {"seconds": seconds, "bytes": bytes_of(clone / ".venv"), "conditions": started}
        INSTALLATION.write_text(json.dumps(record, indent=1) + "\n")
        print(record)


def bytes_of(directory: Path) -> int:
    """Return the disk space of all files below a directory; links are not followed."""
    files = {(stat.st_ino, stat.st_blocks * 512) for path in directory.rglob("*") if (stat := path.lstat())}
    return sum(size for _, size in files)


def record_quickstart(directory: Path | None, steps: int = STEPS // 2) -> None:
    """Run half of the quickstart; keep its logs, completions of one log, and a picture of its report.

    The machine need not be idle for longer than three minutes.
    A run that ``directory`` contains already is not repeated: only its file and the picture are made again.
    """
    import pandas

    with tempfile.TemporaryDirectory() as folder:
        output = (directory or Path(folder)) / "quickstart-output"
        measured = output / "measured.json"
        if not measured.exists():
            started = {**conditions(), "load": os.getloadavg()[0]}  # processes that ran in the minute before
            command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--output_dir", str(output)]
            start = time.perf_counter()
            subprocess.run([*command, "--max_steps", str(steps)], check=True, env={**os.environ, "CI": "1"})
            cost = {
                "seconds": round(time.perf_counter() - start, 1),
                "peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
                "output_bytes": bytes_of(output),
            }
            measured.write_text(json.dumps({"max_steps": steps, "conditions": started, **cost}))
        lines = (output / "metrics.jsonl").read_text().splitlines()
        logs = [log for log in map(json.loads, lines) if "reward" in log]
        path = sorted((output / "completions").glob("*.parquet"))[len(logs) // 2]
        rows = json.loads(pandas.read_parquet(path).to_json(orient="records"))
        record = {
            **json.loads(measured.read_text()),
            "sentence": picture(output),
            "logs": [
                {key: round(v, 4) if isinstance(v, float) else v for key, v in log.items()} for log in logs
            ],
            "completions": rows[:: len(rows) // 2],
        }
        QUICKSTART.write_text(json.dumps(record, indent=1) + "\n")


def picture(output: Path) -> str:
    """Draw the beginning of the report of a run, as a browser shows it, and return its first sentence.

    The picture has the sentence as its description too, which a test reads.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    from groupwise import write_report

    browser = shutil.which("chromium")
    assert browser, "the picture of the report needs chromium"
    page = f"file://{write_report([output]).resolve()}"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,1100"]
    subprocess.run([browser, *options, f"--screenshot={REPORT}", page], check=True)
    shown = subprocess.run(
        [browser, *options, "--dump-dom", page], check=True, capture_output=True, text=True
    )
    text = re.sub(r"<(script|style)\b.*?</\1>|<[^>]+>", "", shown.stdout, flags=re.DOTALL)
    (sentence,) = re.findall(r"Held-out reward \w+ .*? minutes\)", text)
    described = PngInfo()
    described.add_text("Description", sentence)
    Image.open(REPORT).convert("RGB").quantize(128).save(REPORT, optimize=True, pnginfo=described)
    return str(sentence)


def word_model() -> tuple[Any, Any]:
    """Return a random two-layer model and its tokenizer, whose tokens are 28 words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = ["<pad>", "<end>", *(f"w{number}" for number in range(28))]
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "padding_side": "left"}
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), **sizes, **ends))
    return model, PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def record_sources(steps: int = 120) -> None:
    """Train on a mixture of two sources, and draw the charts of its report that have a line for each."""
    from PIL import Image

    from groupwise import GRPOConfig, GRPOTrainer, write_report

    def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip() == word) for text, word in zip(completions, answer, strict=True)]

    pairs = [(f"w{(last * 5 + shift * 3) % 28}", f"w{last}") for last in range(28) for shift in range(4)]
    words = [{"prompt": f"w{number}", "answer": f"w{number}"} for number in range(28)]
    model, tokenizer = word_model()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder,
            max_steps=steps,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            num_generations=16,
            per_device_train_batch_size=128,
            max_completion_length=1,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataset_weights={"one word": 1, "two words": 2},
        )
        mixture = {
            "one word": words,
            "two words": [{"prompt": f"{one} {two}", "answer": two} for one, two in pairs],
        }
        GRPOTrainer(model, correct, config, mixture, processing_class=tokenizer).train()
        page = f"file://{write_report([folder]).resolve()}"
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,3000"]
        subprocess.run(["chromium", *options, f"--screenshot={SOURCES}", page], check=True)
        part = Image.open(SOURCES).convert("RGB").crop((0, 1800, 1000, 2750))  # the section "By source"
        part.quantize(64).save(SOURCES, optimize=True)


def record_accuracies(seeds: list[int]) -> None:
    """Run the quickstart with every seed and sampler that the file lacks; keep the held-out accuracies."""
    runs = json.loads(ACCURACIES.read_text()) if ACCURACIES.exists() else []
    known = [(run["settings"]["seed"], run["settings"]["use_vllm"]) for run in runs]
    for seed, use_vllm in ((seed, use_vllm) for use_vllm in (False, True) for seed in seeds):
        if (seed, use_vllm) not in known:
            started = conditions()
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--seed", str(seed)]
                command += ["--output_dir", folder, "--json", f"{folder}/accuracies.json"]
                command += ["--use_vllm"] * use_vllm
                subprocess.run(command, check=True, env={**os.environ, "CI": "1"})
                found = json.loads(Path(folder, "accuracies.json").read_text())
            del found["settings"]["output_dir"]
            runs.append({**found, "conditions": started})
            ACCURACIES.write_text(json.dumps(runs, indent=1) + "\n")


def record_notebook() -> None:
    """Execute the notebook with the local copy of its model; keep its outputs, without progress bars."""
    import nbformat
    from nbclient import NotebookClient
    from smollm2 import local_model

    name, local = "HuggingFaceTB/SmolLM2-135M-Instruct", str(local_model())
    notebook = nbformat.reads(NOTEBOOK.read_text().replace(name, local), 4)
    with tempfile.TemporaryDirectory() as directory:
        client = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": directory}})
        client.execute()
    for cell in notebook.cells:
        cell.metadata = {}
        cell.source = cell.source.replace(local, name)
        if cell.cell_type == "code":
            kept = [out for out in cell.outputs if out.get("name") != "stderr"]
            cell.outputs = [out for out in kept if not _is_widget(out)]
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False).replace(local, name) + "\n")


def _is_widget(output: Any) -> bool:
    return "application/vnd.jupyter.widget-view+json" in output.get("data", {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        choices=["adapters", "first", "installation", "quickstart", "accuracies", "notebook", "sources"],
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--names", nargs="+", help="of adapters or of first runs; default: all")
    parser.add_argument("--directory", type=Path, help="for the output of the quickstart; default: temporary")
    options = parser.parse_args()
    if options.what == "adapters":
        record_adapters(options.seeds, options.names or list(SETTINGS))
    elif options.what == "quickstart":
        record_quickstart(options.directory)
    elif options.what == "installation":
        record_installation(options.directory)
    elif options.what == "notebook":
        record_notebook()
    elif options.what == "sources":
        record_sources()
    elif options.what == "accuracies":
        record_accuracies(options.seeds)
    else:
        record_first(options.seeds, options.names or list(FIRST_PAGES))


if __name__ == "__main__":
    main()
