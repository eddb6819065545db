"""The completions table in the dashboards that have tables: wandb and trackio."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Collection
from typing import Any

from groupwise.reporting.table import Images, Table

logger = logging.getLogger(__name__)


def log_tables(table: Table, images: Images, key: str, step: int, report_to: Collection[str]) -> None:
    """Log the table as ``key`` to each dashboard of ``report_to`` that has an active run.

    Images become one more column. The table carries ``train/global_step`` as the metrics of ``transformers``
    do. Errors are logged.
    """
    for name, log in _DASHBOARDS.items():
        # A dashboard with an active run has been imported: nothing is gained by importing it here.
        module = sys.modules.get(name)
        if name not in report_to or module is None:
            continue
        try:
            log(module, _with_images(table, images, module), {"train/global_step": step}, key)
        except Exception as error:
            logger.warning("The completions of step %d could not be logged to %s: %r", step, name, error)


def _with_images(table: Table, images: Images, module: Any) -> Table:
    """The table with the images of each row as the dashboard's own."""
    if not images:
        return table
    from PIL import Image

    name = "images"
    while name in table:
        name += "_"
    shown = [[module.Image(Image.open(io.BytesIO(image))) for image in row] for row in images]
    return {**table, name: shown}


def _log_to_wandb(wandb: Any, table: Table, position: dict[str, int], key: str) -> None:
    if wandb.run is None:
        return
    data = [list(row) for row in zip(*table.values(), strict=True)]
    wandb.log({key: wandb.Table(columns=list(table), data=data, allow_mixed_types=True), **position})


def _log_to_trackio(trackio: Any, table: Table, position: dict[str, int], key: str) -> None:
    if trackio.context_vars.current_run.get() is None:
        return
    import pandas as pd

    # object: other types would turn a missing reward into NaN
    trackio.log({key: trackio.Table(dataframe=pd.DataFrame(table, dtype=object)), **position})


_DASHBOARDS: dict[str, Callable[[Any, Table, dict[str, int], str], None]] = {
    "wandb": _log_to_wandb,
    "trackio": _log_to_trackio,
}
