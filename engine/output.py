"""Output of a step: started and finished sequences, tokens, filled blocks; and the load of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from decant.engine.plan import TokenLogprobs
from decant.engine.request import FinishReason
from decant.engine.sequence import BlockAddress, Timeline


class Token(NamedTuple):
    """A new token; ``position`` counts output tokens from 0."""

    id: str
    position: int
    token: int
    logprobs: TokenLogprobs | None


class PromptLogprobs(NamedTuple):
    """Log-probabilities of consecutive prompt tokens from ``position`` on (the first prompt token has none)."""

    id: str
    position: int
    entries: Sequence[TokenLogprobs]


class SequenceFinished(NamedTuple):
    """Last event of a sequence. ``stop_token`` is set with STOP, ``detail`` with FAILED."""

    id: str
    reason: FinishReason
    timeline: Timeline
    stop_token: int | None = None
    detail: str = ""


class SequenceStarted(NamedTuple):
    """First event of a sequence: a step computed tokens of it.

    ``cached`` of its ``tokens`` tokens had KV before: a prefix hit, an arrival or a fork. ``timeline`` is the
    sequence's own and keeps changing.
    """

    id: str
    cached: int
    tokens: int
    timeline: Timeline


class BlockFilled(NamedTuple):
    """A block of an open export can be read."""

    id: str
    block: BlockAddress


@dataclass(slots=True)
class StepOutput:
    """Output of one step. Deliver it in the order ``begun``, ``tokens``, ``ended``.

    ``parked``: ids that reached ``park_after``. ``available``: blocks that an allocation can get after the step.
    """

    step: int
    tokens: list[Token]
    prompt_logprobs: list[PromptLogprobs]
    filled: list[BlockFilled]
    parked: list[str]
    ended: list[SequenceFinished]
    num_tokens: int = 0
    begun: list[SequenceStarted] = field(default_factory=list)
    available: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Snapshot of an engine's load; free, cached and held blocks add up to ``total_blocks``.

    ``queued_tokens``: tokens of waiting and running sequences whose KV is neither computed nor cached.
    """

    running: int
    waiting: int
    parked: int
    arriving: int
    exports: int
    queued_tokens: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    total_blocks: int
    preemptions: int
    steps: int
