"""Recent costs of computing a prompt and of transferring its KV cache, and from which length a handoff pays.

Compute is proportional to uncached tokens; transfer has a fixed part, and less per token. While a cost is unknown,
prompts are handed off. If none is handed off, the transfer cost is forgotten within minutes and measured again.
"""

from __future__ import annotations

from collections.abc import Callable

HALF_LIFE_SECONDS = 60.0
MAX_WEIGHT = 16.0
MIN_WEIGHT = 0.5
"""Smallest weight of samples; with less, a cost is unknown."""
NEVER = 1 << 31
"""More tokens than any prompt has."""


class DecayedRegression:
    def __init__(self) -> None:
        self._at = 0.0
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """Add a measurement; ``now`` must not decrease."""
        kept = min(self._factor(now), (MAX_WEIGHT - 1) / max(self._weight, 1.0))
        self._age(kept if self.is_known(now) else 0.0)
        self._at = now
        self._weight += 1
        self._tokens += tokens
        self._seconds += seconds
        self._squares += tokens * tokens
        self._products += tokens * seconds

    def is_known(self, now: float) -> bool:
        return self._weight * self._factor(now) >= MIN_WEIGHT

    @property
    def per_token(self) -> float:
        """Seconds per token, fixed part included."""
        return self._seconds / self._tokens if self._tokens else 0.0

    @property
    def linear_fit(self) -> tuple[float, float]:
        """Fixed seconds and seconds per token, neither negative; all fixed where token numbers hardly differ."""
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
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._on_prefill_worker = DecayedRegression()
        self._on_decode_worker = DecayedRegression()
        self._transfer = DecayedRegression()

    def add_prefill(self, tokens: int, seconds: float, *, on_decode_worker: bool) -> None:
        """Add a prefill of ``tokens`` uncached tokens."""
        measured = self._on_decode_worker if on_decode_worker else self._on_prefill_worker
        measured.add(max(1, tokens), seconds, self._now())

    def add_transfer(self, tokens: int, seconds: float) -> None:
        """Add a transfer of ``tokens`` uncached tokens that paused an output for ``seconds``."""
        self._transfer.add(max(0, tokens), max(0.0, seconds), self._now())

    @property
    def prefill_s_per_token(self) -> float | None:
        """Last known cost on prefill workers, else on decode workers; None before the first prompt."""
        return self._on_prefill_worker.per_token or self._on_decode_worker.per_token or None

    def transfer_s(self, tokens: int) -> float | None:
        """Pause of an output whose ``tokens`` tokens are transferred; None while unknown."""
        if not self._transfer.is_known(self._now()):
            return None
        fixed, slope = self._transfer.linear_fit
        return fixed + slope * tokens

    @property
    def handoff_min_tokens(self) -> int:
        """Uncached tokens from which a handoff pays; 0 while the costs are unknown."""
        now = self._now()
        has_local = self._on_decode_worker.is_known(now)
        prefill = self._on_decode_worker if has_local else self._on_prefill_worker
        if not (prefill.is_known(now) and self._transfer.is_known(now)):
            return 0
        fixed, slope = self._transfer.linear_fit
        difference = prefill.per_token - slope
        return NEVER if difference * NEVER <= fixed else int(fixed / difference)
