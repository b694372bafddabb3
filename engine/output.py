from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from decant.engine.errors import InvalidRequest
from decant.engine.plan import TokenLogprobs
from decant.engine.request import FinishReason
from decant.engine.sequence import BlockAddress, Timeline


class Token(NamedTuple):
    """Generated token of a sequence; ``position`` counts its output tokens from 0."""

    id: str
    position: int
    token: int
    logprobs: TokenLogprobs | None


class PromptLogprobs(NamedTuple):
    """Log-probabilities of consecutive prompt tokens from ``position`` on; the first prompt token has none."""

    id: str
    position: int
    entries: Sequence[TokenLogprobs]


class PromptEmbedding(NamedTuple):
    """Embedding of a sequence's prompt: its values as packed float32."""

    id: str
    values: bytes


class SequenceFinished(NamedTuple):
    """Last event of a sequence. ``stop_token`` is set with STOP, ``detail`` with FAILED, ``fault`` if that is the
    request's.
    """

    id: str
    reason: FinishReason
    timeline: Timeline
    stop_token: int | None = None
    detail: str = ""
    fault: InvalidRequest | None = None


class SequenceStarted(NamedTuple):
    """Start of a sequence: ``cached`` of its ``tokens`` tokens have KV. ``timeline`` is its own and keeps changing.

    ``is_fork``: the prompt was computed by another sequence.
    """

    id: str
    cached: int
    tokens: int
    timeline: Timeline
    is_fork: bool = False


class BlockFilled(NamedTuple):
    id: str
    block: BlockAddress


@dataclass(slots=True)
class StepOutput:
    """Events of a step; deliver them in the order ``started``, ``tokens``, ``ended``.

    ``parked`` has the ids of sequences that reached ``park_after``.
    """

    step: int
    tokens: list[Token]
    prompt_logprobs: list[PromptLogprobs]
    filled: list[BlockFilled]
    parked: list[str]
    ended: list[SequenceFinished]
    num_tokens: int = 0
    started: list[SequenceStarted] = field(default_factory=list)
    embeddings: list[PromptEmbedding] = field(default_factory=list)
    available_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Load of an engine. Free, cached and held blocks add up to ``total_blocks``.

    ``queued_tokens``: tokens of waiting and running sequences whose KV is not computed, without the cached prefixes of
    the first ``QUEUED_PREFIX_LOOKUPS`` waiting ones.
    """

    running: int
    waiting: int
    queued_tokens: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    total_blocks: int
    preemptions: int
