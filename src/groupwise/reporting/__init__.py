"""Numbers and text that leave a run: metrics, timing, evaluation, tables, dashboards, model card."""

from groupwise.reporting.callback import GRPOCallback
from groupwise.reporting.completions import report_completions
from groupwise.reporting.dashboards import TrackioAlertsCallback
from groupwise.reporting.metrics_file import MetricsFileCallback
from groupwise.reporting.model_card import model_card, write_model_card
from groupwise.reporting.rollout_files import RolloutFiles
from groupwise.reporting.terminal import show_log_lines

__all__ = [
    "GRPOCallback",
    "MetricsFileCallback",
    "RolloutFiles",
    "TrackioAlertsCallback",
    "model_card",
    "report_completions",
    "show_log_lines",
    "write_model_card",
]
