"""What a machine allows a model, step by step: the larger of bytes over bandwidth and operations over product rate.

A step reads the weights of all linear layers once and multiplies them by each of its tokens. The head is read when a
token is sampled, and multiplied by the sampled rows alone. Attention and everything else is left out, so no engine
gets there: the limit is for comparing, not for reaching.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Step(NamedTuple):
    """A step that was taken: seconds after the start at which it ended, tokens computed, rows sampled."""

    ended: float
    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Elements of a dense model's linear layers and of its head, and the bytes of one in the served dtype.

    ``table``: elements of the table that tokens are looked up in, where a tied head is laid out apart from it.
    """

    body: int
    head: int
    table: int
    itemsize: int

    def bytes_read(self, rows: int) -> int:
        """By one step that samples ``rows`` rows."""
        return (self.body + self.head * (rows > 0)) * self.itemsize

    def operations(self, tokens: int, rows: int) -> int:
        """Of one step: a multiplication and an addition per element and row."""
        return 2 * (self.body * tokens + self.head * rows)

    @property
    def held(self) -> int:
        """Bytes of all of it, held once."""
        return (self.body + self.head + self.table) * self.itemsize


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine reaches alone: bytes read a second, operations a second in a packed product."""

    bandwidth: float
    products: float

    def seconds(self, weights: Weights, tokens: int, rows: int) -> float:
        """The least that a step can take."""
        read = weights.bytes_read(rows) / self.bandwidth
        return max(read, weights.operations(tokens, rows) / self.products)

    def all_seconds(self, weights: Weights, steps: Iterable[Step]) -> float:
        """The least that steps can take one after the other."""
        return sum(self.seconds(weights, step.tokens, step.rows) for step in steps)
