from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contention:
    """Factors on each's time while the other pool computes on the same machine."""

    prefill: float = 1.0
    decode: float = 1.0
    handoff: float = 1.0


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds.

    latency    of a first token, beside its prefill and its wait
    handoff    pause before the second token, beside a step
    sending    of a prefill worker for a handoff, per token: the next prompt waits for it, the first token does not
    """

    latency: float = 0.0
    handoff: float = 0.0
    sending: float = 0.0
    contention: Contention = Contention()


NO_OVERHEADS = Overheads()
