from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from decant.engine.plan import TokenLogprobs
from decant.engine.request import FinishReason
from decant.engine.sequence import BlockAddress, Timeline


class Token(NamedTuple):
    """``position`` counts output tokens from 0."""

    id: str
    position: int
    token: int
    logprobs: TokenLogprobs | None


class PromptLogprobs(NamedTuple):
    """Of consecutive prompt tokens from ``position`` on; the first prompt token has none."""

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
    """``cached`` of its ``tokens`` tokens had KV before. ``timeline`` is the sequence's own and keeps changing."""

    id: str
    cached: int
    tokens: int
    timeline: Timeline


class BlockFilled(NamedTuple):
    id: str
    block: BlockAddress


@dataclass(slots=True)
class StepOutput:
    """Deliver in the order ``started``, ``tokens``, ``ended``.

    ``parked``: ids that reached ``park_after``. ``available_blocks``: blocks that an allocation can get.
    """

    step: int
    tokens: list[Token]
    prompt_logprobs: list[PromptLogprobs]
    filled: list[BlockFilled]
    parked: list[str]
    ended: list[SequenceFinished]
    num_tokens: int = 0
    started: list[SequenceStarted] = field(default_factory=list)
    available_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Free, cached and held blocks add up to ``total_blocks``.

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
