"""State of the last completed optimizer step: one mark that checkpoints, failures and a new run share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


class Stateful(Protocol):
    """Component with a state that a rollback and a resumed run need.

    One whose state differs between ranks has ``merge(snapshots, config)``: it returns the state of this rank
    from the snapshots of all ranks of a checkpoint, in rank order, whose number was another.
    """

    def snapshot(self) -> Any:
        """Return the present state: plain values, records and references to tensors, never copies of them."""

    def restore(self, snapshot: Any) -> None:
        """Return to a state of :meth:`snapshot`, of this process or from a checkpoint (host tensors)."""


@dataclass(frozen=True)
class Attribute:
    """State of an attribute whose value is frozen: the snapshot is the value itself.

    owner: object.
    name: name of its attribute.
    """

    owner: object
    name: str

    def snapshot(self) -> Any:
        return getattr(self.owner, self.name)

    def restore(self, snapshot: Any) -> None:
        setattr(self.owner, self.name, snapshot)


class StepState:
    """Mark of all components at the boundary between two optimizer steps.

    A checkpoint always contains the mark. Inside a step, state has moved on: a rollback returns to the mark.

    Args:
        global_step: returns the number of completed optimizer steps.
        components: returns the components by name.
    """

    def __init__(
        self, global_step: Callable[[], int], components: Callable[[], Mapping[str, Stateful]]
    ) -> None:
        self.global_step, self.components = global_step, components
        self.reset()

    def reset(self) -> None:
        """Forget the step that was begun: a new run starts."""
        self._begun_at: int | None = None
        self._marks: dict[str, Any] = {}

    @property
    def is_inside_step(self) -> bool:
        """True from the first use of the step's data until its optimizer step is counted."""
        return self._begun_at == self.global_step()

    @property
    def marks(self) -> dict[str, Any]:
        """Snapshot of every component at the last step boundary; between two steps, that is the present."""
        if self.is_inside_step:
            return dict(self._marks)
        return {name: component.snapshot() for name, component in self.components().items()}

    def begin_step(self) -> None:
        """Mark every component; the optimizer step begins."""
        self._begun_at = None  # a step that is begun again has another mark
        self._marks = self.marks
        self._begun_at = self.global_step()

    def restore(self, marks: Mapping[str, Any]) -> None:
        """Return every component to a mark: the last one, or that of a checkpoint."""
        for name, component in self.components().items():
            component.restore(marks[name])
        self.reset()

    @contextmanager
    def rollback_on_failure(self) -> Iterator[None]:
        """Return to the mark if the block fails; outside a step, the state at its beginning is the mark."""
        marks = self.marks
        try:
            yield
        except BaseException:
            self.restore(marks)
            raise
