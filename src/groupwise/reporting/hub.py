"""Upload of the completions to a dataset on the Hub."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from huggingface_hub import HfApi

logger = logging.getLogger(__name__)


@functools.cache
def _api() -> HfApi:
    """Return the shared client: background jobs of one client run in order."""
    return HfApi()


def push_folder(folder: Path, repo: str, mode: str, token: str | None, private: bool | None) -> None:
    """Upload the parquet files of ``folder`` in the background to the directory ``mode`` of a dataset.

    Each call uploads the whole folder: the Hub skips files that it already has, and files missed by a failed
    upload are included in the next one. The interpreter waits for pending uploads at exit. Errors are logged
    as warnings.
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
        logger.warning("completions were not uploaded to the dataset %s: %s", repo, error)
