"""What goes to the device and what comes back: one immutable plan, one result a step."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple, Protocol

from decant.engine.costs import NO_WORK, StepCostModel, StepWork, chunk
from decant.engine.request import Request
from decant.engine.sampler_state import SamplerState


class Row(NamedTuple):
    """Consecutive tokens of one sequence whose KV this step computes.

    tokens      the sequence's whole token list, read only while the step runs
    start, end  the positions to compute: tokens[start:end]
    blocks      block table; position p lives in blocks[p // block_size]
    sample      whether the token after ``end - 1`` is to be drawn
    state       what sampling keeps of the sequence; None where the request is plain
    """

    request: Request
    tokens: Sequence[int]
    start: int
    end: int
    blocks: array[int]
    sample: bool
    state: SamplerState | None = None

    @property
    def work(self) -> StepWork:
        return chunk(self.start, self.end - self.start, explained=self.request.prompt_logprobs is not None)


class StepPlan(NamedTuple):
    """One call of the model: ``num_tokens`` is the sum over rows, at most the token budget.

    ``decodes`` and ``prompts`` are what its seconds were foretold from.
    """

    rows: tuple[Row, ...]
    num_tokens: int
    decodes: StepWork = NO_WORK
    prompts: StepWork = NO_WORK

    @property
    def work(self) -> StepWork:
        """All of it, counted from the rows."""
        return reduce(StepWork.plus, (row.work for row in self.rows), NO_WORK)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token before sampling changed anything, its rank (1 is the likeliest), and the
    likeliest alternatives, best first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan gave: ``sampled[i]`` is the token of row i, None where none was asked for.

    ``prompt_logprobs[i]`` are those of the positions start + 1 .. end of row i that are prompt tokens.
    ``failed[i]`` says why row i has no valid logits.
    """

    sampled: Sequence[int | None]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)


class Runner(Protocol):
    """The device half: computes a plan's KV into the blocks and draws its tokens."""

    def run(self, plan: StepPlan) -> StepResult: ...


class BlockBytes(Protocol):
    """The bytes of the blocks: all that a handoff sees of the cache."""

    @property
    def block_bytes(self) -> int: ...

    def read(self, block: int) -> memoryview:
        """The ``block_bytes`` bytes of a block; valid while the block is held, may alias the store."""
        ...

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Replace a block's bytes; the caller holds it."""
        ...


class Device(Runner, BlockBytes, Protocol):
    """A model with its blocks: what an engine runs on. ``model.load`` and ``fake.FakeDevice`` make one."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def window(self) -> int:
        """Longest sequence that the model serves, in tokens."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def layout(self) -> str:
        """Equal exactly when two devices can exchange blocks and promise the same bits."""
        ...

    @property
    def costs(self) -> StepCostModel:
        """What its steps take, as far as it was measured."""
        ...

    @property
    def equal_bits(self) -> bool:
        """Whether that promise was measured: equal input gives equal bits, here and on any device of this layout."""
        ...
