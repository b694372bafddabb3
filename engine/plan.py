"""Interface of a device: one immutable plan goes in, one result comes out per step."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from decant.engine.costs import NO_WORK, StepCostModel, StepWork, chunk
from decant.engine.kv_layout import Window
from decant.engine.logits_processors import Edit
from decant.engine.request import Request
from decant.engine.sampler_state import SamplerState


class Row(NamedTuple):
    """Consecutive tokens of one sequence whose KV the step computes.

    tokens      all tokens of the sequence; read it only while the step runs
    start, end  the positions to compute: tokens[start:end]
    blocks      position p of group g is in blocks[g][p // block_size]. An entry that no position from ``start`` on sees
                may be ``num_blocks``, the null block
    sample      whether to draw the token at position ``end``
    state       kept from draw to draw; None: made for each
    """

    request: Request
    tokens: Sequence[int]
    start: int
    end: int
    blocks: tuple[array[int], ...]
    sample: bool
    state: SamplerState | None = None

    @property
    def work(self) -> StepWork:
        return chunk(self.start, self.end - self.start, all_logits=self.has_prompt_logprobs)

    @property
    def first_logprob(self) -> int:
        """First position whose prompt log-probability the row returns, if it returns any."""
        return max(self.start + 1, self.request.prompt_logprobs_from)

    @property
    def has_prompt_logprobs(self) -> bool:
        request = self.request
        return request.prompt_logprobs is not None and self.first_logprob <= min(self.end, request.prompt_len - 1)

    def edits(self, eos: frozenset[int]) -> list[Edit]:
        """Changes of the row's logits before the draw at ``end``, in order; ``eos`` are the model's end tokens."""
        state = self.state or SamplerState(self.request)
        return state.edits(self.tokens, self.end, eos)


NO_INPUTS: Mapping[int, int] = MappingProxyType({})


class StepPlan(NamedTuple):
    """Rows that a step computes.

    ``inputs`` maps a row whose only token, at ``start``, is not in ``tokens`` yet to the row of the previous plan that
    draws it. Only a device that overlaps steps gets any.
    """

    rows: tuple[Row, ...]
    num_tokens: int
    decodes: StepWork = NO_WORK
    prompts: StepWork = NO_WORK
    inputs: Mapping[int, int] = NO_INPUTS

    @property
    def work(self) -> StepWork:
        return reduce(StepWork.plus, (row.work for row in self.rows), NO_WORK)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability under the model's own logits. The likeliest token has ``rank`` 1 and is first in ``top``."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class FurtherToken(NamedTuple):
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a plan, by row index.

    sampled          None where no token was to be drawn
    prompt_logprobs  of the prompt tokens at positions ``first_logprob`` .. end
    failed           why a row has no valid draw
    further          tokens after ``sampled[i]`` (speculative decoding): at most ``Device.lookahead``, and only as many
                     as the row's blocks have slots for; KV of all new tokens but the last is in the blocks
    pooled           of requests for an embedding: with the prompt's last token its values, as packed float32, before
                     that what the next step finds in ``SamplerState.pooled``
    """

    sampled: Sequence[int | None]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    further: Mapping[int, Sequence[FurtherToken]] = field(default_factory=dict)
    pooled: Mapping[int, Any] = field(default_factory=dict)

    def without_tokens(self, failed: Mapping[int, str]) -> StepResult:
        """The result with more rows that failed."""
        sampled = [None if index in failed else token for index, token in enumerate(self.sampled)]
        further = {index: tokens for index, tokens in self.further.items() if index not in failed}
        return replace(self, sampled=sampled, failed={**failed, **self.failed}, further=further)

    def select(self, rows: Sequence[int]) -> StepResult:
        parts = (self.logprobs, self.prompt_logprobs, self.failed, self.further, self.pooled)
        chosen: list[dict[int, Any]] = [{at: of[row] for at, row in enumerate(rows) if row in of} for of in parts]
        return StepResult([self.sampled[row] for row in rows], *chosen)


class Runner(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step. The returned function waits for its result; call it once, in order of the steps.

        A device that overlaps steps reads the rows' tokens and returns before the step is computed. Others compute when
        the result is awaited.
        """
        ...


class BlockMemory(NamedTuple):
    """Memory of all blocks, in order and without gaps; ``gpu`` is the device's number, None for host memory."""

    address: int
    nbytes: int
    gpu: int | None = None


class BlockBytes(Protocol):
    @property
    def block_bytes(self) -> int: ...

    @property
    def block_memory(self) -> BlockMemory: ...

    def read(self, block: int) -> memoryview:
        """Bytes of a block, which may alias the store: valid while the block is held.

        May be called from any thread, during steps.
        """
        ...

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Replace the ``block_bytes`` bytes of a held block. May be called from any thread, during steps."""
        ...


class DeviceMemory(NamedTuple):
    """Memory of a device in bytes; ``free`` is what all its processes leave."""

    free: int
    total: int


class PreparedAdapter(Protocol):
    """Adapter whose weights are in the form of a device's products."""

    @property
    def digest(self) -> str:
        """Name of its content: adapters with an equal one compute the same."""
        ...

    @property
    def rank(self) -> int:
        """The largest rank of its changes."""
        ...

    @property
    def nbytes(self) -> int: ...


class Adapters(Protocol):
    """Adapters that a device has now, by digest. They change between steps only."""

    def __contains__(self, digest: object) -> bool: ...

    def load(self, name: str, folder: Path) -> PreparedAdapter:
        """Read a folder in PEFT's format, from any thread. Raises AdapterRefused."""
        ...

    def add(self, prepared: PreparedAdapter) -> None:
        """Compute with an adapter. Raises AdapterRefused if the device has no memory for it."""
        ...

    def remove(self, digest: str) -> None:
        """Remove an adapter that no live sequence has."""
        ...


class Device(Runner, BlockBytes, Protocol):
    @property
    def adapters(self) -> Adapters: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...

    @property
    def windows(self) -> tuple[Window, ...]:
        """Window of each cache group, widest first."""
        ...

    @property
    def lookahead(self) -> int:
        """Most further tokens of a row in one step, less than a block."""
        ...

    @property
    def overlaps_steps(self) -> bool: ...

    @property
    def embedding_size(self) -> int:
        """Values of an embedding; 0 if the device returns none."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def layout_hash(self) -> str:
        """Devices with an equal one can exchange blocks."""
        ...

    @property
    def quantization(self) -> str | None:
        """Quantization of most weights: int8, int4, fp8 or None."""
        ...

    @property
    def costs(self) -> StepCostModel: ...

    def memory(self) -> DeviceMemory | None:
        """Memory of the device, None if it computes in the host's. May be called from any thread."""
        ...

    @property
    def equal_bits(self) -> bool:
        """Whether equal input was shown to give equal bits in any batch, on every device with this layout hash."""
        ...
