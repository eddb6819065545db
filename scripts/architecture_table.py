"""Table of architectures in ``docs/models.md``: layout, decoding loop, difference of a gradient, and cost.

    python scripts/architecture_table.py          # with the installed transformers; writes the table

Every architecture is a small model of random float32 weights (``tests/support/architectures.py``). Its layout
is what ``sequence_layout="auto"`` takes, after the check of a run; the gradient of a batch of groups is
compared with the sum of the gradients of each completion alone, by the plain forward, without padding. Vision
models get prompts of no, one and two images. Operations and activations of a forward and backward pass are
counted, in the layout and padded: they are the same on every machine.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402
from support.architectures import (  # noqa: E402
    JAMBA,
    MAMBA,
    RIGHT,
    STATES,
    VISION,
    alone,
    build,
    build_vision,
    completions,
    completions_of_images,
    values_and_gradients,
)
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from groupwise.generation.decoding import decoding_path  # noqa: E402
from groupwise.policy.heads.capture import LogprobHead  # noqa: E402
from groupwise.policy.layout_choice import choose_layout  # noqa: E402
from groupwise.policy.logprobs import LogprobComputer  # noqa: E402

START, END = "<!-- written by scripts/architecture_table.py -->", "<!-- end of the table -->"
NAMES = {**RIGHT, **STATES, "jamba": JAMBA, "mamba": MAMBA, **VISION}


#: A prompt of 40 tokens with 8 completions of 12; those with images are the batch of the gradient.
GROUP = ((40, (12,) * 8),)


def cost_of(model: Any, batch: Any, layout: str) -> tuple[int, int]:
    """Return operations of matrix products in a forward and backward pass, and bytes kept between them.

    Weights do not count; nothing is recomputed.
    """
    computer, kept = LogprobComputer(layout, LogprobHead("chunked")), {}
    computer.checked = computer.checked_images = True
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            total = computer(model, batch, with_entropy=False).logps_BT.sum()
        total.backward()
    return counter.get_total_flops(), sum(kept.values())


def row_of(name: str) -> tuple[str, ...]:
    """Return class, layout, decoding loop, difference of the gradient, cost, what is against a faster way."""
    model = (build_vision(name) if name in VISION else build(*NAMES[name])).eval()  # experts may add noise
    path = choose_layout("auto", model, group_size=4, with_aux_loss=False)
    computer = LogprobComputer(path.choice, LogprobHead("chunked"))
    batch = completions_of_images(name) if name in VISION else completions()
    expected = values_and_gradients(model, batch, alone)[2]
    given = values_and_gradients(model, batch, lambda m, b, _, **kwargs: computer(m, b, **kwargs))[2]
    size = max(float(gradient.abs().max()) for gradient in expected)
    error = max(float((a - b).abs().max()) for a, b in zip(given, expected, strict=True)) / size
    config = transformers.GenerationConfig(max_new_tokens=4, do_sample=True, use_cache=True)
    decoding = decoding_path(model, config)
    of_layout = path._replace(choice=computer.layout, reason=path.reason)
    if computer.layout != path.choice:
        of_layout = of_layout._replace(reason="its state cannot be continued by several tokens")
    reasons = [of_layout.reason] if of_layout.choice == "padded" else []
    reasons += [] if decoding.reason in of_layout.reason else [decoding.reason]
    costs = ("-", "-")
    if of_layout.choice != "padded":
        group = batch if name in VISION else completions(GROUP, pad=0)
        own, padded = (cost_of(model, group, layout) for layout in (of_layout.choice, "padded"))
        costs = tuple(f"{one / other:.2f}" for one, other in zip(own, padded, strict=True))
    kind = re.sub("(ForCausalLM|LMHeadModel|ForConditionalGeneration)$", "", type(model).__name__)
    return (
        kind + (", sliding window" if "sliding" in name else ", images" if name in VISION else ""),
        f"`{of_layout.choice}`",
        decoding.choice if not decoding.reason else "`generate`",
        f"{error:.0e}",
        *costs,
        "; ".join(reasons),
    )


def table() -> str:
    """Return the table for the installed versions."""
    rows = sorted(row_of(name) for name in NAMES if NAMES[name][0] is not None)
    lines = [
        f"transformers {version('transformers')}, torch {version('torch')}, float32, "
        f"{torch.get_num_threads()} threads of a CPU:",
        "",
        "| architecture | layout | decoding | gradient, relative difference | operations | activations "
        "| why not faster |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines)


def main() -> None:
    page = ROOT / "docs" / "models.md"
    before, rest = page.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    page.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
