"""LoRA adapters of many runs on one base model: copies with shared weights, and one model with all adapters.

Axes: K runs, R rows of the batch, S positions, I and O features of a linear layer, C the ranks of all runs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from groupwise.compat.peft import wrapper_types
from groupwise.errors import ConfigError
from groupwise.policy.introspection import adapter_type

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

#: Fields of ``LoraConfig`` that runs choose freely; any other one must have its default.
FREE_FIELDS = frozenset(
    {
        *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora"),
        *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "init_lora_weights"),
        *("task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping"),
        *("peft_type", "peft_version"),
    }
)
#: Initialisations that leave the base weights unchanged and need no data.
INITIALISATIONS = (True, False, "gaussian", "orthogonal")


def check_adapter(run: str, adapter: PeftConfig) -> None:
    """Check that the shared sampler supports an adapter, before anything is loaded.

    Raises:
        ConfigError: it is no LoRA adapter, or has an option that changes more than ``B A x``.
    """
    kind = adapter_type(adapter)
    if kind != "LORA":
        raise ConfigError(f"run {run!r} has an adapter of type {kind}; runs of a sweep share LORA alone")
    defaults = type(adapter)()
    for field in fields(adapter):
        given = getattr(adapter, field.name)
        if field.name not in FREE_FIELDS and given != getattr(defaults, field.name):
            raise ConfigError(
                f"run {run!r} has {field.name}={given!r} in its LoraConfig, which the shared sampler does "
                f"not support; allowed beside the defaults: {', '.join(sorted(FREE_FIELDS))}"
            )
    initialisation = getattr(adapter, "init_lora_weights", True)
    if initialisation not in INITIALISATIONS:
        raise ConfigError(
            f"run {run!r} has init_lora_weights={initialisation!r}, which changes the base weights that all "
            f"runs share, or needs data; allowed: {', '.join(map(str, INITIALISATIONS))}"
        )


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the modules and settings of ``model`` whose weights have the same memory.

    Its parameters are objects of its own: a copy with an adapter freezes them.
    """
    shared: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        own = nn.Parameter(parameter.detach(), parameter.requires_grad)
        shared[id(parameter)] = own if type(parameter) is nn.Parameter else parameter  # quantized: as it is
    copied = copy.deepcopy(model, shared)
    vars(copied)["shares_weights"] = (
        True  # policy/frozen_weights.py would give each run a copy in another dtype
    )
    return copied


def has_finite_adapter(policy: PeftModel) -> bool:
    """Return True if no trained weight is NaN or infinite: its product with a masked zero would be NaN."""
    return all(bool(weight.isfinite().all()) for weight in policy.parameters() if weight.requires_grad)


def lora_layers(run: str, policy: PeftModel) -> dict[str, Any]:
    """Return the adapter layers of a policy by the names of the base model's layers.

    Raises:
        ConfigError: the adapter targets a layer that is not ``nn.Linear``.
    """
    adapter_layer, _ = wrapper_types()
    found = {}
    for name, layer in policy.get_base_model().named_modules():
        if isinstance(layer, adapter_layer):
            if type(layer).__name__ != "Linear" or not isinstance(layer.get_base_layer(), nn.Linear):
                base = type(layer.get_base_layer()).__name__
                raise ConfigError(
                    f"the adapter of run {run!r} targets {name!r}, a layer of type {base}; the shared "
                    "sampler supports nn.Linear alone"
                )
            found[name] = layer
    return found


class RowAdapterLinear(nn.Module):
    """Linear layer that adds the adapter of each row's run: ``where(mask, x Aᵀ, 0) Bᵀ``.

    Two products with the stacked factors of all runs; a row's other columns are masked.
    """

    def __init__(self, base: nn.Linear, adapters: RowAdapters) -> None:
        super().__init__()
        self.base, self.adapters = base, adapters
        self.ranks: tuple[int, ...] = ()
        self.a_CI = self.b_OC = torch.empty(0)

    def load(self, layers: Sequence[Any]) -> None:
        """Stack the present factors of K adapter layers, None for a run that does not target the layer."""
        a, b, ranks = [], [], []
        for layer in layers:
            ranks.append(0)
            for name in layer.active_adapters if layer is not None else ():
                weight_a, weight_b = layer.lora_A[name].weight, layer.lora_B[name].weight
                a.append(weight_a)
                b.append(weight_b * layer.scaling[name])
                ranks[-1] += len(weight_a)
        self.ranks = tuple(ranks) if a else ()
        self.a_CI, self.b_OC = (torch.cat(a), torch.cat(b, 1)) if a else (torch.empty(0), torch.empty(0))

    def forward(self, x_RSI: torch.Tensor) -> torch.Tensor:
        out_RSO = self.base(x_RSI)
        if not self.ranks:
            return out_RSO
        hidden_RSC = F.linear(x_RSI.to(self.a_CI.dtype), self.a_CI)
        own_RSC = hidden_RSC.where(self.adapters.mask(self.ranks), 0.0)
        return (out_RSO + F.linear(own_RSC, self.b_OC)).to(out_RSO.dtype)


class RowAdapters:
    """All adapters in one model, each row of a batch with that of its run.

    Args:
        model: shared copy of the base model, whose targeted layers are replaced.

    Attributes:
        runs_R: run of each row of the batch.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._layers: dict[str, RowAdapterLinear] = {}
        self.assign(torch.zeros(0, dtype=torch.long))

    def assign(self, runs_R: torch.Tensor) -> None:
        self.runs_R = runs_R
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def mask(self, ranks: tuple[int, ...]) -> torch.Tensor:
        """Return True where a column of the ranks of all runs belongs to the run of the row: (R, 1, C)."""
        if ranks not in self._masks:  # layers with the same ranks share it
            owner_C = torch.arange(len(ranks)).repeat_interleave(torch.tensor(ranks)).to(self.runs_R.device)
            self._masks[ranks] = (self.runs_R[:, None] == owner_C)[:, None]
        return self._masks[ranks]

    @torch.no_grad()
    def load(self, policies: Mapping[str, PeftModel]) -> None:
        """Copy the present factors of these runs; a row's run is its position among them."""
        layers = [lora_layers(run, policy) for run, policy in policies.items()]
        for name in sorted(set().union(*layers) - self._layers.keys()):
            parent, _, attribute = name.rpartition(".")
            self._layers[name] = RowAdapterLinear(self.model.get_submodule(name), self)  # type: ignore[arg-type]
            setattr(self.model.get_submodule(parent), attribute, self._layers[name])
        for name, layer in self._layers.items():
            layer.load([of_run.get(name) for of_run in layers])

    def unload(self) -> None:
        """Free the copies of the factors."""
        for layer in self._layers.values():
            layer.load([])
