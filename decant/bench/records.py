from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the environments of other engines have no protobuf
    from decant.client.results import Receipt


class TokenTimes:
    """Latencies in seconds, from times of one clock."""

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
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None

    @property
    def itls(self) -> list[float]:
        return [after - before for before, after in pairwise(self.tokens)]


@dataclass(slots=True)
class Record(TokenTimes):
    """Times of a request in seconds of one monotonic clock; `due` is when it was to be sent, tokens of one message
    share a time.
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
        return self.tokens[1] - self.tokens[0] if len(self.tokens) > 1 else None
