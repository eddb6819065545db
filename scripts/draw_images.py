"""Draw the pictures of the documentation: ``python scripts/draw_images.py`` writes ``docs/images/*.svg``."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from statistics import fmean

from recipe_tables import recipe_cells
from record_runs import ADAPTERS, QUICKSTART
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from groupwise.commands.report.run_files import saved_text
from groupwise.reporting.completions import completions_grid
from groupwise.reporting.terminal import LogTable

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
#: Runs of ``benchmarks/learning/run.py``.
CURVES = ROOT / "benchmarks" / "results" / "learning"
LARGE = ' font-size="18" font-weight="600"'

#: Fill colours. Every picture has a white background, so that it reads the same on light and dark pages.
PROMPT, COMPLETION, PADDING, SKIPPED = "#9db8e8", "#f4b183", "#ececec", "#ffffff"
#: Colours of the lines of a plot.
LINES = ("#2f6fd0", "#d0672f", "#3a8f4d")
STAGE, RECORD, INK, FAINT = "#e3ebfa", "#fff2d6", "#1f2933", "#6b7785"
#: Ink of the wordmark on a dark page.
LIGHT_INK = "#f0f3f6"
#: Text for readers who do not see the picture; the pages have it too.
OVERVIEW = (
    "GRPOConfig, then generate_rollouts (transformers, vLLM colocated or as a server), compute_rewards, "
    "compute_advantages and compute_policy_loss (log-probs or fused)"
)


class Picture:
    """An SVG under construction. Coordinates are pixels, y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="system-ui, DejaVu Sans, sans-serif" font-size="14">',
            f"<title>{title}</title>",
            f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *lines: str, **style: str
    ) -> None:
        """Draw a rectangle with centred lines of text; ``style`` are SVG attributes (``_`` for ``-``)."""
        style = {"stroke": INK, **style}
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}"{extra}/>'
        )
        top = y + height / 2 - 9 * (len(lines) - 1)
        for row, line in enumerate(lines):
            bold = ' font-weight="600"' if row == 0 and len(lines) > 1 else ""
            self.text(x + width / 2, top + 18 * row + 5, line, anchor="middle", more=bold)

    def text(
        self, x: float, y: float, line: str, anchor: str = "start", fill: str = INK, more: str = ""
    ) -> None:
        """Write one line; ``y`` is its baseline."""
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}"{more}>{line}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through ``points`` with a tip at its end."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5" '
            'marker-end="url(#tip)"/>'
        )

    def line(self, colour: str, *points: tuple[float, float], width: float = 1) -> None:
        """Draw a line through ``points``."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def pipeline() -> str:
    """Draw the stages of a step, and the record that leaves each of them."""
    picture = Picture(1000, 250, "The stages of an optimizer step and the records between them")
    stages = [
        ("generate_rollouts", "sample G completions", "per prompt", "RolloutBatch", "B rows"),
        ("compute_rewards", "call the reward", "functions", "RewardBatch", "(N, F)"),
        ("compute_advantages", "compare with the", "group", "advantages", "(N,) or (N, T)"),
        ("collate, log-probs", "pad, old and", "reference log-probs", "Experience", "(B, T)"),
        ("compute_policy_loss", "surrogate × token", "weights + β KL", "LossOutput", "scalar"),
    ]
    for number, (verb, first, second, record, shape) in enumerate(stages):
        x = 12 + 198 * number
        picture.box(x, 60, 180, 76, STAGE, verb, first, second)
        picture.box(x + 32, 176, 116, 48, RECORD, record, shape)
        picture.arrow((x + 90, 136), (x + 90, 172))
        if number < len(stages) - 1:
            picture.arrow((x + 148, 200), (x + 186, 200), (x + 186, 98), (x + 196, 98))
    picture.arrow((894, 60), (894, 24), (102, 24), (102, 56))
    picture.text(496, 18, "optimizer step: new weights go to the sampler", anchor="middle", fill=FAINT)
    return picture.svg()


def wordmark(ink: str, *, name: bool = True) -> str:
    """Draw a group of rewards around its mean, and the name beside it."""
    width = 330 if name else 80
    bars = [(0, 30, COMPLETION), (1, 14, COMPLETION), (2, -24, PROMPT), (3, -12, PROMPT)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 76" width="{width}" height="76" '
        'role="img">',
        "<title>groupwise</title>",
    ]
    for number, height, fill in bars:
        y = 38 - max(height, 0)
        parts.append(
            f'<rect x="{8 + 17 * number}" y="{y}" width="12" height="{abs(height)}" rx="2" fill="{fill}"/>'
        )
    parts += [
        f'<line x1="2" y1="38" x2="78" y2="38" stroke="{ink}" stroke-width="2.5" stroke-linecap="round"/>',
    ]
    if name:
        parts.append(
            f'<text x="92" y="52" fill="{ink}" font-family="system-ui, DejaVu Sans, sans-serif" '
            'font-size="44" font-weight="600" letter-spacing="-1" textLength="230">groupwise</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def overview() -> str:
    """Draw the way of a run: configuration, the four verbs, and what the configuration chooses in them."""
    picture = Picture(1000, 210, OVERVIEW)
    picture.box(8, 40, 130, 56, RECORD, "GRPOConfig", "config/")
    verbs = [
        (
            "generate_rollouts",
            "mixins/rollout.py",
            ("generation/decoding.py", "…/vllm/colocate.py", "…/vllm/server.py", "agents/"),
        ),
        ("compute_rewards", "mixins/reward.py", ("rewards/runtime/", "rewards/, your functions")),
        ("compute_advantages", "mixins/advantage.py", ("core/advantages.py",)),
        (
            "compute_policy_loss",
            "mixins/loss.py",
            ("log-probs: mixins/logprob.py", "core/objectives.py", "or fused: policy/liger.py"),
        ),
    ]
    for number, (verb, file, choices) in enumerate(verbs):
        x = 172 + 210 * number
        picture.arrow((x - 34 if number == 0 else x - 28, 68), (x - 4, 68))
        picture.box(x, 40, 182, 56, STAGE, verb, file)
        for line, choice in enumerate(choices):
            picture.text(x + 91, 120 + 20 * line, choice, anchor="middle", fill=FAINT)
    picture.arrow((893, 40), (893, 22), (263, 22), (263, 36))
    picture.text(578, 16, "trainer.py: one optimizer step", anchor="middle", fill=FAINT)
    return picture.svg()


def shared_prefix() -> str:
    """Draw the model's input for one group of four completions in the three layouts."""
    picture = Picture(
        860, 350, "One group of four completions in the layouts padded, packed and shared_prefix"
    )
    lengths, prompt, scale = (90, 40, 150, 60), 110, 1.0
    picture.text(20, 30, "padded: (B, L + T), every row as long as the longest", more=' font-weight="600"')
    for row, length in enumerate(lengths):
        y = 42 + 26 * row
        picture.box(20, y, prompt, 20, PROMPT, "prompt")
        picture.box(20 + prompt, y, length * scale, 20, COMPLETION, f"{row + 1}")
        if length < max(lengths):
            width = max(lengths) - length
            picture.box(20 + prompt + length, y, width, 20, PADDING, "padding" if width > 55 else "")
    picture.text(20, 180, "packed: (1, S), no padding", more=' font-weight="600"')
    x = 20.0
    for row, length in enumerate(lengths):
        picture.box(x, 192, prompt, 20, PROMPT, "prompt")
        picture.box(x + prompt, 192, length, 20, COMPLETION, f"{row + 1}")
        x += prompt + length
    picture.text(20, 248, "shared_prefix: (1, S), the prompt is computed once", more=' font-weight="600"')
    picture.box(20, 260, prompt, 20, PROMPT, "prompt")
    x = 20.0 + prompt
    for row, length in enumerate(lengths):
        picture.box(x, 260, length, 20, COMPLETION, f"{row + 1}")
        picture.arrow(
            (x + length / 2, 280),
            (x + length / 2, 294 + 8 * row),
            (60 + 14 * row, 294 + 8 * row),
            (60 + 14 * row, 283),
        )
        x += length
    picture.text(x + 16, 275, "each completion attends to the prompt and to itself", fill=FAINT)
    picture.text(20, 340, "Tokens: padded 1040, packed 780, shared_prefix 450.", fill=FAINT)
    return picture.svg()


def rebalancing() -> str:
    """Draw the micro-batches of two ranks before and after rebalancing."""
    picture = Picture(860, 300, "An accumulation window of two ranks before and after rebalancing")
    before = {0: [[(130, 1), (40, 0)], [(60, 0), (50, 0)]], 1: [[(120, 1), (110, 1)], [(90, 1), (30, 1)]]}
    after = {0: [[(130, 1), (110, 0)]], 1: [[(120, 1), (90, 1), (30, 1)]]}
    picture.text(
        20, 30, "Before: two micro-batches per rank, in the order of generation", more=' font-weight="600"'
    )
    picture.text(20, 176, "After: one micro-batch per rank, about equal cost", more=' font-weight="600"')
    for top, window in ((44, before), (188, after)):
        for rank, batches in window.items():
            y, x = top + 44 * rank, 90.0
            picture.text(20, y + 20, f"rank {rank}")
            for batch in batches:
                width = sum(length for length, _ in batch)
                picture.box(x - 4, y - 2, width + 8 + 4 * (len(batch) - 1), 34, "#ffffff", stroke=FAINT)
                for length, kept in batch:
                    moved = window is after and length == 110
                    fill = COMPLETION if kept or moved else PADDING
                    dash = {} if kept or moved else {"stroke_dasharray": "4 3"}
                    picture.box(x, y + 4, length, 22, fill, str(length), **dash)
                    x += length + 4
                x += 24
    picture.arrow((268, 126), (268, 148))
    picture.text(280, 144, "110 moves to rank 0", fill=FAINT)
    picture.box(520, 50, 40, 22, PADDING, stroke_dasharray="4 3")
    picture.text(570, 66, "zero advantage: no gradient, dropped")
    picture.box(520, 84, 40, 22, COMPLETION)
    picture.text(570, 100, "row that is computed (number of tokens)")
    picture.text(
        20,
        284,
        "Token weights are fixed before rows move, so the gradient of the window is the same.",
        fill=FAINT,
    )
    return picture.svg()


def staleness() -> str:
    """Draw server and trainer over time, without and with one batch generated ahead."""
    picture = Picture(860, 330, "Generation and training over time with rollout_staleness 0 and 1")
    generate, train = 130, 110
    for top, ahead in ((30, 0), (180, 1)):
        note = (
            "exactly on-policy; one of the two waits"
            if not ahead
            else "batch k + 1 is generated while k is trained"
        )
        picture.text(20, top, f"rollout_staleness={ahead}: {note}", more=' font-weight="600"')
        picture.text(20, top + 34, "server")
        picture.text(20, top + 80, "trainer")
        server = trainer = 90.0
        ends: list[float] = []
        for batch in range(3 if not ahead else 4):
            if not ahead and batch:
                server = trainer
            if ahead and batch > 1:
                server = max(server, ends[batch - 2])  # waits for the weights of the step before the last
            picture.box(server, top + 16, generate, 28, PROMPT, f"generate {batch}")
            server += generate
            trainer = max(trainer, server)
            picture.box(trainer, top + 62, train, 28, COMPLETION, f"train {batch}")
            trainer += train
            ends.append(trainer)
            server += 4
            trainer += 4
    picture.text(
        20,
        310,
        "With k batches ahead, a batch is trained by weights up to k steps newer than those that sampled it.",
        fill=FAINT,
    )
    return picture.svg()


def learning_curve(libraries: dict[str, list[dict[str, list[float]]]]) -> str:
    """Draw the mean reward of each step over processor minutes: the seeds thin, their mean thick.

    Args:
        libraries: runs by library; ``minutes`` and ``reward`` of every step, equally many steps in all runs.
    """
    picture = Picture(760, 420, "Mean reward over processor minutes, groupwise and TRL, three seeds each")
    left, bottom, width, height = 60, 350, 670, 290
    last = max(run["minutes"][-1] for runs in libraries.values() for run in runs)
    num_steps = len(next(iter(libraries.values()))[0]["reward"])
    for percent in (0, 25, 50, 75, 100):
        y = bottom - height * percent / 100
        picture.line("#d9dee5", (left, y), (left + width, y))
        picture.text(left - 10, y + 5, f"{percent} %", anchor="end", fill=FAINT)
    for minutes in range(0, int(last) + 1, 10):
        x = left + width * minutes / last
        picture.line(FAINT, (x, bottom), (x, bottom + 6))
        picture.text(x, bottom + 24, str(minutes), anchor="middle", fill=FAINT)
    picture.text(left + width / 2, bottom + 50, "processor minutes", anchor="middle", more=LARGE)
    picture.text(left, 24, f"accuracy in the training batch, {num_steps} steps", more=LARGE)

    def draw(
        colour: str, minutes: list[float], rewards: list[float], line_width: float
    ) -> tuple[float, float]:
        points = [
            (left + width * m / last, bottom - height * r) for m, r in zip(minutes, rewards, strict=True)
        ]
        picture.line(colour, *points, width=line_width)
        return points[-1]

    for (library, runs), colour in zip(libraries.items(), LINES, strict=False):
        for run in runs:
            draw(colour, run["minutes"], run["reward"], 0.7)
        # Step by step: the same number of steps has been trained, after different times.
        minutes, rewards = (
            [sum(values) / len(runs) for values in zip(*(run[name] for run in runs), strict=True)]
            for name in ("minutes", "reward")
        )
        x, y = draw(colour, minutes, rewards, 3.5)
        anchor, beside = ("end", x) if x > left + width / 2 else ("start", x + 10)
        picture.text(beside, y - 14, library, anchor, colour, LARGE)
    return picture.svg()


def recorded_curves() -> dict[str, list[dict[str, list[float]]]]:
    """Read the runs of ``benchmarks/learning/run.py`` with the same recipe in both libraries.

    Both are cut to the steps of the shorter one.
    """
    cells = {
        library: [json.loads((CURVES / f"{cell}-{seed}.json").read_text()) for seed in range(3)]
        for library, cell in (("groupwise", "grpo_outcome"), ("TRL 1.16.0", "trl"))
    }
    steps = min(len(cell["step_processor_seconds"]) for runs in cells.values() for cell in runs)
    return {
        library: [
            {
                "minutes": [seconds / 60 for seconds in cell["step_processor_seconds"][:steps]],
                "reward": [log["reward"] for log in cell["history"] if "reward" in log][:steps],
            }
            for cell in runs
        ]
        for library, runs in cells.items()
    }


def reward_curves(title: str, runs: dict[str, list[list[float]]], smoothed: int = 1) -> str:
    """Draw the mean reward of each optimizer step: the seeds thin, their mean thick.

    Args:
        title: heading of the picture.
        runs: rewards of every step, by seed, by the name of the line; seeds have equally many steps.
        smoothed: each point is the mean of this many steps.
    """
    picture = Picture(760, 420, title)
    left, bottom, width, height = 60, 350, 670, 290
    last = max(len(rewards) for seeds in runs.values() for rewards in seeds)
    for percent in (0, 25, 50, 75, 100):
        y = bottom - height * percent / 100
        picture.line("#d9dee5", (left, y), (left + width, y))
        picture.text(left - 10, y + 5, f"{percent} %", anchor="end", fill=FAINT)
    for step in range(0, last + 1, 5 if last < 20 else 10):
        x = left + width * step / last
        picture.line(FAINT, (x, bottom), (x, bottom + 6))
        picture.text(x, bottom + 24, str(step), anchor="middle", fill=FAINT)
    picture.text(left + width / 2, bottom + 50, "optimizer step", anchor="middle", more=LARGE)
    picture.text(left, 24, title, more=LARGE)

    def draw(colour: str, rewards: list[float], line_width: float) -> None:
        windows = [rewards[max(0, step - smoothed) : step] for step in range(1, len(rewards) + 1)]
        points = [
            (left + width * step / last, bottom - height * sum(window) / len(window))
            for step, window in enumerate(windows, 1)
        ]
        picture.line(colour, *points, width=line_width)

    for row, ((name, seeds), colour) in enumerate(zip(runs.items(), LINES, strict=False)):
        for rewards in seeds if len(seeds) > 1 else ():
            draw(colour, rewards, 0.7)
        draw(colour, [sum(values) / len(seeds) for values in zip(*seeds, strict=True)], 3.5)
        y = 62 + 26 * row
        picture.line(colour, (left + 14, y - 6), (left + 44, y - 6), width=3.5)
        picture.text(left + 54, y, name, "start", colour, LARGE)
    return picture.svg()


def recipe_curves() -> str:
    """Draw the recipes of ``docs/recipes.md``, read from the files of the learning benchmark."""
    runs = {
        name: [[log["reward"] for log in cell["history"] if "reward" in log] for cell in cells]
        for name, cells in recipe_cells().items()
    }
    return reward_curves("accuracy in the training batch", runs)


def adapter_curves() -> str:
    """Draw the runs of ``scripts/record_runs.py``: an adapter and all weights."""
    runs: dict[str, list[list[float]]] = {}
    for run in json.loads(ADAPTERS.read_text()):
        runs.setdefault(run["recipe"], []).append(run["reward"])
    return reward_curves("accuracy in the training batch, mean of 5 steps", runs, smoothed=5)


def terminal() -> str:
    """Draw the terminal of a recorded quickstart: lines of its logs, and the completions of one."""
    run = json.loads(QUICKSTART.read_text())
    console = Console(
        record=True, width=118, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    table, seconds = LogTable(), []
    for position, log in enumerate(run["logs"], 1):
        seconds.append(log["step_time"])
        eta = fmean(seconds) * (run["max_steps"] - log["step"])
        line = Text.assemble(*table.lines(log, log["step"], eta, width=118))
        line.rstrip()
        console.print(line, soft_wrap=True)
        if position == len(run["logs"]) // 2 + 1:
            rows = run["completions"]
            columns = {name: [row[name] for row in rows] for name in rows[0]}
            texts = {name: list(map(saved_text, columns[name])) for name in ("prompt", "completion")}
            console.print(completions_grid({**columns, **texts}, f"completions, step {log['step']}"))
    # Without the fonts of another server.
    layout = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    title = f"make quickstart ARGS=--max_steps={run['max_steps']}"
    return console.export_svg(title=title, code_format=layout, unique_id="terminal")


def images() -> dict[Path, str]:
    """Return every picture by its path."""
    drawn = {
        "overview": overview,
        "pipeline": pipeline,
        "shared_prefix": shared_prefix,
        "rebalancing": rebalancing,
        "staleness": staleness,
    }
    pictures = {IMAGES / f"{name}.svg": draw() for name, draw in drawn.items()}
    pictures |= {
        IMAGES / f"wordmark{end}.svg": wordmark(ink) for end, ink in (("", INK), ("_dark", LIGHT_INK))
    }
    pictures[IMAGES / "logo.svg"] = wordmark(LIGHT_INK, name=False)
    pictures[IMAGES / "learning_curve.svg"] = learning_curve(recorded_curves())
    pictures[IMAGES / "recipes.svg"] = recipe_curves()
    pictures[IMAGES / "lora.svg"] = adapter_curves()
    pictures[IMAGES / "terminal.svg"] = terminal()
    return pictures


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for path, text in images().items():
        path.write_text(text)
