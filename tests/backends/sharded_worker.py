"""One of two processes: a model under ``fully_shard`` streams the same weights as it did whole."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from runs import policy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from groupwise.backends.weight_stream import weight_stream


def lora():
    model = get_peft_model(policy(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    checked = []
    for name, build in (("plain", policy), ("lora", lora)):
        model = build()
        expected = {key: tensor.clone() for key, tensor in weight_stream(model)}
        layers = (model if name == "plain" else model.base_model.model).model.layers
        for part in [*layers, model]:
            fully_shard(part, mesh=mesh)
        local = [parameter.to_local().clone() for parameter in model.parameters()]
        assert sum(t.numel() for t in local) < sum(p.numel() for p in model.parameters())
        for _ in range(2):
            got = dict(weight_stream(model))
            assert got.keys() == expected.keys()
            for key, tensor in expected.items():
                torch.testing.assert_close(got[key], tensor, rtol=1e-6, atol=1e-7)
        for parameter, before in zip(model.parameters(), local, strict=True):
            assert torch.equal(parameter.to_local(), before)
        checked.append(name)
    os.write(1, f"gathered: {' '.join(checked)}\n".encode())  # in one piece, unlike print
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
