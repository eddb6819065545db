"""Table of architectures in ``docs/models.md``: what ``auto`` selects for each, and how exact it is.

    python scripts/architecture_table.py [NAMES]     # with the installed transformers; writes the table

Every architecture that ``AutoModelForCausalLM`` has is built as a small model of random float32 weights
(``tests/support/architectures.py``), with the default settings of a run, the balancing loss of its experts
included. Layout and head are those after the check of a run. The gradient of a batch of groups is compared
with the sum of the gradients of each completion alone, by the plain forward, without padding; log-probs that
tokens are sampled with are compared with it, too. With NAMES the rows are printed, and nothing is written.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from support.architectures import (  # noqa: E402
    IMAGE,
    VISION,
    alone,
    build_any,
    build_vision,
    completions,
    completions_of_images,
    values_and_gradients,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from groupwise import GRPOConfig  # noqa: E402
from groupwise.errors import BackendError, ConfigError  # noqa: E402
from groupwise.generation.transformers_backend import TransformersBackend  # noqa: E402
from groupwise.policy.layout_choice import make_logprob_computer  # noqa: E402
from groupwise.policy.logprob_mismatch import PlainForwardCheck  # noqa: E402
from groupwise.records import SamplingOptions  # noqa: E402

START, END = "<!-- written by scripts/architecture_table.py -->", "<!-- end of the table -->"
TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NAMES = (*TYPES, *VISION)


class Row(NamedTuple):
    """One architecture. Errors are NaN where there is no such computation; ``refused``: why."""

    name: str
    layout: str = "-"
    head: str = "-"
    decoding: str = "-"
    gradient: float = float("nan")
    sampled: float = float("nan")
    tokens: float = float("nan")
    reasons: str = ""
    refused: str = ""


def prompts_of(batch: Any) -> list[list[int]]:
    pairs = zip(batch.prompt_ids_BL, batch.prompt_mask_BL.bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]


def update_of(model: Any, batch: Any, config: GRPOConfig) -> dict[str, Any]:
    """Return layout, head, relative difference of the gradient and tokens computed of distinct ones."""
    computer = make_logprob_computer(model, config, Accelerator(cpu=True))
    expected = values_and_gradients(model, batch, alone)[2]
    with torch.no_grad():
        computer(model, batch, with_entropy=False)  # the check
    computed: list[int] = []
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda _, given: computed.append(given[0].numel()))
    aux = computer.with_aux_loss
    try:
        given = values_and_gradients(
            model, batch, lambda m, b, _, **kwargs: computer(m, b, with_aux_loss=aux, **kwargs)
        )[2]
    finally:
        hook.remove()
    size = max(float(gradient.abs().max()) for gradient in expected)
    prompts = {tuple(prompt): None for prompt in prompts_of(batch)}
    distinct = sum(map(len, prompts)) + int(batch.completion_mask_BT.sum())
    of_layout, of_head = computer.paths[:2]
    return {
        "layout": of_layout.choice,
        "head": of_head.choice,
        "gradient": max(float((a - b).abs().max()) for a, b in zip(given, expected, strict=True)) / size,
        "tokens": sum(computed) / distinct,
        "reasons": "; ".join(short(path.reason) for path in (of_layout, of_head) if path.reason),
    }


def sampling_of(model: Any, batch: Any, config: GRPOConfig) -> dict[str, Any]:
    """Return the way of decoding, and the difference of its log-probs from a plain forward in nats."""
    settings = transformers.GenerationConfig(
        **{"max_new_tokens": 10, "do_sample": True, "use_cache": True, "pad_token_id": 0},
        **{"eos_token_id": 999, "suppress_tokens": [IMAGE]},
    )
    backend = TransformersBackend(lambda: model, settings, config)
    backend.generator = torch.Generator().manual_seed(0)
    gaps: list[float] = []
    compare = PlainForwardCheck.compare

    def watched(*args: Any) -> float:
        gaps.append(compare(*args))
        return gaps[-1]

    PlainForwardCheck.compare = staticmethod(watched)  # type: ignore[method-assign]
    leave = backend._leave_way

    def left(error: Exception) -> None:
        gaps.clear()
        leave(error)

    backend._leave_way = left  # type: ignore[method-assign]
    try:
        images = SamplingOptions(images=list(batch.images)) if batch.images else SamplingOptions()
        backend.generate(prompts_of(batch), images)
    finally:
        PlainForwardCheck.compare = staticmethod(compare)  # type: ignore[method-assign]
    [path, *_] = backend.fast_paths(model)
    return {
        "decoding": path.choice.replace("transformers", "`generate`"),
        "sampled": max(gaps, default=float("nan")),
        "reasons": short(path.reason),
    }


class NotBuiltError(Exception):
    """A model cannot be built small, or its plain forward fails."""


def kind_of(class_name: str) -> str:
    return re.sub("(ForCausalLM|LMHeadModel|ForConditionalGeneration)$", "", class_name)


def model_of(name: str) -> Any:
    try:
        model = build_vision(name) if name in VISION else build_any(name)
        model.eval()  # experts may add noise
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits.sum().backward()
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {error}") from error
    model.zero_grad()
    return model


def row_of(name: str) -> Row:
    """Return the row of a model type, or of a vision model of the tests.

    Raises:
        NotBuiltError: there is no such model.
    """
    model = model_of(name)
    row = Row(kind_of(type(model).__name__) + (", images" if name in VISION else ""))
    batch = completions_of_images(name) if name in VISION else completions()
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(directory, use_cpu=True, bf16=False, report_to="none")
        reasons = []
        for compute in (update_of, sampling_of):
            try:
                found = compute(model, batch, config)
            except Exception as error:
                known = isinstance(error, ConfigError | BackendError)
                found = short(f"{'' if known else 'fails with '}{error if known else repr(error)}")
                refused = "; ".join(filter(None, [row.refused, found]))
                row = row._replace(refused=refused)
                continue
            reasons.append(found.pop("reasons"))
            row = row._replace(**found)
    return row._replace(reasons="; ".join(filter(None, reasons)))


def short(reason: str) -> str:
    """Return the first sentence of a reason, in one line of a table."""
    text = re.sub(r"\s+", " ", reason).replace("|", "/")
    return text if len(text) <= 160 else text[:157].rsplit(" ", 1)[0] + " …"


def cells(row: Row) -> str:
    """Return the row as a line of Markdown."""

    def number(value: float, form: str) -> str:
        return "-" if value != value else format(value, form)

    numbers = number(row.gradient, ".0e"), number(row.sampled, ".0e"), number(row.tokens, ".2f")
    why = f"**refused**: {row.refused}" if row.refused else row.reasons
    return f"| {' | '.join([row.name, f'`{row.layout}`', row.head, row.decoding, *numbers, why])} |"


def rows_of(names: tuple[str, ...]) -> tuple[list[Row], dict[str, str]]:
    """Return the rows in the order of their names, and why others are not built."""
    rows, missing = [], {}
    for name in names:
        try:
            rows.append(row_of(name))
        except NotBuiltError as error:
            missing[name] = short(str(error))[:90]
    return sorted(rows), missing


def table(names: tuple[str, ...] = NAMES) -> str:
    """Return the table for the installed versions."""
    rows, missing = rows_of(names)
    lines = [
        f"transformers {version('transformers')}, torch {version('torch')}, float32, a CPU:",
        "",
        "| architecture | layout | head | decoding | gradient against rows alone "
        "| sampled against plain, nats | tokens computed of distinct | why not faster |",
        "|---|---|---|---|---|---|---|---|",
        *map(cells, rows),
        "",
        "Not built small:",
        "",
        *(f"- {name}: {reason}" for name, reason in missing.items()),
    ]
    return "\n".join(lines)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if len(sys.argv) > 1:
        print(table(tuple(sys.argv[1:])))
        return
    page = ROOT / "docs" / "models.md"
    before, rest = page.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    page.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
