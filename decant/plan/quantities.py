from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from decant.plan.errors import InvalidPlan

_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "B": 10**9}
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0}


class Lengths(Protocol):
    """Distribution of lengths in tokens; the `share` of a quantile is below 1."""

    @property
    def low(self) -> int: ...

    @property
    def high(self) -> int: ...

    @property
    def mean(self) -> float: ...

    @property
    def mean_square(self) -> float: ...

    def mean_of(self, function: Callable[[float], float]) -> float: ...

    def quantile(self, share: float) -> int: ...

    def draw(self, rng: Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """Uniform distribution of lengths, both ends included."""

    low: int
    high: int

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    @property
    def mean_square(self) -> float:
        return ((self.high - self.low + 1) ** 2 - 1) / 12 + self.mean**2

    def mean_of(self, function: Callable[[float], float]) -> float:
        """Return the mean of a function by Simpson's rule over two halves."""
        step = (self.high - self.low) / 4
        values = [function(self.low + step * number) for number in range(5)]
        return sum(weight * value for weight, value in zip((1, 4, 2, 4, 1), values, strict=True)) / 12

    def quantile(self, share: float) -> int:
        return self.low + int(share * (self.high - self.low + 1))

    def draw(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives in seconds; None is no objective."""

    ttft: float | None = None
    tpot: float | None = None


def parse_tokens(field: str, text: str) -> Tokens:
    match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", text.replace(",", "").strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise InvalidPlan(field, "a number from 1 or a range such as 1500-2000", text)
    return Tokens(low, high)


def parse_bytes(field: str, text: str) -> int:
    """Parse a size: "40GB" is decimal, "40GiB" and "40G" are binary. Raises InvalidPlan."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*(?:([KMGT])(iB|B)?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise InvalidPlan(field, "a size such as 40GiB or 40GB", text)
    units = _DECIMAL if (match[3] or "").upper() == "B" else _BINARY
    size = int(float(match[1]) * (units[match[2].upper()] if match[2] else 1))
    return require_positive(field, size, text)


def parse_count(field: str, text: str) -> int:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGTB]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise InvalidPlan(field, "a number such as 13B or 494M", text)
    return require_positive(field, round(float(match[1]) * _DECIMAL.get(match[2].upper(), 1)), text)


def require_positive(field: str, value: int, text: str) -> int:
    if value <= 0:
        raise InvalidPlan(field, "above 0", text)
    return value


def parse_slo(text: str) -> Slo:
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*(ms|s|)", value.strip())
        if name not in ("ttft", "tpot") or match is None or float(match[1]) <= 0:
            raise InvalidPlan("--slo", "ttft=500ms,tpot=50ms (either may be left out)", part)
        values[name] = float(match[1]) * _SECONDS[match[2]]
    return Slo(**values)


def show_bytes(count: float) -> str:
    for unit in ("T", "G", "M", "K"):
        if count >= _BINARY[unit]:
            return f"{count / _BINARY[unit]:,.1f} {unit}iB"
    return f"{count:,.0f} B"


def show_seconds(seconds: float) -> str:
    if math.isinf(seconds):
        return "without bound"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
