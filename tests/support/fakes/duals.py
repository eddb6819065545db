"""Scalars with their derivatives, for equations that are written as loops over plain numbers.

A :class:`Dual` is a float with the partial derivatives by every variable it depends on (forward mode).
Nothing of torch or of the package is imported.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

Partials = dict[Hashable, float]


@dataclass(frozen=True, slots=True)
class Dual:
    """A value and its partial derivatives by variable."""

    value: float
    partials: Partials = field(default_factory=dict)

    def chained(self, value: float, slope: float) -> Dual:
        """Return a function of this number from its value and its derivative."""
        return Dual(value, {name: slope * partial for name, partial in self.partials.items()})

    def __add__(self, other: Number) -> Dual:
        if not isinstance(other, Dual):
            return Dual(self.value + other, self.partials)
        return total([self, other])

    def __mul__(self, other: Number) -> Dual:
        if not isinstance(other, Dual):
            return self.chained(self.value * other, other)
        left, right = self.chained(0.0, other.value), other.chained(0.0, self.value)
        return Dual(self.value * other.value, total([left, right]).partials)

    def __pow__(self, power: float) -> Dual:
        return self.chained(self.value**power, power * self.value ** (power - 1))

    def __neg__(self) -> Dual:
        return self * -1.0

    def __sub__(self, other: Number) -> Dual:
        return self + -other

    def __rsub__(self, other: float) -> Dual:
        return -self + other

    def __truediv__(self, other: Number) -> Dual:
        return self * other**-1.0 if isinstance(other, Dual) else self * (1.0 / other)

    def __rtruediv__(self, other: float) -> Dual:
        return self**-1.0 * other

    __radd__, __rmul__ = __add__, __mul__


Number = Dual | float


def total(terms: Iterable[Number]) -> Dual:
    """Return the sum."""
    value, partials = 0.0, {}
    for term in terms:
        value += stop(term)
        if isinstance(term, Dual):
            for name, partial in term.partials.items():
                partials[name] = partials.get(name, 0.0) + partial
    return Dual(value, partials)


def stop(x: Number) -> float:
    """Return the value alone: the stop-gradient sg[x]."""
    return x.value if isinstance(x, Dual) else x


def exp(x: Number) -> Number:
    value = math.exp(stop(x))
    return x.chained(value, value) if isinstance(x, Dual) else value


def log(x: Number) -> Number:
    return x.chained(math.log(x.value), 1 / x.value) if isinstance(x, Dual) else math.log(x)


def sigmoid(x: Number) -> Number:
    return 1.0 / (1.0 + exp(-x))


def minimum(x: Number, y: Number) -> Number:
    return x if stop(x) <= stop(y) else y


def maximum(x: Number, y: Number) -> Number:
    return x if stop(x) >= stop(y) else y


def clip(x: Number, low: float, high: float) -> Number:
    return minimum(maximum(x, low), high)
