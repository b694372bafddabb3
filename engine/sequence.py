"""A sequence: its tokens, and the count of those whose KV is computed. Everything else is derived."""

from __future__ import annotations

import sys
from collections.abc import Set
from dataclasses import dataclass, field

from decant.engine.blocks import BlockHash, BlockTable, hash_blocks, root_hash
from decant.engine.request import Request
from decant.engine.sampler_state import SamplerState


@dataclass(slots=True)
class Timeline:
    """The instants of a sequence, in seconds of the engine's clock; None until it happened. And how often it was
    preempted: what it then computes again is in none of them."""

    added: float
    scheduled: float | None = None
    finished: float | None = None
    tokens: list[float] = field(default_factory=list)
    preemptions: int = 0

    @property
    def first_token(self) -> float | None:
        return self.tokens[0] if self.tokens else None


class Sequence:
    """What the scheduler moves forward. ``remaining`` is the gap that steps close::

    tokens    [ prompt ............ | output ...... ]
    computed  [ KV is in the blocks ......... |  gap ]
    """

    __slots__ = (
        "_chain",
        "computed",
        "due",
        "explained",
        "holding",
        "order",
        "request",
        "state",
        "stops",
        "sums",
        "timeline",
        "tokens",
    )

    def __init__(self, request: Request, order: tuple[float, int], added: float) -> None:
        self.request = request
        self.tokens = list(request.token_ids)
        self.computed = 0
        self.explained = 1  # prompt tokens whose log-probabilities were told; the first one has none
        self.holding: BlockTable | None = None
        self.order = order
        self.state = None if request.plain else SamplerState(request)
        self.stops: Set[int] = frozenset()  # tokens that end it
        self.due = sys.maxsize  # the length at which it ends, or parks, at the latest
        self.sums: dict[int, int] = {}  # block index -> sum made when it was filled, if it is to be handed over
        self.timeline = Timeline(added)
        self._chain: list[BlockHash] = [root_hash(request.salt)]

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.request.prompt_len

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    def hashes(self, blocks: range, block_size: int) -> list[BlockHash]:
        """Chained hashes of these full blocks; each is made once."""
        made = len(self._chain) - 1
        if made < blocks.stop:
            missing = self.tokens[made * block_size : blocks.stop * block_size]
            self._chain += hash_blocks(self._chain[-1], missing, block_size)
        return self._chain[blocks.start + 1 : blocks.stop + 1]
