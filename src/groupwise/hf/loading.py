"""A ``transformers.Trainer`` whose loaders hand out the rows of whole groups."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer

from groupwise.config.grpo_config import GRPOConfig
from groupwise.data.batches import GroupSampler, as_rows
from groupwise.data.build import PreparedData, evaluation_rows, num_micro_batches
from groupwise.data.dynamic_sampling import Feed
from groupwise.data.prompt_source import StepCounterDataset


class LoadingTrainer(Trainer):
    """Trains on the rows that ``make_group_sampler`` names, evaluates on every row, once per completion."""

    args: GRPOConfig  # type: ignore[assignment]
    feed: Feed
    prepared_data: PreparedData

    def make_group_sampler(self, dataset: Any) -> GroupSampler:
        """Indices of the rows of each generation batch."""
        raise NotImplementedError

    def get_train_dataloader(self) -> Any:
        """A loader position is one micro-batch; the first of a generation batch carries the rows it uses.

        With a stream or dynamic sampling the positions carry nothing: the feed gives the rows.
        """
        if self.feed.source is not None:
            positions = StepCounterDataset(
                num_micro_batches(self.train_dataset, self.args) * self.args.world_size
            )
            return self.accelerator.prepare(DataLoader(positions, batch_size=1, collate_fn=as_rows))
        return self._get_dataloader(
            dataset=self.train_dataset,  # type: ignore[arg-type]
            description="Training",
            batch_size=self._train_batch_size * self.args.steps_per_generation,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.make_group_sampler(self.train_dataset if train_dataset is None else train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Every evaluation row ``num_generations_eval`` times in a row."""
        named = isinstance(eval_dataset, str)
        dataset: Any = self.eval_dataset if named or eval_dataset is None else eval_dataset
        if dataset is None or (not named and dataset is not self.eval_dataset):
            dataset = self.prepared_data.checked_eval(dataset)
        return self._get_dataloader(
            dataset=evaluation_rows(dataset[eval_dataset] if named else dataset, self.args),
            description="Evaluation",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,  # type: ignore[arg-type]
            dataloader_key=eval_dataset if named else "eval",
        )

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["prompt", "image", "images"]  # type: ignore[assignment]

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # the records are built on the training device


def loss_is_scaled(*_: Any, **__: Any) -> None:
    """Stand in for ``compute_loss_func``: never called, because ``compute_loss`` is overridden."""
    raise AssertionError("compute_loss is overridden")
