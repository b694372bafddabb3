from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random

from decant.bench.errors import InvalidBenchmark

_FORMS = "a number, a range such as 100-200, or exp:MEAN:LONGEST"


@dataclass(frozen=True, slots=True)
class Uniform:
    low: int
    high: int

    def draw(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential lengths, rounded up and cut at `high`."""

    mean: float
    high: int

    def draw(self, rng: Random) -> int:
        """Draw by the inverse of the cut distribution: to draw again would not end where `high` is far below `mean`."""
        share = -math.expm1(-self.high / self.mean)
        length = math.ceil(-self.mean * math.log1p(-share * rng.random()))
        return min(max(length, 1), self.high)


Lengths = Uniform | Exponential


def parse_lengths(field: str, text: str) -> Lengths:
    if match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text):
        low, high = int(match[1]), int(match[2] or match[1])
        if 1 <= low <= high:
            return Uniform(low, high)
    elif (match := re.fullmatch(r"exp:(\d{1,9}):(\d{1,9})", text)) and int(match[1]) >= 1 and int(match[2]) >= 1:
        return Exponential(int(match[1]), int(match[2]))
    raise InvalidBenchmark(field, _FORMS, text)
