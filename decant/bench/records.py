from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from decant.client.results import Receipt


class TokenTimes:
    """Seconds from the sending of a request to its tokens."""

    __slots__ = ()

    sent: float
    tokens: Sequence[float]

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.tokens[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """None for a single token."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None

    @property
    def itls(self) -> list[float]:
        return [after - before for before, after in pairwise(self.tokens)]


@dataclass(slots=True)
class Record(TokenTimes):
    """Seconds of one monotonic clock.

    tokens   when each arrived; those of one message share a time
    due      when it was to be sent
    error    reason of its failure, or empty
    receipt  None unless it succeeded
    """

    due: float
    sent: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: list[float] = field(default_factory=list)
    error: str = ""
    receipt: Receipt | None = None

    @property
    def second_token(self) -> float | None:
        """The gap that a handoff can delay."""
        return self.tokens[1] - self.tokens[0] if len(self.tokens) > 1 else None
