"""``use_kernels=True`` of transformers: the policy trains with layers whose forward is a kernel of the Hub.

A kernel needs a GPU and a download: here transformers' function that installs them is replaced by one that
installs an equal computation.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from support.runs import policy, trainer
from transformers import modeling_utils
from transformers.integrations import hub_kernels

from groupwise.policy.weight_iterator import PolicyWeights


@pytest.fixture
def saved(tmp_path):
    policy().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run_of(saved, directory, **model_init_kwargs):
    run = trainer(directory, model=saved, model_init_kwargs={"dtype": "float32", **model_init_kwargs})
    run.train()
    return run


@pytest.mark.slow
def test_a_policy_with_kernels_trains_as_one_without(saved, tmp_path, monkeypatch):
    calls = []

    def normalize(module, hidden):
        calls.append(tuple(hidden.shape))
        return type(module).forward(module, hidden)

    def kernelize(model, mode=None):
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = partial(normalize, module)

    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda *_, **__: True)
    monkeypatch.setattr(modeling_utils, "kernelize", kernelize)
    monkeypatch.setattr(hub_kernels, "register_kernel_mapping_transformers", lambda *_: None)
    with_kernels = run_of(saved, tmp_path / "kernels", use_kernels=True)
    assert calls and with_kernels.logprob_computer.layout == "shared_prefix"
    calls.clear()
    plain = run_of(saved, tmp_path / "plain")
    assert not calls
    ours, theirs = (dict(PolicyWeights(run.model).full()) for run in (with_kernels, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.skipif(find_spec("kernels") is not None, reason="kernels is installed")
def test_without_the_package_the_error_names_it(saved, tmp_path):
    with pytest.raises(Exception, match=r"[Kk]ernels.*install"):
        run_of(saved, tmp_path / "missing", use_kernels=True)
