"""State of the last completed optimizer step: one mark that checkpoints, failures and a new run share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol


class Stateful(Protocol):
    """Component with a state that a resumed run needs."""

    def mark(self) -> None:
        """Remember the present state; cheap."""

    def rollback(self) -> None:
        """Return to the marked state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the marked state as plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""


class StepState:
    """Mark the state of all components at the boundary between two optimizer steps.

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

    @property
    def is_inside_step(self) -> bool:
        """True from the first use of the step's data until its optimizer step is counted."""
        return self._begun_at == self.global_step()

    def begin_step(self) -> None:
        """Mark every component; the optimizer step begins."""
        self._mark()
        self._begun_at = self.global_step()

    def rollback(self) -> None:
        """Return every component to the mark."""
        for component in self.components().values():
            component.rollback()
        self._begun_at = None

    @contextmanager
    def rollback_on_failure(self) -> Iterator[None]:
        """Return to the mark if the block fails; outside a step, the state at its beginning is the mark."""
        if not self.is_inside_step:
            self._mark()
        try:
            yield
        except BaseException:
            self.rollback()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the marked state of every component; at a step boundary that is the present state."""
        if not self.is_inside_step:
            self._mark()
        return {name: component.state_dict() for name, component in self.components().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every component."""
        for name, component in self.components().items():
            component.load_state_dict(state[name])
        self.reset()

    def _mark(self) -> None:
        for component in self.components().values():
            component.mark()


class AttributeState:
    """State held by one attribute whose value is replaced, never changed in place.

    Args:
        dump, load: convert its value to plain values and back.
    """

    def __init__(
        self, owner: object, name: str, dump: Callable[[Any], Any], load: Callable[[Any], Any]
    ) -> None:
        self.owner, self.name, self.dump, self.load = owner, name, dump, load
        self.mark()

    def mark(self) -> None:
        self._marked = getattr(self.owner, self.name)

    def rollback(self) -> None:
        setattr(self.owner, self.name, self._marked)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.dump(self._marked)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        setattr(self.owner, self.name, self.load(state["value"]))
        self.mark()


class ObjectState:
    """State held by attributes of an object whose values are replaced, never changed in place.

    Args:
        component: has ``state_dict`` and ``load_state_dict``.
        names: attributes that a rollback restores.
    """

    def __init__(self, component: Any, names: tuple[str, ...]) -> None:
        self.component, self.names = component, names
        self.mark()

    def mark(self) -> None:
        self._marked = {name: getattr(self.component, name) for name in self.names}

    def rollback(self) -> None:
        vars(self.component).update(self._marked)

    def state_dict(self) -> dict[str, Any]:
        marked = copy.copy(self.component)
        vars(marked).update(self._marked)
        return marked.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.component.load_state_dict(state)
        self.mark()
