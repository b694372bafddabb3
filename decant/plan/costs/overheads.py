from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contention:
    """Factors on these times while the other pool computes on the same machine."""

    prefill: float = 1.0
    decode: float = 1.0
    handoff: float = 1.0


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds beside those of prefills and decode steps.

    latency    of a first token, beside its prefill and its wait for a worker
    handoff    pause of an output before its second token, beside a step
    sending    delay of a prompt that follows a handoff at once on the same worker, per token
    """

    latency: float = 0.0
    handoff: float = 0.0
    sending: float = 0.0
    contention: Contention = Contention()


NO_OVERHEADS = Overheads()
