"""``groupwise vllm-serve``: start vLLM's server with the options for training, on 127.0.0.1 by default."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from groupwise.commands.cli.run_file import read_yaml
from groupwise.config.redact import redact, redacted_command
from groupwise.errors import ConfigError

_LOCAL = ("127.0.0.1", "localhost", "::1")


def run(arguments: Sequence[str]) -> int:
    """Print the command and replace this process by it; ``--dry_run`` only prints."""
    import torch
    from transformers import AutoConfig

    from groupwise.generation.vllm.serve import as_shell_line, check_tensor_parallel, serve_command

    options, extra = _parser().parse_known_args(list(arguments))
    model, port = options.model, options.port
    if options.config is not None:
        settings = read_yaml(options.config)
        model = model or settings.get("model", settings.get("model_name_or_path"))  # TRL's name
        port = port or settings.get("vllm_server_port")
    if model is None:
        raise ConfigError("model is missing; give --model, or --config with a run file that has one")
    if options.tensor_parallel_size > 1:
        try:
            model_config = AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:  # no access here, or code of its own
            reason = str(error).partition("\n")[0]
            print(f"groupwise: the heads of {model} are not checked: {reason}", file=sys.stderr)
        else:
            size, flag = options.tensor_parallel_size, "--tensor_parallel_size"
            splits = "--enable-expert-parallel" not in extra
            check_tensor_parallel(model_config, size, flag, splits_experts=splits)
    if options.dry_run and options.device is None and not torch.cuda.is_available():
        print(
            "groupwise: no GPU here, so the command is for a CPU; --device cuda prints that of a GPU node",
            file=sys.stderr,
        )
    command, environment = serve_command(
        model,
        host=options.host,
        port=int(port or 8000),
        device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        dtype=options.dtype,
        tensor_parallel_size=options.tensor_parallel_size,
        data_parallel_size=options.data_parallel_size,
        max_model_length=options.max_model_length,
        weight_transfer=options.weight_transfer,
        extra=extra,
    )
    print(redact(as_shell_line(redacted_command(command), environment)), flush=True)
    has_key = bool(os.environ.get("VLLM_API_KEY")) or "--api-key" in " ".join(extra)
    if options.host not in _LOCAL and not has_key:
        print(
            f"groupwise: warning: other machines can reach {options.host}:{port or 8000} and replace the "
            "weights, without a password; set VLLM_API_KEY, for the trainer too, or use a private network",
            file=sys.stderr,
        )
    if options.dry_run:
        return 0
    # An absolute path, beside the running Python, or on PATH.
    places = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    program = shutil.which(command[0], path=os.pathsep.join(places))
    if program is None:
        raise ConfigError(f"{command[0]} is not installed; run pip install 'groupwise[vllm]'")
    os.execve(program, command, {**os.environ, **environment})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="groupwise vllm-serve",
        description=__doc__,
        epilog="Further arguments are passed to vllm serve.",
        allow_abbrev=False,
    )

    def add(name: str, help: str, **options: object) -> None:
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*flags, help=help, **options)  # type: ignore[arg-type]

    add("config", "YAML file of the run, for model and vllm_server_port")
    add("model", "hub id or directory of the run's model")
    add("host", "address to listen on (default: %(default)s)", default="127.0.0.1")
    add("port", "port to listen on (default: 8000)", type=int)
    add("device", "default: cuda if available", choices=("cuda", "cpu"))
    add("dtype", "dtype of the weights (default: %(default)s)", default="auto")
    add("tensor_parallel_size", "GPUs per copy of the model", type=int, default=1)
    add("data_parallel_size", "copies of the model", type=int, default=1)
    add("max_model_length", "maximum tokens of prompt and completion together", type=int)
    add("weight_transfer", "weight transfer engine of vLLM (default: by device)")
    add("dry_run", "only print the command", action="store_true")
    return parser
