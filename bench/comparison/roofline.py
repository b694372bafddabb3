"""The machine's limit for each step of a model: the larger of bytes / bandwidth and operations / product rate.

A step reads the weights of all linear layers once and multiplies them by each token; the head by the sampled rows only,
if any. Everything else is omitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Step(NamedTuple):
    """A step that ended ``ended`` seconds after the start and sampled ``rows``."""

    ended: float
    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Elements of a dense model, and bytes per element; a tied head is a packed copy of the embedding ``table``."""

    body: int
    head: int
    table: int
    itemsize: int

    def bytes_read(self, rows: int) -> int:
        return (self.body + self.head * (rows > 0)) * self.itemsize

    def operations(self, tokens: int, rows: int) -> int:
        return 2 * (self.body * tokens + self.head * rows)

    @property
    def held(self) -> int:
        return (self.body + self.head + self.table) * self.itemsize


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes read, and operations of packed products, per second."""

    bandwidth: float
    products: float

    def seconds(self, weights: Weights, tokens: int, rows: int) -> float:
        read = weights.bytes_read(rows) / self.bandwidth
        return max(read, weights.operations(tokens, rows) / self.products)

    def all_seconds(self, weights: Weights, steps: Iterable[Step]) -> float:
        return sum(self.seconds(weights, step.tokens, step.rows) for step in steps)
