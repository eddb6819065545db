"""Completions as a dataset on the Hub."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from huggingface_hub import HfApi

logger = logging.getLogger(__name__)


@functools.cache
def _api() -> HfApi:
    """One client, because a client works off its background jobs in order."""
    return HfApi()


def push_folder(folder: Path, repo: str, mode: str, token: str | None, private: bool | None) -> None:
    """Upload the parquet files of ``folder`` in the background, as the directory ``mode`` of a dataset.

    The whole folder goes each time: files that are there already cost nothing, and what a failed upload
    missed comes with the next one. The interpreter waits for the last upload before it ends. Errors are
    logged.
    """
    api = _api()
    api.run_as_future(_push, api, folder, repo, mode, token, private)


def _push(api: HfApi, folder: Path, repo: str, mode: str, token: str | None, private: bool | None) -> None:
    try:
        api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True, token=token)
        api.upload_folder(
            repo_id=repo,
            repo_type="dataset",
            folder_path=folder,
            path_in_repo=mode,
            allow_patterns="*.parquet",
            commit_message="Add completions",
            token=token,
        )
    except Exception as error:
        logger.warning("The completions could not be pushed to the dataset %s: %s", repo, error)
