"""The completions table in dashboards with tables: wandb and trackio."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Collection
from types import ModuleType

from groupwise.reporting.table import Images, Table

#: A table whose last column may hold image objects of the dashboard.
DashboardTable = dict[str, list]

logger = logging.getLogger(__name__)


def log_tables(table: Table, images: Images, key: str, step: int, report_to: Collection[str]) -> None:
    """Log the table as ``key`` to every dashboard in ``report_to`` that has an active run.

    Images are the last column. ``train/global_step`` is logged with the table, as transformers does for
    metrics. Errors are logged as warnings.
    """
    for name, log in _DASHBOARDS.items():
        # A dashboard with an active run is already imported.
        module = sys.modules.get(name)
        if name not in report_to or module is None:
            continue
        try:
            log(module, _with_images(table, images, module), {"train/global_step": step}, key)
        except Exception as error:
            logger.warning("completions of step %d were not logged to %s: %r", step, name, error)


def _with_images(table: Table, images: Images, module: ModuleType) -> DashboardTable:
    """Add a column with the images of each row as image objects of the dashboard."""
    if not images:
        return {**table}
    from PIL import Image

    name = "images"
    while name in table:
        name += "_"
    column = [[module.Image(Image.open(io.BytesIO(image))) for image in row] for row in images]
    return {**table, name: column}


def _log_to_wandb(wandb: ModuleType, table: DashboardTable, position: dict[str, int], key: str) -> None:
    if wandb.run is None:
        return
    data = [list(row) for row in zip(*table.values(), strict=True)]
    wandb.log({key: wandb.Table(columns=list(table), data=data, allow_mixed_types=True), **position})


def _log_to_trackio(trackio: ModuleType, table: DashboardTable, position: dict[str, int], key: str) -> None:
    if trackio.context_vars.current_run.get() is None:
        return
    import pandas as pd

    # dtype=object keeps a missing reward None; float columns would make it NaN
    trackio.log({key: trackio.Table(dataframe=pd.DataFrame(table, dtype=object)), **position})


_DASHBOARDS: dict[str, Callable[[ModuleType, DashboardTable, dict[str, int], str], None]] = {
    "wandb": _log_to_wandb,
    "trackio": _log_to_trackio,
}
