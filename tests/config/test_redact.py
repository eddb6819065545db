"""Credentials in settings and texts, under the names and in the places where libraries have them."""

from __future__ import annotations

import logging

import pytest

from groupwise import GRPOConfig
from groupwise.config.redact import masked, redact


@pytest.mark.parametrize(
    "name",
    [
        *("token", "hub_token", "api_key", "api-key", "x-api-key", "apikey", "Authorization", "secret_key"),
        *(
            "client_secret",
            "aws_secret_access_key",
            "private_key",
            "passwd",
            "password",
            "credentials",
            "GH_TOKEN",
        ),
    ],
)
def test_strings_under_names_of_credentials_are_masked(name):
    assert masked({"engine": {name: "hidden", "other": "shown"}}) == {
        "engine": {name: None, "other": "shown"}
    }
    assert masked({name: ["hidden", "too"]}) == {name: [None, None]}


def test_headers_are_masked_whatever_their_names():
    assert masked({"headers": {"X-Team": "hidden"}}) == {"headers": {"X-Team": None}}


def test_tokens_of_a_tokenizer_and_numbers_are_kept():
    kept = {"eos_token": "</s>", "pad_token": "<pad>", "num_token": 3, "key": "value", "keyboard": "qwerty"}
    assert masked(kept) == kept


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:pw@host:8000/v1", "http://<removed>@host:8000/v1"),
        ("https://host/?a=1&api_key=pw#x", "https://host/?a=1&<removed>#x"),
        ("http://host:8000/a@b", "http://host:8000/a@b"),
    ],
)
def test_credentials_of_urls_are_removed(url, shown):
    assert masked({"vllm_server_base_url": [url]}) == {"vllm_server_base_url": [shown]}
    assert redact(f"no answer from {url}.") == f"no answer from {shown}."


def test_secrets_of_the_environment_are_known_by_their_names(monkeypatch):
    monkeypatch.setenv("SOMEONES_API_KEY", "correct-horse")
    monkeypatch.setenv("SOMEONES_KEYBOARD", "qwertyuiop")
    assert redact("correct-horse qwertyuiop") == "<SOMEONES_API_KEY> qwertyuiop"


def test_a_warning_about_a_setting_does_not_show_its_credentials(caplog):
    with caplog.at_level(logging.WARNING):
        GRPOConfig("out", vllm_engine_kwargs={"headers": {"Authorization": "Bearer hidden"}})
    assert "vllm_engine_kwargs={'headers': {'Authorization': None}} has no effect" in caplog.text
