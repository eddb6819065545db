"""Numbers and text that leave a run: metrics, timing, evaluation, tables, dashboards and the model card."""

from groupwise.reporting.completions import report_completions
from groupwise.reporting.model_card import model_card, write_model_card
from groupwise.reporting.progress import RewardProgressCallback, show_rewards_in_progress

__all__ = [
    "RewardProgressCallback",
    "model_card",
    "report_completions",
    "show_rewards_in_progress",
    "write_model_card",
]
