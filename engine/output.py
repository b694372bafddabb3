"""What an engine tells: who began, tokens, ends, filled blocks, and how busy it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from decant.engine.plan import TokenLogprobs
from decant.engine.request import FinishReason
from decant.engine.sequence import Timeline


class Token(NamedTuple):
    """A new token; ``position`` counts the sequence's output from 0."""

    id: str
    position: int
    token: int
    logprobs: TokenLogprobs | None


class PromptLogprobs(NamedTuple):
    """Of consecutive prompt tokens, the first at ``position`` (the prompt's first token has none)."""

    id: str
    position: int
    entries: Sequence[TokenLogprobs]


class SequenceFinished(NamedTuple):
    """A sequence's last event. ``stop_token`` is set with STOP, ``detail`` with FAILED."""

    id: str
    reason: FinishReason
    timeline: Timeline
    stop_token: int | None = None
    detail: str = ""


class SequenceStarted(NamedTuple):
    """A sequence's first event: a step computed something of it for the first time here.

    ``cached`` of its ``tokens`` tokens were computed already: a prefix hit, or what came with an arrival.
    ``timeline`` goes on being filled in; what has been told is in it.
    """

    id: str
    cached: int
    tokens: int
    timeline: Timeline


class BlockFilled(NamedTuple):
    """A block of a sequence with an open export can be read: its ``block``-th, in the order of the tokens."""

    id: str
    block: int


@dataclass(slots=True)
class StepOutput:
    """What one step gave, in the order in which it must be told: who began, tokens, then ends."""

    step: int
    tokens: list[Token]
    prompt_logprobs: list[PromptLogprobs]
    filled: list[BlockFilled]
    parked: list[str]
    ended: list[SequenceFinished]
    num_tokens: int = 0
    begun: list[SequenceStarted] = field(default_factory=list)
    available: int = 0  # blocks that an allocation could get after it


@dataclass(frozen=True, slots=True)
class Load:
    """A snapshot of how busy an engine is; blocks add up to ``total_blocks``.

    ``queued_tokens``: of waiting and running sequences, those whose KV is neither computed nor found in the cache.
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
