"""Run every example for one step with a tiny model, and check the launch configurations."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gsm8k
import pytest
import yaml
from support.tiny_smollm2 import save_tiny_smollm2
from support.workers.launch import IMPORTS, WITH_VLLM, run, run_ranks, without_extras
from transformers import Qwen2Config

from groupwise import GRPOConfig
from groupwise.errors import ConfigError
from groupwise.generation.vllm.serve import check_tensor_parallel

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
#: The scripts' own library, and the run of `make quickstart` (one of its steps has 64 rows).
#: Tests of agents run those that need packages of their own, test_vllm_commands.py the one with a server.
ELSEWHERE = ("agent_as_it_is.py", "environment_server.py", "environment_verifiers.py", "vllm_server.py")
NOT_RUN = {"smollm2.py", "quickstart.py", *ELSEWHERE}
#: Packages that may be missing; an example that needs one has its name in the file name.
OPTIONAL = ("reasoning_gym", "vllm")
SCRIPTS = [path for path in sorted(EXAMPLES.glob("*.py")) if path.name not in NOT_RUN]
DOCUMENTED = [*SCRIPTS, *(EXAMPLES / name for name in ("quickstart.py", *ELSEWHERE))]
#: Line limits; 60 for every other example.
MAX_LINES = {"gsm8k.py": 86, "quickstart.py": 92, "grpo_from_scratch.py": 150, "vlm.py": 66}
#: Modules of groupwise that examples may import: each is described in docs/api.md.
PUBLIC = (
    "groupwise",
    "groupwise.rewards",
    "groupwise.agents",
    "groupwise.agents.libraries",
    "groupwise.core",
    "groupwise.records",
)
CONFIGS = sorted((EXAMPLES / "accelerate").glob("*.yaml"))
LAUNCHED = "distributed.py"
#: Examples that need extras, and Pillow; the others run in a process that cannot import any.
#: That adapters need PEFT alone is tested with the command line.
NEEDS = {"lora.py": IMPORTS, "vlm.py": IMPORTS, "vllm_colocate.py": WITH_VLLM} | {
    path.name: IMPORTS for path in SCRIPTS if "reasoning_gym" in path.stem
}
#: Answers of the model of two layers, which is random for other examples: they have a gradient, or calls of
#: the tool of the example.
ANSWERS = {
    "gsm8k.py": ("#### 7", "#### 600"),
    "environment.py": ("guess(5)", "guess(9)"),
    "environment_reasoning_gym.py": ("submit(12)", "submit(7)"),
    "tools.py": ("price(tea)", "price(honey)"),
}


@pytest.mark.real_model
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(script, smollm2_path, tmp_path):
    for package in OPTIONAL:
        if package in script.stem and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    start, flags = (run_ranks, ["--use_cpu"]) if script.name == LAUNCHED else (run, [])
    if script.name != "vlm.py":  # makes a tiny vision model of its own
        answers = ANSWERS.get(script.name, ())
        flags += ["--model", save_tiny_smollm2(smollm2_path, tmp_path / "tiny", answers)]
    if script.name == "gsm8k.py":
        rows = [{"question": f'Say "#### {n}".', "answer": f"#### {n}"} for n in (7, 600, 12, 5)]
        for split in ("train", "test"):
            (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags += ["--data", tmp_path, "--questions_per_step", 2, "--max_completion_length", 12]
    steps = 3 if script.name == "gsm8k.py" else 1
    arguments = ["--max_steps", steps, "--output_dir", tmp_path / "out", *flags]
    imports = NEEDS.get(script.name, without_extras())
    done = start(script, *arguments, directory=tmp_path, imports=imports)
    shown = done.stdout
    assert done.returncode == 0, shown[-2000:] + done.stderr[-4000:]
    assert ("held-out accuracy" if script.name == "grpo_from_scratch.py" else f"{steps} steps in ") in shown
    if script.name == LAUNCHED:
        assert "trained on 2 processes" in shown
    if script.name == "gsm8k.py":
        logs = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
        norms = [log["grad_norm"] for log in logs if "grad_norm" in log]
        assert len(norms) == 3 and max(norms) > 0
        assert re.search(r"test accuracy: [\d.]+% before, [\d.]+% after 3 steps", shown)
    elif script.name in ANSWERS:
        logs = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
        metrics = next(log for log in map(json.loads, logs) if "tools/call_frequency" in log)
        assert metrics["tools/call_frequency"] > 0.5 and metrics["tools/failure_frequency"] < 0.5


@pytest.mark.representative("the quickstart")
@pytest.mark.slow
@pytest.mark.real_model
def test_the_quickstart_writes_its_accuracies(smollm2_path, tmp_path):
    """One step of a model of two layers."""
    model, file = save_tiny_smollm2(smollm2_path, tmp_path / "tiny", ()), tmp_path / "accuracies.json"
    arguments = ["--model", model, "--max_steps", 1, "--seed", 3, "--json", file, "--output_dir", tmp_path]
    done = run(EXAMPLES / "quickstart.py", *arguments, directory=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    written = json.loads(file.read_text())
    assert (written["settings"]["seed"], written["settings"]["max_steps"]) == (3, 1)
    shown = "held-out accuracy: {before:.1%} before, {after:.1%} after 1 steps, greedy {greedy:.1%}"
    assert shown.format(**written) in done.stdout
    assert done.stdout.splitlines()[-1] == f"curves and completions of the run: {tmp_path / 'report.html'}"
    assert "Completions" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("script", DOCUMENTED, ids=lambda path: path.stem)
def test_examples_are_short_and_have_a_docstring(script):
    text = script.read_text()
    assert len(text.splitlines()) <= MAX_LINES.get(script.name, 60)
    assert text.startswith('"""')


@pytest.mark.parametrize("script", DOCUMENTED, ids=lambda path: path.stem)
def test_examples_take_a_model_and_import_only_public_names(script):
    tree = ast.parse(script.read_text())
    calls = [
        node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")
    ]
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert calls.count("example_parser") == 1 and ("model" in attributes or "model" in strings)
    for module, name in imported(tree):
        assert module.startswith("groupwise.core.") or module in PUBLIC, module
        exported = getattr(importlib.import_module(module), "__all__", [name])
        assert name in exported and not name.startswith("_"), f"{module}.{name}"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("48 / 2 = <<48/2=24>>24 clips in May.\n#### 72", "72"),
        ("#### 1,200", "1200"),
        ("first #### 3, then ####$-4.50", "-4.50"),
        ("The answer is 72.", None),
        ("####", None),
    ],
)
def test_the_answer_of_a_solution_of_gsm8k(text, number):
    assert gsm8k.final_answer(text) == number


def test_answers_of_gsm8k_are_compared_as_numbers():
    logged = {}
    texts = ["#### 72", "#### 72.0", "72", "#### 7"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = gsm8k.correct(chats, ["72"] * 4, lambda name, values: logged.update({name: values}))
    assert rewards == [1.0, 1.0, 0.0, 0.0] and logged == {"answer_parsed": ["72", "72.0", None, "7"]}
    row = gsm8k.chat({"question": "How many?", "answer": "3 + 4 = 7\n#### 7"})
    assert row["solution"] == "7" and row["prompt"][0]["content"].startswith("How many? Reason")


def imported(tree: ast.AST) -> list[tuple[str, str]]:
    """Return (module, name) of everything imported from groupwise."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [
        (n.module, alias.name) for n in froms if n.module.split(".")[0] == "groupwise" for alias in n.names
    ]


def test_the_parser_of_the_examples_converts_the_default_model_only_if_no_model_is_given(monkeypatch):
    import smollm2

    monkeypatch.setattr(smollm2, "local_model", lambda: Path("converted"))
    parser = smollm2.example_parser("", "out", max_steps=7)
    assert vars(parser.parse_args([])) == {"model": "converted", "max_steps": 7, "output_dir": "out"}
    assert parser.parse_args(["--model", "hub/id"]).model == "hub/id"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_accepts_the_configuration(path):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(path))  # raises for unknown top-level keys
    kinds = {"ddp": "MULTI_GPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}
    assert config.distributed_type.value == kinds[path.stem]
    assert config.mixed_precision == "no"  # another value would overrule bf16=False of a run
    flags = {action.dest for action in launch_command_parser()._actions}
    nested = [part for part in yaml.safe_load(path.read_text()).values() if isinstance(part, dict)]
    assert {name for part in nested for name in part} <= flags


#: Fake cluster programs: srun runs the command after its flags, the others record their arguments. The fake
#: trainer waits for the server's record, because the script stops the server when the trainer ends.
PROGRAMS = {
    "scontrol": "if [[ $1 == show ]]; then printf 'node%s\\n' 1 2 3; else echo \"scontrol $*\" >> calls; fi",
    "srun": 'echo "srun $*" >> calls; while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=0 exec "$@"',
    "curl": 'echo "curl $*" >> calls',
    "groupwise": "for _ in {1..200}; do [[ $1 != train ]] || grep -q '^groupwise vllm' calls && break; "
    "sleep 0.1; done\n"
    'echo "groupwise $*" >> calls\n[[ ! -f hang || $1 != train ]] || exec sleep 30',
}


@pytest.fixture
def slurm_job(tmp_path, monkeypatch):
    """Start the job with fake programs: job(servers) -> process and the file of the calls."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run.yaml").write_text('model: m\noutput_dir: "out"  # shared\n')
    script = EXAMPLES / "slurm" / "train_with_vllm.sh"
    assert os.access(script, os.X_OK)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)
    text = script.read_text()
    assert text.count("\nSERVERS=1\n") == 1

    def job(servers=1):
        (tmp_path / "job.sh").write_text(text.replace("\nSERVERS=1\n", f"\nSERVERS={servers}\n"))
        command = ["bash", "job.sh", "run.yaml"]
        return subprocess.Popen(command, cwd=tmp_path, text=True, stderr=subprocess.PIPE), tmp_path / "calls"

    return job


@pytest.mark.parametrize("servers", [1, 2])
def test_the_slurm_job_serves_on_the_last_nodes_and_trains_on_the_others(slurm_job, servers):
    process, file = slurm_job(servers)
    assert process.wait(timeout=60) == 0
    calls = file.read_text().splitlines()
    (serving,) = [call for call in calls if call.startswith("srun") and "vllm-serve" in call]
    (training,) = [call for call in calls if call.startswith("srun") and "groupwise train" in call]
    nodes, trainers = ["node1", "node2", "node3"], 3 - servers
    assert f"--nodes={servers} --ntasks={servers} --nodelist={','.join(nodes[trainers:])} " in serving
    assert f"--nodes={trainers} --ntasks={trainers} --nodelist={','.join(nodes[:trainers])} " in training
    (launched,) = [call for call in calls if call.startswith("groupwise train")]
    launch, _, settings = launched.partition(" --config run.yaml ")
    assert f"--num_machines {trainers} --num_processes {trainers * 8} --machine_rank 0" in launch
    assert "--accelerate_config zero3" in launch and "--main_process_ip node1" in launch
    assert settings.endswith(",".join(f"http://{node}:8000" for node in nodes[trainers:]))
    names = re.findall(r"--(\w+)", settings)
    assert names == ["use_vllm", "vllm_mode", "vllm_server_base_url"]
    asked = [call.split("/")[2] for call in calls if call.startswith("curl")]
    assert asked == [f"{node}:8000" for node in nodes[trainers:]]
    assert set(names) <= set(GRPOConfig.__dataclass_fields__)
    served = "groupwise vllm-serve --config run.yaml --host 0.0.0.0 --port 8000"
    assert f"{served} --tensor_parallel_size 4 --data_parallel_size 2" in calls
    qwen = Qwen2Config(num_attention_heads=28, num_key_value_heads=4)  # the model of the page
    check_tensor_parallel(qwen, 4, "--tensor_parallel_size")
    with pytest.raises(ConfigError, match="allowed: 1, 2, 4, 28"):
        check_tensor_parallel(qwen, 8, "--tensor_parallel_size")


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_slurm_job_that_starts_again_resumes_from_its_checkpoint(
    slurm_job, tmp_path, monkeypatch, has_checkpoint
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    if has_checkpoint:
        (tmp_path / "out" / "checkpoint-4").mkdir(parents=True)
    process, file = slurm_job()
    assert process.wait(timeout=60) == 0
    assert ("--resume_from_checkpoint true" in file.read_text()) is has_checkpoint


def test_a_slurm_job_is_queued_again_before_its_time_ends(slurm_job, tmp_path):
    (tmp_path / "hang").touch()
    process, file = slurm_job()
    end = time.monotonic() + 60
    while not (file.exists() and "\ngroupwise train" in file.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    process.wait(timeout=20)
    assert file.read_text().splitlines()[-1] == "scontrol requeue 7"


def test_a_slurm_job_without_a_node_to_train_on_ends_at_once(slurm_job):
    process, file = slurm_job(3)
    assert process.wait(timeout=20) == 2 and not file.exists()
    assert "SERVERS=3 leaves none of 3 nodes to train" in process.stderr.read()


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_every_pod_of_the_jobset_trains_and_resumes(slurm_job, tmp_path, monkeypatch, has_checkpoint):
    job = yaml.safe_load((EXAMPLES / "kubernetes" / "jobset.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    serve, replicated = job["spec"]["replicatedJobs"]
    assert job["spec"]["successPolicy"]["targetReplicatedJobs"] == [replicated["name"]]
    pods = replicated["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    assert pods["parallelism"] == pods["completions"] == 2 and pods["completionMode"] == "Indexed"
    assert pods["template"]["spec"]["restartPolicy"] == "Never" and pods["backoffLimit"] == 0
    volumes = {volume["name"] for volume in pods["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    if has_checkpoint:
        (tmp_path / "out" / "checkpoint-4").mkdir(parents=True)
    (server,) = serve["template"]["spec"]["template"]["spec"]["containers"]
    for one in (server, container):
        subprocess.run(one["command"], cwd=tmp_path, check=True, timeout=60)
    served, asked, launched = (tmp_path / "calls").read_text().splitlines()
    address = f"http://{job['metadata']['name']}-{serve['name']}-0-0.{job['metadata']['name']}:8000"
    assert served.startswith("groupwise vllm-serve --config run.yaml --host 0.0.0.0 --port 8000 ")
    assert (
        served.endswith("--tensor_parallel_size 4 --data_parallel_size 2")
        and server["env"] == container["env"]
    )
    assert asked == f"curl -sf {address}/health"
    assert launched.partition(" --use_vllm true --vllm_mode server --vllm_server_base_url ")[2] == address
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--num_machines 2 --machine_rank 1 --num_processes {2 * gpus} " in launched
    first = f"{job['metadata']['name']}-{replicated['name']}-0-0.{job['metadata']['name']}"
    assert f"--main_process_ip {first} " in launched
    assert ("--resume_from_checkpoint true" in launched) is has_checkpoint


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_the_last_node_of_the_skypilot_job_serves_and_the_others_train(
    slurm_job, tmp_path, monkeypatch, has_checkpoint
):
    job = yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text())
    ((place, _),) = job["volumes"].items()
    gpus, nodes = int(job["resources"]["accelerators"].partition(":")[2]), job["num_nodes"]
    for name, value in {
        **{"NUM_NODES": nodes, "NODE_RANK": 1, "NUM_GPUS_PER_NODE": gpus, "TASK_ID": "7"},
        "NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
    }.items():
        monkeypatch.setenv(f"SKYPILOT_{name}", str(value))
    if has_checkpoint:
        (tmp_path / "out" / "checkpoint-4").mkdir(parents=True)
    assert job["run"].count(f"cd {place}\n") == 1 and "VLLM_API_KEY" in job["envs"]
    command = ["bash", "-c", job["run"].replace(f"cd {place}\n", f"cd {tmp_path}\n")]
    trainer = (tmp_path / "groupwise").read_text()
    (tmp_path / "groupwise").write_text('#!/usr/bin/env bash\necho "groupwise $*" >> calls; exec sleep 60\n')
    server = subprocess.Popen(command, env={**os.environ, "SKYPILOT_NODE_RANK": str(nodes - 1)})
    end = time.monotonic() + 60
    while not (tmp_path / "calls").exists() and time.monotonic() < end:
        time.sleep(0.05)
    (tmp_path / "groupwise").write_text(trainer)
    subprocess.run(command, check=True, timeout=60)
    assert server.wait(timeout=30) == 0  # it stops when the trainers have
    served, asked, launched = (tmp_path / "calls").read_text().splitlines()
    assert served.endswith(f"--tensor_parallel_size 4 --data_parallel_size {gpus // 4}")
    assert asked == "curl -sf http://10.0.0.3:8000/health"
    assert launched.endswith("--vllm_mode server --vllm_server_base_url http://10.0.0.3:8000")
    assert f"--num_machines {nodes - 1} --machine_rank 1 --num_processes {(nodes - 1) * gpus} " in launched
    assert "--main_process_ip 10.0.0.1 " in launched
    assert ("--resume_from_checkpoint true" in launched) is has_checkpoint


@pytest.mark.slow
def test_the_sweep_of_the_examples_is_trained(smollm2_path, tmp_path, monkeypatch, capsys):
    from groupwise.commands.cli import main

    model = save_tiny_smollm2(smollm2_path, tmp_path / "model")
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    flags = ["--model", str(model), "--max_steps", "1", "--use_cpu", "--bf16", "false"]
    assert main(["sweep", "--config", "sweep.yaml", "--output_dir", str(tmp_path / "out"), *flags]) == 0
    assert {path.parent.name for path in tmp_path.glob("out/*/adapter_model.safetensors")} == {
        *("base", "fast", "near", "hot")
    }
