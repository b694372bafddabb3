"""What computing a prompt costs and what moving its cache costs, as this router has seen it of late.

    seconds
       |          compute: nothing for no token          a prompt with fewer tokens than where the lines cross is
       |        /                                        computed by who decodes: there its cache need not move
       |      / ___--- move: a fixed part, then less
       |  _-/--        for each token
       | / |
       '---'---------- tokens that are not cached
         handoff_min_tokens

A measurement weighs 1 when it is made and half of that a minute later, and no more than sixteen count: so figures
follow what changes. One that has been measured too little is unknown, and then prompts are handed over. Whatever
makes handing over look dear is forgotten within minutes when nothing is handed over any more, so it is measured again.
"""

from __future__ import annotations

from collections.abc import Callable

HALF_LIFE_SECONDS = 60.0
MOST_WEIGHT = 16.0
LEAST_WEIGHT = 0.5
"""Of measurements that are worth anything."""
NEVER = 1 << 31
"""More tokens than a prompt has: nothing is handed over."""


class DecayedRegression:
    """Pairs of tokens and seconds, newer ones counting more."""

    def __init__(self) -> None:
        self._at = 0.0
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """One measurement; ``now`` never goes back."""
        kept = min(self._factor(now), (MOST_WEIGHT - 1) / max(self._weight, 1.0))
        self._age(kept if self.is_known(now) else 0.0)
        self._at = now
        self._weight += 1
        self._tokens += tokens
        self._seconds += seconds
        self._squares += tokens * tokens
        self._products += tokens * seconds

    def is_known(self, now: float) -> bool:
        return self._weight * self._factor(now) >= LEAST_WEIGHT

    @property
    def per_token(self) -> float:
        """Seconds for a token, fixed parts shared out among all."""
        return self._seconds / self._tokens if self._tokens else 0.0

    @property
    def line(self) -> tuple[float, float]:
        """Seconds that any number of tokens takes, and seconds for each token more: neither is negative. Least
        squares; where all had about as many tokens, all is fixed."""
        spread = self._squares * self._weight - self._tokens**2
        if self._weight == 0 or spread <= 1e-6 * self._squares * self._weight:
            return (self._seconds / self._weight if self._weight else 0.0), 0.0
        slope = (self._products * self._weight - self._tokens * self._seconds) / spread
        slope = min(max(0.0, slope), self.per_token)
        return (self._seconds - slope * self._tokens) / self._weight, slope

    def _factor(self, now: float) -> float:
        return float(0.5 ** ((now - self._at) / HALF_LIFE_SECONDS))

    def _age(self, factor: float) -> None:
        self._weight *= factor
        self._tokens *= factor
        self._seconds *= factor
        self._squares *= factor
        self._products *= factor


class PrefillTransferCosts:
    """Of one model's workers. ``now`` tells seconds, and never goes back."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._read_apart = DecayedRegression()
        self._read_beside = DecayedRegression()
        self._moved = DecayedRegression()

    def add_prefill(self, tokens: int, seconds: float, *, on_decode_worker: bool) -> None:
        """A prompt was computed, on a worker that decodes or on one that only reads; ``tokens`` were not cached."""
        measured = self._read_beside if on_decode_worker else self._read_apart
        measured.add(max(1, tokens), seconds, self._now())

    def add_transfer(self, tokens: int, seconds: float) -> None:
        """An answer stood still for so long because its cache moved; ``tokens`` were not there already."""
        self._moved.add(max(0, tokens), max(0.0, seconds), self._now())

    @property
    def handoff_min_tokens(self) -> int:
        """Prompts with fewer uncached tokens are computed where they are decoded. 0: none, or it is not known."""
        now = self._now()
        beside = self._read_beside.is_known(now)
        read = self._read_beside if beside else self._read_apart
        if not (read.is_known(now) and self._moved.is_known(now)):
            return 0
        fixed, slope = self._moved.line
        dearer = read.per_token - slope
        return NEVER if dearer * NEVER <= fixed else int(fixed / dearer)
