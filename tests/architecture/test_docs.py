"""The documentation matches the code: generated tables and pictures, running examples, valid links."""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.workers.launch import run_ranks

from groupwise.commands.cli.launch import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for pattern in ("*.md", "docs/*.md", "benchmarks/*.md") for page in sorted(ROOT.glob(pattern))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```python\n(?P<code>.*?)```", flags=re.DOTALL)
#: Models that blocks train; others are loaded by nothing that runs.
MODELS = re.compile(
    "path/or/hub-id|HuggingFaceTB/SmolLM2-135M-Instruct|HuggingFaceTB/SmolVLM-256M-Instruct|Qwen/Qwen2.5-0.5B-Instruct"
)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.slow
def test_every_registered_name_has_a_row_with_an_equation():
    """In a fresh interpreter: tests register names of their own."""
    code = """
import objective_tables as tables
from groupwise.core.advantages import ADVANTAGES
from groupwise.core.kl import KL_ESTIMATORS
from groupwise.core.objectives import OBJECTIVES
from groupwise.core.weights import NORMALIZERS
assert set(tables.LOSSES) == set(OBJECTIVES)
assert {loss.surrogate.__name__ for loss in OBJECTIVES.values()} == set(tables.SURROGATES)
for registry, equations in (
    (NORMALIZERS, tables.NORMALIZERS), (ADVANTAGES, tables.ADVANTAGES), (KL_ESTIMATORS, tables.KL)
):
    assert set(registry) == set(equations), set(registry) ^ set(equations)
"""
    paths = os.pathsep.join([str(ROOT / "scripts"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr


def test_pictures_are_drawn_by_their_script():
    import draw_images

    stale = [path.name for path, text in draw_images.images().items() if path.read_text() != text]
    assert stale == [], "run python scripts/draw_images.py"


def test_the_first_sentences_about_learning_have_the_figures_of_the_tables():
    introduction, _, rest = (ROOT / "docs" / "learning.md").read_text().partition("\n## What was run\n")
    figures = re.findall(r"\d+\.\d%(?: ± \d+\.\d%)?", introduction)
    assert (
        len(figures) == 4
        and [one for one in figures if f"| {one} |" not in rest and f"+{one}:" not in rest] == []
    )


#: Settings that reduce every run in the documentation to one short step on a CPU.
SMALL = {"max_steps": 1, "max_completion_length": 4, "use_cpu": True, "bf16": False, "report_to": "none"}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Save the random two-layer policy that replaces the models of the pages."""
    from support.runs import policy, tokenizer

    directory = tmp_path_factory.mktemp("documentation")
    policy().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_agent(tmp_path_factory) -> Path:
    """Save a random policy over bytes; the chat template of its tokenizer has tools."""
    from support.fakes.scripted import byte_tokenizer
    from support.runs import policy

    directory, bytes_ = tmp_path_factory.mktemp("agent"), byte_tokenizer()
    ids = {"eos_token_id": bytes_.eos_token_id, "pad_token_id": bytes_.pad_token_id}
    policy(vocab_size=len(bytes_), max_position_embeddings=1024, **ids).save_pretrained(directory)
    bytes_.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory) -> Path:
    """Save a random Idefics 3, the architecture of SmolVLM, and its processor."""
    from support.tiny_vlm import idefics3

    directory = tmp_path_factory.mktemp("vlm")
    for part in idefics3():
        part.save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_code_in_the_documentation_runs(page, tiny_model, tiny_agent, tiny_vlm, tmp_path, monkeypatch):
    """Run the blocks of a page one after the other in one namespace."""
    from groupwise import GRPOConfig, IterativeConfig

    if page.stem == "lora":
        pytest.importorskip("bitsandbytes")
    model = {"agents": tiny_agent, "vlm": tiny_vlm}.get(page.stem, tiny_model)

    monkeypatch.chdir(tmp_path)
    given, loop = GRPOConfig.__init__, IterativeConfig.__init__
    monkeypatch.setattr(GRPOConfig, "__init__", lambda self, *a, **k: given(self, *a, **{**k, **SMALL}))
    monkeypatch.setattr(IterativeConfig, "__init__", lambda self, **k: loop(self, **{**k, "iterations": 1}))
    namespace = {"__name__": "documentation"}
    for number, block in enumerate(BLOCK.finditer(page.read_text()), 1):
        if not block["reason"]:
            code = MODELS.sub(str(model), block["code"])
            exec(compile(code, f"{page.name}, block {number}", "exec", dont_inherit=True), namespace)


@pytest.mark.slow
def test_the_notebook_runs(tiny_model, tmp_path, monkeypatch):
    """Run its cells in one namespace, without a kernel; a cell ends with what the notebook shows."""
    plt = pytest.importorskip("matplotlib.pyplot")
    from groupwise import GRPOConfig

    notebook = json.loads((ROOT / "examples" / "notebooks" / "grpo_in_30_minutes.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert sum("HuggingFaceTB/SmolLM2-135M-Instruct" in cell for cell in cells) == 1
    shown = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    kinds = [kind for out in shown for kind in out.get("data", {})]
    assert kinds.count("image/png") == 2 and kinds.count("text/html") == 3  # curves; tables
    assert not any(out["output_type"] == "error" or "/tmp/" in str(out) for out in shown)
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    given, small = GRPOConfig.__init__, {**SMALL, "max_steps": 2}
    monkeypatch.setattr(GRPOConfig, "__init__", lambda self, *a, **k: given(self, *a, **{**k, **small}))
    namespace = {"__name__": "notebook"}
    for number, cell in enumerate(cells):
        exec(compile(MODELS.sub(str(tiny_model), cell), f"cell {number}", "exec"), namespace)
    assert [log["step"] for log in namespace["slower"].state.log_history if "reward" in log] == [1, 2]
    assert len(namespace["ends"]) == 128  # two steps of 64 completions
    assert (tmp_path / "capitals" / "report.html").is_file()


def test_few_blocks_are_not_run_and_each_gives_a_reason():
    reasons = [block["reason"] for page in WITH_CODE for block in BLOCK.finditer(page.read_text())]
    assert sum(reason is not None for reason in reasons) <= 6
    marks = sum(page.read_text().count("\n<!-- not run") for page in PAGES)
    assert marks == sum(reason is not None for reason in reasons)  # each is right above a block


def shell_commands() -> list[tuple[str, list[str]]]:
    """Return the words of every command in the shell blocks of the pages, without variables in front."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            lines = re.sub(r"\\\n\s*", " ", block).splitlines()
            for command in (part for line in lines for part in re.split(r"&&|;|\|\s", line)):
                words = command.partition(" #")[0].split()
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words and not words[0].startswith("#"):
                    found.append((page.name, words))
    return found


def test_commands_in_the_documentation_exist():
    """Subcommands, targets of make, scripts, and the names of all flags; they are not run."""
    source = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    names, makefile = set(re.findall(r"\w+", source)), (ROOT / "Makefile").read_text()
    commands, wrong = shell_commands(), []
    assert len(commands) > 60
    for page, words in commands:
        program, *rest = words
        flags = [word.partition("=")[0][2:].replace("-", "_") for word in rest if re.match(r"--\w", word)]
        scripts = [ROOT / word for word in words if re.fullmatch(r"(?:\w+/)+\w+\.(?:py|sh|yaml|ipynb)", word)]
        missing = [path.name for path in scripts if not path.exists() and path.parent != ROOT]
        if program == "groupwise":
            missing += [name for name in flags if name not in names]
            missing += [rest[0]] if f'"{rest[0]}"' not in source else []
        elif program == "make":
            targets = [word for word in rest if re.fullmatch(r"[a-z-]+", word)]
            missing += [word for word in targets if not re.search(rf"^{word}:", makefile, flags=re.MULTILINE)]
        elif scripts and scripts[0].suffix == ".py":
            text = "".join(path.read_text() for path in sorted(scripts[0].parent.glob("*.py")))
            missing += [name for name in flags if not re.search(rf"\b{name}\b", text) and name not in names]
        wrong += [f"{page}: {' '.join(words)}: {name}" for name in missing]
    assert wrong == []


def test_run_files_in_the_documentation_are_read(tmp_path):
    from groupwise.commands.cli.run_file import read_run

    text = (ROOT / "docs" / "cli.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "run.yaml").write_text(block)
    run, config = read_run(["--config", str(tmp_path / "run.yaml"), "--use_cpu", "--bf16", "false"], "train")
    assert len(run.rewards) == len(config.reward_weights) == 3
    assert run.rewards[2] == {
        "get_soft_overlong_punishment": {"max_completion_len": 512, "soft_punish_cache": 128}
    }


def test_readme_is_read_in_a_minute(tmp_path):
    from groupwise.commands.cli.run_file import read_run

    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 90
    assert [line for line in re.findall(r"^- .*", text, flags=re.MULTILINE) if len(line.split()) > 20] == []
    code, step = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(code.split("\n\n")) <= 2 and len([line for line in code.splitlines() if line]) <= 12
    assert len(step.splitlines()) <= 10
    page = (ROOT / "docs" / "getting_started.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "run.yaml").write_text(block)
    _, config = read_run(["--config", str(tmp_path / "run.yaml"), "--use_cpu", "--bf16", "false"], "train")
    for name, value in re.findall(
        r"(\w+)=([\w.-]+)[,)]", code.partition('GRPOConfig("')[2].partition("\n")[0]
    ):
        if name != "logging_steps":
            assert getattr(config, name) == yaml.safe_load(value.replace("2e-5", "0.00002")), name


@pytest.mark.slow
def test_the_wrong_reward_of_the_readme_is_found(tiny_model, tmp_path, monkeypatch, capsys):
    from groupwise.commands.cli.doctor import run

    text = (ROOT / "README.md").read_text()
    (wrong,) = re.findall(r"With `(.*?)` as the reward", text)
    (shown,) = re.findall(r"^warn +reward +(correct: .*)$", text, flags=re.MULTILINE)
    code = "\ndef correct(completions, city, **_):\n"
    code += f"    return [float({wrong}) for text, name in zip(completions, city)]\n"
    (tmp_path / "wrong_rewards.py").write_text(code)
    flags = [f"--model={tiny_model}", f"--dataset={ROOT / 'examples' / 'capitals.jsonl'}", "--use_cpu"]
    flags += ["--rewards=wrong_rewards:correct", f"--output_dir={tmp_path / 'out'}", "--bf16=false"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    assert run([*flags, "--per_device_train_batch_size=64", "--max_completion_length=4"]) == 0
    first = capsys.readouterr().out.partition("Change first:\n")[2]
    assert re.sub(r"\(\d\.\d\d s\)", "(0.00 s)", first.splitlines()[0]).endswith(shown)


def test_the_address_of_the_repository_is_that_of_the_package():
    (address,) = re.findall(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    files = [*PAGES, ROOT / "mkdocs.yml", *(ROOT / "examples").rglob("*.ipynb")]
    found = {
        (path.name, name)
        for path in files
        for name in re.findall(r"github(?:\.com)?/([\w-]+)/groupwise\b", path.read_text())
    }
    assert {name for _, name in found} == {address.split("/")[-2]}
    assert {"README.md", "index.md", "install.md", "mkdocs.yml"} <= {path for path, _ in found}


@pytest.mark.parametrize(("name", "num_processes"), [("eight_gpus", 8), ("nodes_agent", 16)])
def test_run_files_for_many_gpus_are_read(name, num_processes, tmp_path, monkeypatch):
    """The first file of the page, and with every file below it laid over the first."""
    from groupwise.commands.cli.run_file import read_run

    text = (ROOT / "docs" / f"{name}.md").read_text()
    first, *others = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    for block in (first, *others):
        settings = {**yaml.safe_load(first), **yaml.safe_load(block)}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
        flags = ["--config", str(tmp_path / "run.yaml"), "--use_cpu", "--bf16", "false"]
        run, config = read_run(flags, "train")
        assert run.model == "Qwen/Qwen2.5-7B-Instruct"
        per_step = config.per_device_train_batch_size * num_processes * config.gradient_accumulation_steps
        assert per_step % config.num_generations == 0
        assert f"{per_step} completions of {per_step // config.num_generations} prompts" in text


@pytest.mark.slow
def test_the_rehearsal_of_several_nodes_runs(tiny_agent, tmp_path):
    """The shell of the page writes its commands; the ranks of each are forked, as accelerate starts them."""
    page = (ROOT / "docs" / "nodes_agent.md").read_text()
    blocks = {kind: re.findall(rf"```{kind}\n(.*?)```", page, flags=re.DOTALL) for kind in ("bash", "python")}
    (tmp_path / "shop.py").write_text(blocks["python"][0])
    (tmp_path / "run.yaml").write_text(re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)[0])
    lines, changes = re.subn(r"trl-internal-testing/\S+", str(tiny_agent), blocks["bash"][0])
    assert changes == 1
    lines = f'groupwise() {{ echo "$*" >> commands; }}\n{lines}'
    subprocess.run(["bash", "-euc", lines], cwd=tmp_path, check=True)
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    for command in (tmp_path / "commands").read_text().splitlines():
        train, launch, others = command.partition(" --accelerate_config ddp --num_processes 2 ")
        assert train == "train --config run.yaml" and launch
        given = ["-m", "groupwise.cli", *train.split(), *others.split()]
        done = run_ranks(*given, directory=tmp_path, environment=environment)
        assert done.returncode == 0, done.stderr[-2000:]
    logs = [json.loads(line) for line in (tmp_path / "rehearsal" / "metrics.jsonl").read_text().splitlines()]
    assert [log["step"] for log in logs if "reward" in log][-1] == 3
    assert any("tools/call_frequency" in log for log in logs)
    assert {"checkpoint-1", "checkpoint-2", "checkpoint-3"} <= {
        path.name for path in (tmp_path / "rehearsal").iterdir()
    }


@pytest.mark.slow
def test_generated_pages_match_the_code():
    import generate_docs

    stale = [path.name for path, text in generate_docs.pages().items() if path.read_text() != text]
    assert stale == [], "run python scripts/generate_docs.py"


def test_comments_of_fields_are_no_headings_of_the_configuration_page():
    """A group is named in a few words; a comment that explains a field is a sentence."""
    from generate_docs import field_groups

    assert "Batches" in field_groups()
    assert [title for title in field_groups() if len(title.split()) > 4 or ";" in title] == []


def test_every_setting_is_on_the_configuration_page():
    from groupwise import GRPOConfig

    text = (ROOT / "docs" / "configuration.md").read_text()
    described = [name for name, setting in GRPOConfig.SETTINGS.items() if setting.description]
    assert "beta" in described and [name for name in described if f"\n`{name}`\n:   " not in text] == []


def test_images_install_what_exists():
    """Not built: a build needs a daemon and a network."""
    cpu, cuda = ((ROOT / name).read_text() for name in ("Dockerfile", "Dockerfile.cuda"))
    (target,) = re.findall(r"^RUN make \.venv/(\w+)$", cpu, flags=re.MULTILINE)
    assert f"\n$(VENV)/{target}: " in (ROOT / "Makefile").read_text()
    (names,) = re.findall(r"'\.\[(.*)\]'", cuda)
    assert set(names.split(",")) < set(extra_names())
    assert "pip install --no-cache-dir -c constraints.txt " in cuda
    (config,) = re.findall(r"--accelerate_config (\w+)", cuda)
    assert config in CONFIGS
    for text in (cpu, cuda):
        assert text.count("\nFROM ") == 1 and text.count("\nCMD [") == 1


def extra_names() -> list[str]:
    # A section of arrays: tomllib starts at Python 3.11.
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    return re.findall(r"^(\w+) = \[", section.partition("\n[")[0], flags=re.MULTILINE)


def test_every_extra_is_on_the_page_of_installation():
    page = (ROOT / "docs" / "install.md").read_text()
    extras = extra_names()
    documented = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?`) \| ", page, flags=re.MULTILINE)))
    assert "peft" in extras and {*documented, "test", "docs"} == {*extras}


def test_differences_from_trl_are_documented():
    """Every default that differs, every old name, and every method of TRL's trainer."""
    trl = pytest.importorskip("trl")
    from groupwise import GRPOConfig

    page = (ROOT / "docs" / "migrating.md").read_text()
    ours, theirs = GRPOConfig.__dataclass_fields__, trl.GRPOConfig.__dataclass_fields__
    old_names = [name for name, setting in GRPOConfig.SETTINGS.items() if setting.renamed_to]
    own = [name for name in GRPOConfig.SETTINGS if name in theirs and name not in old_names]
    changed = [name for name in own if ours[name].default != theirs[name].default]
    hooks = [name for name, value in vars(trl.GRPOTrainer).items() if inspect.isroutine(value)]
    hooks = [name for name in hooks if not name.startswith("__")]
    assert "max_completion_length" in changed and "_calculate_rewards" in hooks
    assert [name for name in [*changed, *old_names, *hooks] if f"`{name}`" not in page] == []


def test_names_on_the_page_of_the_paper_exist():
    page = (ROOT / "docs" / "paper.md").read_text()
    names = re.findall(r"`((?:trainer|commands|core|policy|mixins|data|hf|rewards)\.[\w.]+)`", page)
    assert len(names) > 15
    for name in names:
        pkgutil.resolve_name(f"groupwise.{name}")


def test_links_lead_to_files():
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#]+)", page.read_text())]
    local = [(page, target) for page, target in links if not target.startswith(("http://", "https://"))]
    assert [f"{page.name}: {link}" for page, link in local if not (page.parent / link).exists()] == []


def test_the_version_is_the_same_everywhere():
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"', project, flags=re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    date = citation["date-released"]
    assert citation["version"] == version
    assert f"\n## {version}, {date:%Y-%m-%d}: " in (ROOT / "CHANGELOG.md").read_text()


def test_a_report_of_a_bug_asks_for_a_replay_bundle():
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github").rglob("*.yml")}
    assert {"bug", "feature", "gpu", "config"} == set(forms)
    text = "".join(part["attributes"].get("description", "") for part in forms["bug"]["body"])
    for command in ("groupwise env", "--bundle bug.zip", "groupwise doctor --config run.yaml"):
        assert command in text
