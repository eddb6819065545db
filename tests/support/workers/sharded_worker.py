"""One of two processes: a model under ``fully_shard`` or FSDP streams the same weights as it did whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from groupwise.errors import BackendError
from groupwise.policy.weight_iterator import PolicyWeights, gatherable, weight_iterator
from support.runs import policy


def lora():
    model = get_peft_model(policy(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tied():
    return policy(tie_word_embeddings=True)


def check_units(build: Callable[[], Any], original: bool) -> str:
    """A unit for each layer and, with parameters that stay visible, one for each part of an adapter."""
    model = build()
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    expected = {key: tensor.clone() for key, tensor in weight_iterator(model)}
    wrapped = {id(layer) for layer in base.model.layers}
    if original:
        wrapped |= {id(part) for name, part in model.named_modules() if name.endswith(".default")}
    else:  # what one flat parameter holds needs a gradient or does not
        model.requires_grad_(True)

    def wraps(module: Any, recurse: bool, **_: Any) -> bool:
        return recurse or id(module) in wrapped

    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=wraps,
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )
    for _ in range(2):  # before and after the first forward, which prepares the units
        got = dict(weight_iterator(sharded))
        assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(got[key], tensor, rtol=1e-6, atol=1e-7, msg=key)
        ids = torch.arange(2, 10)[None]
        sharded(input_ids=ids, labels=ids).loss.backward()
    assert gatherable(sharded) is sharded
    if build is lora:
        with pytest.raises(BackendError, match="fsdp_version"):
            PolicyWeights(sharded).adapter()
    with torch.no_grad():
        held = 0
        for parameter in sharded.parameters():
            parameter.add_(1.0)
            held += parameter.numel()
    assert held < 0.6 * sum(tensor.numel() for tensor in expected.values())  # shards
    changed = dict(weight_iterator(sharded))
    assert all(not torch.equal(changed[key], tensor) for key, tensor in expected.items())
    return f"{build.__name__}-{original}"


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    checked = []
    for name, build in (("plain", policy), ("lora", lora)):
        model = build()
        expected = {key: tensor.clone() for key, tensor in weight_iterator(model)}
        layers = (model if name == "plain" else model.base_model.model).model.layers
        for part in [*layers, model]:
            fully_shard(part, mesh=mesh)
        local = [parameter.to_local().clone() for parameter in model.parameters()]
        assert sum(t.numel() for t in local) < sum(p.numel() for p in model.parameters())
        for _ in range(2):
            got = dict(weight_iterator(model))
            assert got.keys() == expected.keys()
            for key, tensor in expected.items():
                torch.testing.assert_close(got[key], tensor, rtol=1e-6, atol=1e-7)
        for parameter, before in zip(model.parameters(), local, strict=True):
            assert torch.equal(parameter.to_local(), before)
        checked.append(name)
    checked += [check_units(build, original) for build in (policy, tied, lora) for original in (True, False)]
    os.write(1, f"gathered: {' '.join(checked)}\n".encode())  # in one piece, unlike print
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
