from __future__ import annotations

import logging

import pytest
from huggingface_hub import HfApi

from groupwise.reporting import hub, report_completions


@pytest.fixture
def api(monkeypatch):
    """A real client without a server: nothing listens on the discard port of this machine."""
    client = HfApi(endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(hub, "_api", lambda: client)
    return client


def test_the_folder_is_uploaded_as_a_dataset(api, tmp_path, monkeypatch, make_args, make_row):
    calls = []
    monkeypatch.setattr(api, "create_repo", lambda repo, **kwargs: calls.append((repo, kwargs)))
    monkeypatch.setattr(api, "upload_folder", lambda **kwargs: calls.append(kwargs))
    args = make_args(
        num_completions_to_print=0,
        log_completions=True,
        log_completions_hub_repo="someone/texts",
        hub_token="hf_abc",
        hub_private_repo=True,
    )
    report_completions([make_row()], 3, args, str(tmp_path), mode="eval")
    api.run_as_future(lambda: None).result()  # jobs run in order
    (repo, made), sent = calls
    assert repo == "someone/texts"
    assert made == {"repo_type": "dataset", "private": True, "exist_ok": True, "token": "hf_abc"}
    assert (sent["repo_id"], sent["repo_type"], sent["path_in_repo"]) == ("someone/texts", "dataset", "eval")
    assert (sent["folder_path"], sent["token"]) == (tmp_path / "completions_eval", "hf_abc")


def test_an_unreachable_hub_is_a_warning(api, tmp_path, caplog, make_args, make_row):
    args = make_args(
        num_completions_to_print=0,
        log_completions=True,
        log_completions_hub_repo="someone/texts",
        hub_token="hf_abc",
    )
    with caplog.at_level(logging.WARNING, "groupwise.reporting.hub"):
        report_completions([make_row()], 3, args, str(tmp_path))
        api.run_as_future(lambda: None).result()
    (record,) = [record for record in caplog.records if record.name == "groupwise.reporting.hub"]
    assert "were not uploaded to the dataset someone/texts" in record.getMessage()
    assert "hf_abc" not in caplog.text
    assert (tmp_path / "completions" / "completions_00003.parquet").exists()


def test_no_repository_no_upload(api, tmp_path, monkeypatch, make_args, make_row):
    jobs = []
    monkeypatch.setattr(api, "run_as_future", lambda *job: jobs.append(job))
    report_completions([make_row()], 3, make_args(num_completions_to_print=0), str(tmp_path))
    assert jobs == []
