"""Record the runs that the documentation shows, with SmolLM2-135M-Instruct on a CPU.

    OMP_NUM_THREADS=1 PYTHONPATH=src:examples python scripts/record_runs.py adapters --seeds 0
    OMP_NUM_THREADS=1 PYTHONPATH=src:examples python scripts/record_runs.py transcript
    PYTHONPATH=src python scripts/record_runs.py quickstart
    PYTHONPATH=src python scripts/record_runs.py accuracies --seeds 0 1 2

``adapters`` trains the task of ``examples/quickstart.py`` with an adapter and with all weights;
``transcript`` runs ``examples/tools.py`` and keeps the completions of its first and of its last step;
``quickstart`` runs ``examples/quickstart.py`` and keeps its logs, completions of one log, and a picture
of its report (with Chromium); ``accuracies`` runs it with every seed, sampling with transformers and with
vLLM. All write to ``benchmarks/results/``; ``scripts/draw_images.py`` and ``scripts/generate_docs.py`` read
the files.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ADAPTERS, TRANSCRIPT = RESULTS / "adapters.json", RESULTS / "tool_transcript.json"
QUICKSTART, ACCURACIES = RESULTS / "quickstart.json", RESULTS / "quickstart_accuracies.json"
REPORT = ROOT / "docs" / "images" / "report.png"
STEPS = 40
#: Settings beside those that both share.
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"learning_rate": 1e-5},
    "lora": {"learning_rate": 1e-4},
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


def record_transcript(max_steps: int) -> None:
    """Run the example and keep the completions of its first and of its last step."""
    import pandas

    started = conditions()
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, str(ROOT / "examples" / "tools.py"), "--output_dir", output]
        subprocess.run([*command, "--max_steps", str(max_steps)], check=True, capture_output=True, text=True)
        tables = [
            pandas.read_parquet(path) for path in sorted((Path(output) / "completions").glob("*.parquet"))
        ]
    table = pandas.concat(tables)
    found = {"max_steps": max_steps, "conditions": started, "completions": []}
    for step in (int(table.step.min()), int(table.step.max())):
        rows = table[table.step == step]
        found["completions"].append(json.loads(rows.to_json(orient="records")))
    TRANSCRIPT.write_text(json.dumps(found, indent=1) + "\n")


def record_quickstart(steps: int = STEPS) -> None:
    """Run the quickstart; keep its logs, completions of a log in the middle, and a picture of its report."""
    import pandas
    from PIL import Image

    started = conditions()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "quickstart-output"
        command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--output_dir", str(output)]
        subprocess.run([*command, "--max_steps", str(steps)], check=True, env={**os.environ, "CI": "1"})
        lines = (output / "metrics.jsonl").read_text().splitlines()
        logs = [log for log in map(json.loads, lines) if "reward" in log]
        path = sorted((output / "completions").glob("*.parquet"))[len(logs) // 2]
        rows = json.loads(pandas.read_parquet(path).to_json(orient="records"))
        QUICKSTART.write_text(
            json.dumps(
                {
                    "max_steps": steps,
                    "conditions": started,
                    "logs": [
                        {key: round(v, 4) if isinstance(v, float) else v for key, v in log.items()}
                        for log in logs
                    ],
                    "completions": rows[:: len(rows) // 2],
                },
                indent=1,
            )
            + "\n"
        )
        if browser := shutil.which("chromium"):
            page = f"file://{output}/report.html"
            options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1160,1700"]
            subprocess.run([browser, *options, f"--screenshot={REPORT}", page], check=True)
            Image.open(REPORT).convert("RGB").quantize(64).save(REPORT, optimize=True)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["adapters", "transcript", "quickstart", "accuracies"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--names", nargs="+", default=list(SETTINGS))
    parser.add_argument("--max_steps", type=int, default=20)
    options = parser.parse_args()
    if options.what == "adapters":
        record_adapters(options.seeds, options.names)
    elif options.what == "quickstart":
        record_quickstart()
    elif options.what == "accuracies":
        record_accuracies(options.seeds)
    else:
        record_transcript(options.max_steps)


if __name__ == "__main__":
    main()
