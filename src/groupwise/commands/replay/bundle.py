"""Bug report of one optimizer step in a file: settings, versions and tokens, without weights and secrets."""

from __future__ import annotations

import io
import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from groupwise.config.grpo_config import GRPOConfig
from groupwise.config.redact import masked, redacted_json
from groupwise.errors import ConfigError
from groupwise.records.serialization import to_bytes
from groupwise.reporting.model_card import public_name
from groupwise.reporting.rollout_files import FOLDER, HEADER, Recording, file_name

#: Settings of ``TrainingArguments`` that an update depends on.
_OF_THE_UPDATE = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("optim", "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "max_grad_norm", "num_train_epochs", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("bf16", "fp16", "tf32", "use_cpu", "full_determinism", "seed", "data_seed", "neftune_noise_alpha"),
    *("torch_compile", "torch_compile_backend", "torch_compile_mode", "liger_kernel_config"),
    *("logging_nan_inf_filter", "ddp_find_unused_parameters"),
)
#: Beginnings of the names of settings of sampling, rewards, evaluation, logs and loading.
_NOT_REPLAYED = (
    *("use_vllm", "vllm_", "transformers_continuous", "use_transformers", "cache_implementation"),
    *("rollout_", "reward_weights", "max_tool", "tool_timeout", "reward_timeout", "reward_on_error"),
    *("eval_", "num_generations_eval", "log_", "num_completions_to_print", "terminal_metrics"),
    *("save_rollouts", "trust_remote_code", "model_init_kwargs", "wandb_", "use_liger_loss"),
    *("chat_template_kwargs", "dataset_weights", "metrics_by", "prompt_filter"),
)
#: Settings with one of these beginnings that the loss depends on.
_OF_THE_LOSS = ("vllm_importance_sampling", "rollout_func_importance")
#: Fields of an adapter's configuration that have paths of this machine, or texts.
_OF_THE_MACHINE = ("base_model_name_or_path", "revision", "auto_mapping")
_INHERITED = {item.name for item in fields(TrainingArguments)}
_OWN = {item.name for item in fields(GRPOConfig)} - _INHERITED

#: Largest size of a bundle, and of its contents when it is read.
LIMIT, LIMIT_OF_CONTENTS = 10**6, 2 * 10**8
_NAME = re.compile(r"run\.json|step-\d{6}\.rank\d+\.pt")


def is_replayed(name: str) -> bool:
    """Return True for a setting that an update depends on."""
    if name in _INHERITED:
        return name in _OF_THE_UPDATE
    return name in _OWN and (name.startswith(_OF_THE_LOSS) or not name.startswith(_NOT_REPLAYED))


def write_bundle(recording: Recording, step: int, file: Path) -> int:
    """Write the record of one step for another machine; return the number of bytes.

    It contains token ids, log-probs, masks and advantages of the window, settings of the update and versions:
    no weights, texts, images, paths or credentials. Token ids can be decoded.

    Raises:
        ConfigError: the step is not recorded, has images, or is too large.
    """
    header = recording.header
    parts: dict[str, bytes] = {HEADER: redacted_json(_header(header)).encode()}
    for rank in range(header["world_size"]):
        record = recording.step(step, rank)
        if any(batch.images is not None for batch in record.window):
            raise ConfigError(f"step {step} has images, which a bundle lacks; share the folder of the run")
        values = {
            **vars(record),
            "settings": _settings(record.settings),
            "computed": [vars(rows) for rows in record.computed],
        }
        parts[file_name("step", step, rank).removesuffix(".gz")] = to_bytes(values)
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_LZMA) as archive:
        for name, data in parts.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_LZMA)
    content = zipped.getvalue()
    if len(content) > LIMIT:
        raise ConfigError(
            f"the window of step {step} takes {len(content) / 1e6:.1f} MB, and a bundle has at most "
            f"{LIMIT / 1e6:.0f} MB; report a step of a run with fewer or shorter completions"
        )
    file.write_bytes(content)
    return len(content)


def _header(header: dict[str, Any]) -> dict[str, Any]:
    adapter = header["adapter"] and {
        name: value for name, value in header["adapter"].items() if name not in _OF_THE_MACHINE
    }
    own = {
        "settings": _settings(header["settings"]),
        "model": public_name(header["model"]),
        "adapter": adapter,
    }
    names = [public_name(name) for name in header["reward_funcs"]]  # that of a reward model is its path
    return {**header, **own, "reward_funcs": names, "bundle": True}


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the update without credentials; of generation, which may have texts, numbers."""
    kept = {name: value for name, value in settings.items() if is_replayed(name)}
    if isinstance(kept.get("generation_kwargs"), dict):
        given = kept["generation_kwargs"].items()
        kept["generation_kwargs"] = {name: v for name, v in given if isinstance(v, int | float)}
    return dict(masked(kept))


@contextmanager
def unpacked(file: Path) -> Iterator[Path]:
    """Context manager that yields a folder with the files of a bundle.

    Raises:
        ConfigError: the file is no bundle, or has other or larger files than one.
    """
    with tempfile.TemporaryDirectory(prefix="groupwise-bundle-") as directory:
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                strange = [entry.filename for entry in entries if not _NAME.fullmatch(entry.filename)]
                if strange or sum(entry.file_size for entry in entries) > LIMIT_OF_CONTENTS:
                    raise ConfigError(
                        f"{str(file)!r} is no bundle: "
                        + (f"it contains {strange[0]!r}" if strange else "its files are too large")
                    )
                archive.extractall(directory)
        except ConfigError:
            raise
        except zipfile.BadZipFile:
            raise ConfigError(f"{str(file)!r} is neither the folder of a run nor a bundle") from None
        except Exception as error:  # of zipfile, lzma, zlib: what damaged bytes lead to
            raise ConfigError(f"{str(file)!r} is damaged ({type(error).__name__}: {error})") from None
        yield Path(directory)


@contextmanager
def open_recording(run: str | Path | Recording) -> Iterator[Recording]:
    """Open the recording of a run: ``output_dir``, its folder of rollouts, or a bundle."""
    if isinstance(run, Recording):
        yield run
        return
    path = Path(run)
    if path.is_file():
        with unpacked(path) as folder:
            yield Recording(folder, str(path))
    else:
        yield Recording(path / FOLDER if (path / FOLDER).is_dir() else path)
