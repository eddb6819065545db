"""A ``transformers.Trainer`` that logs what its books hold."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from groupwise import reporting
from groupwise.config.grpo_config import GRPOConfig
from groupwise.reporting.evaluation import EvaluationRecord
from groupwise.reporting.metrics import MetricBuffer


class RecordingTrainer(Trainer):
    """Joins the metrics and completions of all ranks once per log, and writes the model card."""

    args: GRPOConfig  # type: ignore[assignment]
    books: dict[str, MetricBuffer]
    evaluation: EvaluationRecord
    _filters = True
    _window_loss: Any = 0.0

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``Trainer``."""
        self._filters = self.args.logging_nan_inf_filter
        try:
            return super().train(*args, **kwargs)
        finally:
            self.args.logging_nan_inf_filter, self._window_loss = self._filters, 0.0

    def loss_to_log(self, loss: torch.Tensor, *, last: bool) -> torch.Tensor:
        """The loss of the window with its last micro-batch, zero with those before.

        ``logging_nan_inf_filter`` makes ``Trainer`` read what each micro-batch returns, and so wait for the
        device: now it does that at the end of a window, and leaves out a window where it left out a part.
        """
        self._window_loss = self._window_loss + loss
        self.args.logging_nan_inf_filter = self._filters and last
        if not last:
            return torch.zeros_like(loss)
        window_loss, self._window_loss = self._window_loss, 0.0
        return window_loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; a training log also carries the metrics of the steps since the last one, joined over ranks."""
        if "loss" in logs:
            logs.update(self._drain("train", "train"))
        super().log(logs, start_time)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in ``Trainer``; the metrics returned also hold those of generation, rewards and loss."""
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        values = self._drain("eval", prefix)
        values.update(self.evaluation.close(prefix, self.args.num_generations_eval, gather_object))  # type: ignore[arg-type]
        own = {f"{prefix}_{name}": value for name, value in values.items()}
        return output._replace(metrics={**(output.metrics or {}), **own})

    def _drain(self, mode: str, label: str) -> dict[str, float]:
        values, rows = self.books[mode].drain(lambda part: gather_object([part]))
        if rows and self.is_world_process_zero():
            reporting.report_completions(rows, self.state.global_step, self.args, self.args.output_dir, label)
        return values

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None, **_: Any
    ) -> None:
        """Write ``README.md`` into the output directory."""
        if self.is_world_process_zero():
            reporting.write_model_card(self, model_name, dataset_name, tags)
