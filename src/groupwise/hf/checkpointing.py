"""Files of a checkpoint: manifest, converted weights, and state that ``Trainer`` does not save."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from groupwise.compat.deepspeed import convert_to_universal, expect_universal, is_partitioned
from groupwise.compat.transformers import TRAINER_STATE
from groupwise.config.changes import Snapshot, fit_processes
from groupwise.config.grpo_config import GRPOConfig
from groupwise.distributed import gather_or_raise
from groupwise.errors import ConfigError
from groupwise.files import read_json
from groupwise.policy.introspection import (
    CausalLM,
    adapters_of,
    changes_base,
    has_adapter,
    has_prompt_learning,
    without_adapter,
)
from groupwise.policy.reference_choice import FrozenAdapter
from groupwise.policy.weight_iterator import gathering, whole_tensor
from groupwise.records.serialization import host_copy, load

logger = logging.getLogger(__name__)

STATE = "groupwise_state_{rank}.pt"
MANIFEST = "groupwise_manifest.json"
_REFERENCE = "groupwise_reference.pt"
_POLICY = "groupwise_policy.json"
_VIRTUAL_TOKENS = "groupwise_virtual_tokens.pt"
#: Shapes of the JSON files that are read, see :func:`groupwise.files.read_json`.
_SHAPES = {
    MANIFEST: {"run": str | None, "files": {...: {"bytes": int}}},
    _POLICY: {"base_model": str | None, "adapters": {...: dict}, "weights": {...: str}},
    TRAINER_STATE: {"global_step": int},
    SAFE_WEIGHTS_INDEX_NAME: {"weight_map": dict},
}
# Fields of an adapter's configuration that do not change the function of its weights.
_NOT_TRAINED = (
    *("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping", "task_type"),
    *("runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
_CONTINUE = (
    "start a new run that continues it: its directory as the model, or for an adapter "
    "model=PeftModel.from_pretrained(base, directory, is_trainable=True)"
)
_HASHED_BYTES = 2**24  # larger files have a size in the manifest and no digest


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size of a file, and its digest if it is small."""
    size = path.stat().st_size
    if size > _HASHED_BYTES:
        return {"bytes": size}
    return {"bytes": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def write_manifest(directory: Path, run_id: str) -> None:
    """List the files of a checkpoint and the run that wrote it."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    files = {path.relative_to(directory).as_posix(): fingerprint(path) for path in paths}
    text = json.dumps({"run": run_id, "files": files}, indent=1)
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def read_saved(directory: str | Path, name: str) -> dict[str, Any]:
    """Return a JSON file of a checkpoint; empty if ``transformers`` or an earlier version wrote none.

    Raises:
        ConfigError: it is no JSON, or lacks what is read from it.
    """
    path = Path(directory, name)
    return read_json(path, _SHAPES[name]) if path.is_file() else {}


def saved_run_id(directory: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint; None: unknown."""
    try:
        return read_saved(directory, MANIFEST).get("run") or None
    except ConfigError:
        return None


def damage(directory: Path) -> str:
    """Return the first difference from the manifest, if there is one, or JSON of another shape, or ""."""
    try:
        for name, written in read_saved(directory, MANIFEST).get("files", {}).items():
            path = directory / name
            if not path.is_file():
                return f"{name} is missing"
            found = path.stat().st_size
            if found != written["bytes"]:
                return f"{name} has {found} bytes instead of {written['bytes']}"
            if "sha256" in written and fingerprint(path) != written:
                return f"{name} has other contents than were written"
        for name in _SHAPES:
            read_saved(directory, name)
    except ConfigError as error:
        return str(error)
    return ""


def is_complete(directory: Path) -> bool:
    """Return True if a run can be resumed from ``directory``.

    ``enable_jit_checkpoint`` creates the directory before anything is saved.
    """
    has_state = any(directory.glob(STATE.format(rank="*")))
    return has_state and (directory / TRAINER_STATE).is_file()


def has_converted_names(directory: str, model: nn.Module) -> bool:
    """Return True if the checkpoint in ``directory`` names weights differently than ``model`` does.

    ``save_pretrained`` writes some architectures (many vision-language and mixture-of-experts models) with
    the weight names of their first release, and only ``from_pretrained`` converts them back.
    """
    index, single = read_saved(directory, SAFE_WEIGHTS_INDEX_NAME), Path(directory, SAFE_WEIGHTS_NAME)
    if index:
        saved = set(index["weight_map"])
    elif single.is_file():
        with safe_open(single, framework="pt") as file:
            saved = set(file.keys())
    else:
        return False
    return not saved <= model.state_dict().keys()


def load_converted(directory: str, model: PreTrainedModel) -> None:
    """Load weights into ``model`` through ``from_pretrained``, which converts their names.

    Raises:
        ConfigError: the checkpoint lacks some weights.
    """
    loaded, report = cast(
        tuple[PreTrainedModel, dict[str, set[str]]],
        type(model).from_pretrained(directory, dtype="auto", output_loading_info=True),
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"checkpoint {directory!r} lacks {len(missing)} weights of a {type(model).__name__}, such as "
            f"{missing[0]!r}; was it written with another model?"
        )
    model.load_state_dict(loaded.state_dict())


def save_state(directory: str, rank: int, world_size: int, state: dict[str, Any]) -> None:
    """Write the rollout state of one rank.

    Raises:
        ConfigError: it holds values that a checkpoint cannot contain.
    """
    os.makedirs(directory, exist_ok=True)
    saved = host_copy({**state, "world_size": world_size}, "state")
    torch.save(saved, os.path.join(directory, STATE.format(rank=rank)))


def load_states(
    directory: str | None, config: GRPOConfig, before: Snapshot, accelerator: Accelerator, *records: type
) -> list[dict[str, Any]]:
    """Read the rollout state of this rank; or those of another number of ranks, and fit ``config`` to them.

    Args:
        directory: checkpoint; None: there is none, and no state.
        before: snapshot of ``config``.
        records: classes of values in the states, beside those of ``groupwise.records.serialization``.

    Raises:
        ConfigError: the checkpoint was written by another trainer, another version, or a number of processes
            whose batch the present ones cannot form, or whose shards DeepSpeed cannot convert.
    """
    if directory is None:
        return []
    first = _load_state(directory, 0, *records)
    saved, now = first["world_size"], config.world_size
    if saved == now:
        rank = config.process_index
        return [first if rank == 0 else _load_state(directory, rank, *records)]
    is_fsdp = accelerator.distributed_type == DistributedType.FSDP
    if is_fsdp and not accelerator.is_fsdp2:
        raise ConfigError(
            f"checkpoint {directory!r} was written by {saved} processes and cannot be resumed with {now} "
            f"under FSDP 1: start {saved} processes; FSDP 2, DeepSpeed and DDP can change their number"
        )
    fit_processes(config, before, first, directory)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # each process has saved its shard alone
        failure = None
        if config.should_save:
            try:
                convert_to_universal(directory)
            except Exception as cause:  # as for an optimizer without the two moments of Adam
                failure = ConfigError(
                    f"DeepSpeed cannot convert checkpoint {directory!r} of {saved} processes for {now} "
                    f"({cause!r}); start {saved} processes"
                )
        gather_or_raise(None, failure)
        expect_universal(accelerator.state.deepspeed_plugin)
    return [first, *(_load_state(directory, rank, *records) for rank in range(1, saved))]


def state_of_rank(
    states: Sequence[dict[str, Any]], components: Mapping[str, Any], config: GRPOConfig
) -> dict[str, Any]:
    """Return the state of this rank: the only one, or merged from those of another number of ranks.

    Its generation is cut into micro-batches of the present size.
    """
    if states[0]["world_size"] == config.world_size:
        cut = getattr(components["buffer"], "cut", lambda snapshot, _: snapshot)  # none in TRL's buffer
        return {**states[0], "buffer": cut(states[0]["buffer"], config.per_device_train_batch_size)}
    merged = {
        name: component.merge([state.get(name, {}) for state in states], config)
        for name, component in components.items()
        if hasattr(component, "merge")  # else it is alike on all ranks
    }
    return {**states[0], **merged}


def _load_state(directory: str, rank: int, *records: type) -> dict[str, Any]:
    path = os.path.join(directory, STATE.format(rank=rank))
    if not os.path.isfile(path):
        raise ConfigError(
            f"checkpoint {directory!r} has no {os.path.basename(path)}: it was saved with save_only_model="
            "True or by another trainer; load the model from it and train without resume_from_checkpoint"
        )
    try:
        return load(path, *records)
    except UnpicklingError as error:
        raise ConfigError(
            f"checkpoint {directory!r} holds records that this version of groupwise does not have; resume "
            "with the version that wrote it, or start a new run with the checkpoint as its model"
        ) from error


def save_reference(directory: str, model: nn.Module) -> None:
    """Write the weights of a reference model that is synchronized with the policy."""
    os.makedirs(directory, exist_ok=True)
    torch.save(model.state_dict(), os.path.join(directory, _REFERENCE))


def load_reference(directory: str, model: nn.Module | None, *, sync_ref_model: bool) -> None:
    """Load the saved reference weights into ``model``, or warn if ``sync_ref_model`` is now off.

    Raises:
        ConfigError: ``sync_ref_model`` is on, and the checkpoint was written without it.
    """
    if model is None:
        return
    path = os.path.join(directory, _REFERENCE)
    is_saved = os.path.isfile(path)
    if not sync_ref_model:
        if is_saved:
            logger.warning(
                "resumed with sync_ref_model=False: the reference is the initial model; the synchronized "
                "reference in checkpoint %r is not loaded",
                directory,
            )
        return
    if not is_saved:
        raise ConfigError(
            f"sync_ref_model=True, but checkpoint {directory!r} was written without it and contains no "
            "reference; resume with sync_ref_model=False, or start a new run from its weights"
        )
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


class ModelDigests:
    """Digests of a model's weights; frozen weights are read once."""

    def __init__(self) -> None:
        self._frozen: dict[str, tuple[int, str]] = {}  # address and digest

    def of(self, model: nn.Module) -> dict[str, str]:
        """Return dtype and digest of every parameter by its name, such as "float32 1f0c".

        A collective for a sharded model: each parameter is gathered, frozen ones in the first call.
        """
        from groupwise.policy.digests import tensor_digest  # a run without checkpoints needs none

        digests = {}
        for name, parameter in model.named_parameters():
            address, digest = self._frozen.pop(name, (None, ""))
            if parameter.is_meta:  # offloaded to disk
                continue
            # Ranks must agree, so that addresses of their shards do not count.
            sharded = is_partitioned(parameter) or hasattr(parameter, "full_tensor")
            now = 0 if sharded else parameter.data_ptr()
            if parameter.requires_grad or address != now:
                with gathering([parameter]):
                    values = whole_tensor(parameter.detach())
                    values = values.view(torch.uint8) if values.element_size() == 1 else values  # float8
                    dtype = str(parameter.dtype).removeprefix("torch.")
                    digest = f"{dtype} {tensor_digest(values).item() % 2**64:x}"
            if not parameter.requires_grad:
                self._frozen[name] = now, digest
            digests[name] = digest
        return digests


def policy_record(model: CausalLM, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return what a resumed run compares: base model, configurations of adapters, digests, as in JSON."""
    adapters = model.peft_config if has_adapter(model) else {}
    configs = {name: adapter.to_dict() for name, adapter in adapters.items()}
    base = without_adapter(model).config.name_or_path
    record = {"base_model": base, "adapters": configs, "weights": digests}
    return json.loads(json.dumps(record, default=lambda v: sorted(v) if isinstance(v, set) else str(v)))


def save_policy(directory: str, model: CausalLM, digests: Mapping[str, str]) -> None:
    """Write the record of the policy, and the encoder of virtual tokens: PEFT saves its output alone."""
    text = json.dumps(policy_record(model, digests), indent=1)
    Path(directory, _POLICY).write_text(text, encoding="utf-8")
    if has_prompt_learning(model):
        torch.save(model.prompt_encoder.state_dict(), os.path.join(directory, _VIRTUAL_TOKENS))


def check_adapters(directory: str, model: CausalLM) -> None:
    """Compare the adapters of a policy with those of the checkpoint that it will be loaded from.

    Raises:
        ConfigError: an adapter was added, removed, or has settings that its weights were not trained with. A
            changed dropout rate is a warning.
    """
    record = read_saved(directory, _POLICY)
    if not record:  # of an earlier version
        return
    saved = record["adapters"]
    now = policy_record(model, {})["adapters"]
    names = sorted((saved.keys() ^ now.keys()) - {FrozenAdapter.name})
    changes = [f"adapter {name!r} {'added' if name in now else 'removed'}" for name in names]
    rates: list[str] = []
    for name in saved.keys() & now.keys():
        for field, was in saved[name].items():
            given = now[name].get(field, was)  # absent: of another version of PEFT
            if given != was and field not in _NOT_TRAINED and not field.startswith("init_"):
                text = f"{field}={given!r} (was {was!r}) in adapter {name!r}"
                (rates if "dropout" in field else changes).append(text)
    if changes:
        raise ConfigError(
            f"resumed from {directory!r} with {'; '.join(changes)}: the weights were trained otherwise. "
            f"Resume with the adapters of the checkpoint, or {_CONTINUE}"
        )
    if rates:
        logger.warning("resumed with %s, from the first step on", "; ".join(rates))


def load_adapters(directory: str, model: CausalLM) -> None:
    """Load all adapters of a PEFT model; the reference stays as it is if the checkpoint has none.

    If a checkpoint has adapters in subdirectories, ``Trainer`` skips the one at its top.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    virtual_tokens = os.path.join(directory, _VIRTUAL_TOKENS)
    if os.path.isfile(virtual_tokens):
        saved = torch.load(virtual_tokens, map_location="cpu", weights_only=True)
        model.prompt_encoder.load_state_dict(saved)
        return
    for name in model.peft_config:
        folder = directory if name == "default" else os.path.join(directory, name)
        if name != FrozenAdapter.name or os.path.isdir(folder):
            set_peft_model_state_dict(model, load_peft_weights(folder, device="cpu"), adapter_name=name)


def check_loaded(directory: str, model: CausalLM, digests: Mapping[str, str]) -> None:
    """Compare the digests of a policy with those of the checkpoint that it was loaded from.

    Raises:
        ConfigError: weights differ; those with another dtype, and a base that is computed when the adapter is
            attached (PiSSA), are a warning.
    """
    record, optional = read_saved(directory, _POLICY) or {"weights": {}}, f".{FrozenAdapter.name}."
    changed = {
        name: (was.split()[0], digests.get(name, "absent").split()[0])
        for name, was in record["weights"].items()
        if digests.get(name) != was and (optional not in name or name in digests)
    }
    if "adapters" in record and not record["weights"]:
        path = Path(directory, _POLICY)
        logger.warning("the loaded weights are not compared: %s has no digests (FSDP 1)", path)
    if not changed:
        return
    (name, (was, now)), base = next(iter(changed.items())), without_adapter(model).config.name_or_path
    message = (
        f"{len(changed)} of {len(record['weights'])} weights of the policy differ from those of checkpoint "
        f"{directory!r}, such as {name} ({now}, was {was}), with base model {base!r} "
        f"(was {record['base_model']!r})"
    )
    rounded = all(was != now != "absent" for was, now in changed.values())
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if not rounded and not (any(map(changes_base, adapters_of(model))) and frozen.issuperset(changed)):
        raise ConfigError(f"{message}; resume with the model of the checkpoint, or {_CONTINUE}")
    logger.warning("%s; the run continues from these weights", message)
