"""The machine's limit for each step of a model: the larger of bytes / bandwidth and operations / product rate.

A step reads the weights of all linear layers once and multiplies them by each of its tokens. It reads the head when it
samples a token, and multiplies it by the sampled rows only. The limit omits attention and everything else, so no
engine reaches it; it serves for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Step(NamedTuple):
    """A completed step: its end in seconds after the start, the computed tokens, the sampled rows."""

    ended: float
    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Elements of a dense model's linear layers and of its head, and bytes per element in the served dtype.

    ``table``: elements of the embedding table, when a tied head has a separate packed copy.
    """

    body: int
    head: int
    table: int
    itemsize: int

    def bytes_read(self, rows: int) -> int:
        """Bytes that a step with ``rows`` sampled rows reads."""
        return (self.body + self.head * (rows > 0)) * self.itemsize

    def operations(self, tokens: int, rows: int) -> int:
        """Operations of a step: one multiplication and one addition per element and row."""
        return 2 * (self.body * tokens + self.head * rows)

    @property
    def held(self) -> int:
        """Bytes of all weights in memory."""
        return (self.body + self.head + self.table) * self.itemsize


@dataclass(frozen=True, slots=True)
class Rates:
    """The machine's limits: bytes read per second, operations per second in a packed product."""

    bandwidth: float
    products: float

    def seconds(self, weights: Weights, tokens: int, rows: int) -> float:
        """The lower bound of a step's time."""
        read = weights.bytes_read(rows) / self.bandwidth
        return max(read, weights.operations(tokens, rows) / self.products)

    def all_seconds(self, weights: Weights, steps: Iterable[Step]) -> float:
        """The lower bound of a sequence of steps."""
        return sum(self.seconds(weights, step.tokens, step.rows) for step in steps)
