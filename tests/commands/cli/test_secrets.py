"""Credentials do not reach output, logs, cards or saved files; nothing from elsewhere is executed.

Files: ``config/redact.py``.
"""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from groupwise import ConfigError, GRPOConfig
from groupwise.commands.cli import main
from groupwise.config.redact import masked, redact
from groupwise.hf import checkpointing
from groupwise.policy.introspection import load_config

PLANTED = {
    "HF_TOKEN": "hf_planted0000000000000000environment",
    "VLLM_API_KEY": "planted-key-of-the-server",
    "WANDB_API_KEY": "planted-key-of-wandb",
}
IN_CONFIG = ("hf_planted000000000000000000hubtoken", "hf_planted0000000000000000modelkwargs")
SECRETS = [*PLANTED.values(), *IN_CONFIG]


@pytest.fixture
def verbosity():
    """That of transformers, which a run's ``log_level`` sets for the process."""
    before = transformers_logging.get_verbosity()
    yield
    transformers_logging.set_verbosity(before)


@pytest.mark.usefixtures("verbosity")
def test_a_run_leaves_no_secret_anywhere(run_file, monkeypatch, capfd, caplog):
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.DEBUG)
    path = run_file(
        hub_token=IN_CONFIG[0],
        model_init_kwargs={"token": IN_CONFIG[1]},
        report_to="tensorboard",
        save_strategy="steps",
        save_steps=1,
        log_completions=True,
        log_level="debug",
    )
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "out/logs")
    assert main(["train", "--config", path]) == 0
    assert main(["env"]) == 0
    files = [item for item in Path("out").rglob("*") if item.is_file()]
    assert {"training_args.bin", "README.md", "trainer_state.json"} <= {item.name for item in files}
    assert any("events.out" in item.name for item in files)
    shown = capfd.readouterr()
    texts = {str(item): item.read_bytes() for item in files}
    texts |= {"out": shown.out.encode(), "err": shown.err.encode(), "log": caplog.text.encode()}
    assert [
        (name, secret) for name, text in texts.items() for secret in SECRETS if secret.encode() in text
    ] == []


def test_an_error_does_not_show_a_token(run_file, monkeypatch, capfd):
    monkeypatch.setenv("VLLM_API_KEY", PLANTED["VLLM_API_KEY"])
    wrong = f"{PLANTED['VLLM_API_KEY']}-{IN_CONFIG[0]}.jsonl"
    for flag in ([], ["--traceback"]):
        assert main(["train", "--config", run_file(dataset=wrong), *flag]) == 2
        shown = capfd.readouterr().err
        assert "<VLLM_API_KEY>-<HF_TOKEN>.jsonl" in shown
        assert "planted" not in shown


def test_copies_and_pickles_of_a_configuration_have_no_token():
    config = GRPOConfig(
        "out", hub_token="a", model_init_kwargs={"token": "b", "revision": "c"}, use_cpu=True, bf16=False
    )
    for other in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        assert other.hub_token is None and other.model_init_kwargs == {"token": None, "revision": "c"}
        assert other.beta == config.beta
    assert config.hub_token == "a" and config.model_init_kwargs["token"] == "b"
    for shown in (repr(config), str(config), f"{config}", str(config.to_dict()), config.to_json_string()):
        assert "'b'" not in shown and "beta" in shown
    assert repr(config).startswith("GRPOConfig(\n") and "'revision': 'c'" in repr(config)


def test_masking_goes_by_whole_names():
    given = {"api_key": "x", "deep": [{"auth_token": "y", "pad_token": "<pad>", "max_tokens": 3}], "token": 1}
    assert masked({"hf_token": "z", "bos_token": "<s>"}) == {"hf_token": None, "bos_token": "<s>"}
    assert masked(given) == {
        "api_key": None,
        "deep": [{"auth_token": None, "pad_token": "<pad>", "max_tokens": 3}],
        "token": 1,
    }


def test_short_values_of_secret_variables_are_not_redacted(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a")
    assert redact("a cat") == "a cat"


class _Harmful:
    """Object whose pickle opens a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("load", ["state", "reference"])
def test_checkpoints_are_read_without_running_what_they_hold(tmp_path, load):
    ran = tmp_path / "ran"
    name = "groupwise_state_0.pt" if load == "state" else "groupwise_reference.pt"
    torch.save({"world_size": 1, "harm": _Harmful(ran)}, tmp_path / name)
    refused = ConfigError if load == "state" else pickle.UnpicklingError
    with pytest.raises(refused) as error:
        if load == "state":
            checkpointing._load_state(str(tmp_path), 0)
        else:
            checkpointing.load_reference(str(tmp_path), torch.nn.Linear(1, 1), sync_ref_model=True)
    assert "Unsupported global: GLOBAL" in str(error.value.__cause__ or error.value)
    assert not ran.exists()
    torch.load(tmp_path / name, weights_only=False)  # the pickle does harm where it is trusted
    assert ran.exists()


def test_code_of_a_model_is_not_run_unless_asked_for(run_file, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran = tmp_path / "ran"
    remote = tmp_path / "remote"
    AutoConfig.for_model("llama").save_pretrained(remote)
    text = (remote / "config.json").read_text().replace('"llama"', '"strange"')
    auto = '"auto_map": {"AutoConfig": "configuration_strange.StrangeConfig"}, '
    (remote / "config.json").write_text(text.replace("{", "{" + auto, 1))
    (remote / "configuration_strange.py").write_text(
        f"open({str(ran)!r}, 'w')\nfrom transformers import LlamaConfig\n\n\n"
        "class StrangeConfig(LlamaConfig):\n    model_type = 'strange'\n"
    )
    assert main(["train", "--config", run_file(model=str(remote))]) == 2
    assert "trust_remote_code" in capfd.readouterr().err and not ran.exists()
    config = GRPOConfig("out", use_cpu=True, bf16=False, trust_remote_code=True)
    load_config(str(remote), config)
    assert ran.exists()
