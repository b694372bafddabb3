from __future__ import annotations

import sys
from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

from decant.engine.block_hashes import BlockHash, hash_blocks, root_hash
from decant.engine.blocks import BlockTable
from decant.engine.request import Request
from decant.engine.sampler_state import SamplerState


@dataclass(slots=True)
class Timeline:
    """Times by the engine's clock, in seconds. A recomputation after a preemption changes none."""

    added: float
    scheduled: float | None = None
    finished: float | None = None
    tokens: list[float] = field(default_factory=list)
    preemptions: int = 0

    @property
    def first_token(self) -> float | None:
        return self.tokens[0] if self.tokens else None


class InFlight(NamedTuple):
    """Row of a sequence in the newest launched step, after which its first ``end`` tokens have KV."""

    row: int
    end: int
    draws: bool


class BlockAddress(NamedTuple):
    """Position of a block in a sequence; ``block`` counts from the sequence's start."""

    group: int
    block: int

    def __str__(self) -> str:
        return f"block {self.block} of group {self.group}"


class Sequence:
    """Unit of the scheduler.

    num_computed          number of leading tokens whose KV is in the blocks
    block_table           None while it waits
    next_check_length     length at which ``max_tokens``, the context length or ``park_after`` is reached
    prompt_logprobs_sent  prompt tokens whose log-probabilities were emitted; the first token has none
    in_flight             row of a step that is not committed; ``num_computed`` and ``tokens`` do not count it. None: no
                          step in flight has one, or the device overlaps no steps
    block_checksums       made when a block is filled, if ``park_after`` is set
    num_forced            last tokens that were appended without a draw
    forks                 further outputs of the same prompt, which start once its KV is computed here
    forked_from           the sequence in whose ``forks`` this one is; None: it has started, or is no fork
    is_fork               another sequence computes, or computed, its prompt
    siblings              live sequences of the same prompt, this one included; empty: there are no others
    """

    __slots__ = (
        "_chain",
        "block_checksums",
        "block_table",
        "forked_from",
        "forks",
        "in_flight",
        "is_fork",
        "next_check_length",
        "num_computed",
        "num_forced",
        "order",
        "prompt_logprobs_sent",
        "request",
        "siblings",
        "state",
        "stops",
        "timeline",
        "tokens",
    )

    def __init__(self, request: Request, order: tuple[float, int], added: float) -> None:
        self.request = request
        self.tokens = list(request.token_ids)
        self.num_computed = 0
        self.num_forced = 0
        self.in_flight: InFlight | None = None
        self.prompt_logprobs_sent = request.prompt_logprobs_from
        self.block_table: BlockTable | None = None
        self.forks: list[Sequence] = []
        self.forked_from: Sequence | None = None
        self.is_fork = False
        self.siblings: list[Sequence] = []
        self.order = order
        has_state = not request.is_plain_greedy or request.embedding is not None
        self.state = SamplerState(request) if has_state else None
        self.stops: Set[int] = frozenset()
        self.next_check_length = sys.maxsize
        self.block_checksums: dict[BlockAddress, int] = {}
        self.timeline = Timeline(added)
        self._chain: list[BlockHash] = [root_hash(request.cache_salt)]

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.request.prompt_len

    @property
    def num_remaining(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_scheduled(self) -> int:
        return self.num_computed if self.in_flight is None else self.in_flight.end

    @property
    def output_index(self) -> int:
        return self.request.sampling.output_index

    @property
    def fork_length(self) -> int:
        """Number of computed tokens from which on its forks can start: each computes the prompt's last token itself."""
        return self.request.prompt_len - 1

    @property
    def num_schedulable(self) -> int:
        """Number of leading tokens that may be computed now."""
        return self.fork_length if self.forks else len(self.tokens)

    def copy_prefix(self, source: Sequence, num_computed: int, full_blocks: int) -> None:
        """Take over what is known of the first ``num_computed`` tokens, which ``source`` has too."""
        self.num_computed = num_computed
        self.block_checksums = {
            at: checksum for at, checksum in source.block_checksums.items() if at.block < full_blocks
        }
        self._chain = source._chain[: full_blocks + 1]

    def hashes(self, blocks: range, block_size: int) -> list[BlockHash]:
        """Hashes of these blocks, which must be full; each is computed once."""
        known = len(self._chain) - 1
        if known < blocks.stop:
            missing = self.tokens[known * block_size : blocks.stop * block_size]
            self._chain += hash_blocks(self._chain[-1], missing, block_size)
        return self._chain[blocks.start + 1 : blocks.stop + 1]
