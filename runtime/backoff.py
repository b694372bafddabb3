from __future__ import annotations

from dataclasses import dataclass

_MAX_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds to wait after failures in a row: ``first_s``, doubled with each, up to ``longest_s``."""

    first_s: float
    longest_s: float

    def seconds(self, failures: int) -> float:
        """Return the wait after ``failures`` in a row, from 1."""
        return min(self.longest_s, self.first_s * float(2 ** min(failures - 1, _MAX_DOUBLINGS)))
