"""Credentials in settings and texts, under the names and in the places where libraries have them."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
from transformers import TrainerState

from groupwise import GRPOConfig
from groupwise.commands.report.html_report import write_report
from groupwise.config.redact import masked, redact, redacted_command, redacted_json
from groupwise.reporting.metrics_file import MetricsFileCallback

HIDDEN = "Zk3jd82hQwpL0aX7"
#: Settings with a credential, which contains HIDDEN.
PLANTED = [
    *({name: HIDDEN} for name in ("apiKey", "accessToken", "hubToken", "clientSecret", "xApiKey", "HFToken")),
    *(
        {name: HIDDEN}
        for name in ("pw", "pwd", "pass", "auth", "pat", "jwt", "sas", "OPENAI_KEY", "GITHUB_PAT")
    ),
    *(
        {name: HIDDEN}
        for name in ("PGPASSWORD", "MYSQL_PWD", "AWSAccessKeyId", "SENTRY_DSN", "session-cookie")
    ),
    {"password": f'quote" and \\ {HIDDEN}'},
    {"api_keys": [HIDDEN, f"b{HIDDEN}"]},
    {"env": {"auth": [["user", HIDDEN]]}},
    {"password": HIDDEN.encode()},
    *(
        {name: HIDDEN}
        for name in (
            "OPENAI_API_KEY_2",
            "HF_TOKEN_READ",
            "DB_PASSWORD_PROD",
            "private_key_pem",
            "OPENAI_KEY_PROD",
        )
    ),
    {"tokens": [HIDDEN]},
    {"env": {"headers": [{"a": [f"]{HIDDEN}"]}, HIDDEN]}},
    {"url": f"https://b.s3.amazonaws.com/x?X-Amz-Credential={HIDDEN}&X-Amz-Signature=0{HIDDEN}&a=1"},
    {"url": f"https://account.blob.core.windows.net/c?sv=2022&sig={HIDDEN}%3D"},
    {"url": f"https://host/callback#access_token={HIDDEN}&state=1"},
    {"url": f"postgres://user:p@ss{HIDDEN}@host:5432/db"},
    {"url": f"postgres://user:a/b{HIDDEN}@host:5432/db"},
    {"note": f"https://a:b@c://user:{HIDDEN}@host"},
    {"url": f"redis://:{HIDDEN}@host:6379/0"},
    {"args": f"retries=3 Authorization: Bearer {HIDDEN}"},
    {"args": f"header 'X-Api-Key: {HIDDEN}'"},
    {"args": f'{{"Authorization": "Basic {HIDDEN}"}}'},
    {"optim_args": f"beta=1,api_key={HIDDEN}"},
    {"command": f"Bearer {HIDDEN}"},
    {"error": f"ValueError: api_key: {HIDDEN} is wrong"},
    {"error": f"x: token={HIDDEN}"},
    {"error": f"API key: a,b)&;=\"'{HIDDEN}"},
    {"error": f"password=b'correct horse {HIDDEN}'"},
    {"error": f"Cookie: session=a; other={HIDDEN}"},
    {"error": f"api_keys = [['a]'],\n 'cut {HIDDEN}"},
    {"command": f"serve --api-key={HIDDEN} -e HF_TOKEN_READ={HIDDEN}"},
    {"note": f"ghp_{HIDDEN}{HIDDEN}"},
    {"note": f"sk-proj-{HIDDEN}{HIDDEN}"},
    {"note": f"-----BEGIN RSA PRIVATE KEY-----\n{HIDDEN}\n-----END RSA PRIVATE KEY-----"},
    {"note": f"-----BEGIN PRIVATE KEY-----\nProc-Type: 4\n{HIDDEN}\n-----END PRIVATE KEY-----"},
    {"note": SimpleNamespace(api_key=HIDDEN)},  # saved as its text
    {f"https://user:{HIDDEN}@host": 1},
]


@pytest.mark.parametrize("settings", PLANTED, ids=lambda settings: str(settings).replace(HIDDEN, "…")[:60])
def test_planted_credentials_are_in_no_saved_setting(settings):
    assert HIDDEN not in redacted_json({"settings": settings})
    assert HIDDEN not in redact(json.dumps({"settings": settings}, default=str))


def test_a_report_shows_no_credential_of_settings_that_others_saved(tmp_path):
    settings = {f"setting_{row}": given for row, given in enumerate(PLANTED)}
    saved = {"model": "m", "world_size": 1, "settings": settings}
    (tmp_path / "settings.json").write_text(json.dumps(saved, default=str))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 0, "reward": 1}\n')
    page = write_report([tmp_path]).read_text()
    assert "setting_3" in page and HIDDEN not in page


def test_settings_are_saved_without_credentials(tmp_path, monkeypatch):
    secret = 'correct "horse" \\ battery'
    monkeypatch.setenv("SOMEONES_PASSPHRASE", secret)
    settings = {"planted": PLANTED, "note": f"with {secret}", "beta": 0.5}
    args = SimpleNamespace(output_dir=str(tmp_path), world_size=1, to_dict=lambda: settings)
    MetricsFileCallback().on_train_begin(args, TrainerState(is_world_process_zero=True), None)
    text = (tmp_path / "settings.json").read_text()
    assert HIDDEN not in text and "horse" not in text
    assert json.loads(text)["settings"]["beta"] == 0.5
    assert redact(json.dumps(secret)) == '"<SOMEONES_PASSPHRASE>"'


@pytest.mark.parametrize(
    "kept",
    [
        {"prompt_key": "question", "sort_key": "len", "tool_call_token": "<tool>", "pad_token": "<pad>"},
        {"text": "eos_token='</s>', hub_token=None, api_key='', max_tokens: 128, token: 17"},
        {"url": "https://host:8000/v1?limit=3&user=a@b#section", "model": "sk-learn/based-model-v2"},
        {"path": "/data/keys/password.txt", "commit": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"},
        {"text": "no end token: no completion ends; embed_tokens.weight: a shape; tokens_per_s: 1234.5"},
        {"error": "unknown key: lr. query_key_value.weight: another shape. eval_pass_at_k=[1, 8]"},
        {"text": "Basic training; the bearer of news; a password is needed", "compass": "north"},
    ],
)
def test_other_settings_are_kept(kept):
    assert json.loads(redacted_json(kept)) == kept and masked(kept) == kept


def test_a_chat_template_is_copied_unchanged():
    template = "{%- set api_token = 'x' %}{{ bos_token }}{% for key in keys %}password: {{ key }}{% endfor %}"
    config = GRPOConfig("out", chat_template_kwargs={"template": template}, use_cpu=True, bf16=False)
    assert masked(vars(config))["chat_template_kwargs"] == {"template": template}


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
        ("https://host/?a=1&api_key=pw#x", "https://host/?a=1&api_key=<removed>#x"),
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


def test_what_follows_a_value_is_kept():
    given = "GRPOConfig(headers={'a': ['x', (1)]}, lr=1, hub_token='y', beta=2) --api-key=z --max_steps 3"
    shown = (
        "GRPOConfig(headers=<removed>, lr=1, hub_token=<removed>, beta=2) --api-key=<removed> --max_steps 3"
    )
    assert redact(given) == shown == redact(shown)


def test_options_of_commands_lose_their_values():
    given = [
        "--hub_token",
        "x y",
        "z",
        "--max_steps",
        "3",
        "--api-key=x y",
        "--max_tokens",
        "a",
        "-e",
        "PW=x",
    ]
    shown = ["--hub_token", "<removed>", "<removed>", *given[3:5], "--api-key=<removed>", *given[6:9]]
    assert redacted_command(given) == [*shown, "PW=<removed>"]


def test_of_two_credentials_the_longer_one_is_replaced_first(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "correct-horse")
    monkeypatch.setenv("B_TOKEN", "correct-horse-battery")
    assert redact("correct-horse-battery") == "<B_TOKEN>"


@pytest.mark.timeout(60)  # where every match begins a search to the end, minutes
@pytest.mark.parametrize("part", ["a:", "://a:b", "-eyJabcdefgh", "a=token, ", "token:"])
def test_long_texts_take_linear_time(part):
    text = part * (240_000 // len(part))
    assert redact(text) in (text, "token:<removed>:")


def test_a_warning_about_a_setting_does_not_show_its_credentials(caplog):
    with caplog.at_level(logging.WARNING):
        GRPOConfig("out", vllm_engine_kwargs={"headers": {"Authorization": "Bearer hidden"}})
    assert "vllm_engine_kwargs={'headers': {'Authorization': None}} has no effect" in caplog.text
