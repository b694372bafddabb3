"""A device without torch: the next token is a function of the bytes in the blocks that a row sees.

A slot has eight bytes made of its token, position, cache group and the previous slot. A lost, swapped, stale or corrupt
block changes the output.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
import time
import zlib
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, assert_never

from decant.engine.costs import StepCostModel
from decant.engine.counter_rng import counter_uniform
from decant.engine.errors import AdapterRefused, InvalidConfig
from decant.engine.kv_layout import BLOCK_SIZE, FULL, Window
from decant.engine.logits_processors import Add, Allow, Edit, Forbid, Penalise
from decant.engine.plan import (
    BlockMemory,
    DeviceMemory,
    FurtherToken,
    PreparedAdapter,
    Row,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from decant.engine.request import EmbeddingParams

SLOT_BYTES = 8
ADAPTER = "adapter_config.json"
CANDIDATES = 16
EMBEDDING_SIZE = 8

WEIGHTS = [-(rank + 1) * math.log(2) for rank in range(CANDIDATES)]
_NORMAL = math.log(sum(math.exp(weight) for weight in WEIGHTS))
_LOGPROBS = [weight - _NORMAL for weight in WEIGHTS]
_OTHER_WEIGHT = -20.0

_SLOT = struct.Struct("<II")


class FakeAdapter(NamedTuple):
    digest: str
    rank: int = 8
    nbytes: int = 1 << 20


class FakeAdapters:
    """Digests of a file's bytes: a sequence's slots depend on the digest of its adapter."""

    def __init__(self) -> None:
        self._digests: set[str] = set()

    def __contains__(self, digest: object) -> bool:
        return digest in self._digests

    def load(self, name: str, folder: Path) -> PreparedAdapter:
        try:
            return FakeAdapter(hashlib.blake2b((folder / ADAPTER).read_bytes(), digest_size=16).hexdigest())
        except OSError:
            raise AdapterRefused(name, f"{folder} has no file {ADAPTER}") from None

    def add(self, prepared: PreparedAdapter) -> None:
        self._digests.add(prepared.digest)

    def remove(self, digest: str) -> None:
        self._digests.discard(digest)


class FakeDevice:
    """Device of plain bytes; ``cost`` returns the seconds that a step sleeps."""

    lookahead = 0
    overlaps_steps = False
    embedding_size = EMBEDDING_SIZE
    windows: tuple[Window, ...] = (FULL,)

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = BLOCK_SIZE,
        vocab_size: int = 512,
        context_length: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        cost: Callable[[StepPlan], float] | None = None,
    ) -> None:
        if vocab_size < CANDIDATES:
            raise InvalidConfig("vocab_size", f"at least {CANDIDATES}", vocab_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.context_length = context_length or num_blocks * block_size
        self.eos_token_ids = eos_token_ids
        self.block_bytes = block_size * SLOT_BYTES
        self.layout_hash = f"fake-{block_size}-{vocab_size}" + (f"-{self.windows}" if self.windows != (FULL,) else "")
        self.equal_bits = True
        self.quantization: str | None = None
        self.costs = StepCostModel()
        self.adapters = FakeAdapters()
        self._bytes = memoryview(bytearray(num_blocks * self.block_bytes))
        self._cost = cost

    def read(self, block: int) -> memoryview:
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        self.read(block)[:] = data

    @property
    def block_memory(self) -> BlockMemory:
        return BlockMemory(ctypes.addressof(ctypes.c_char.from_buffer(self._bytes)), len(self._bytes))

    def memory(self) -> DeviceMemory | None:
        return None

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self.run, plan)

    def run(self, plan: StepPlan) -> StepResult:
        if self._cost is not None:
            time.sleep(self._cost(plan))
        sampled: list[int | None] = [None] * len(plan.rows)
        logprobs: dict[int, TokenLogprobs] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        further: dict[int, list[FurtherToken]] = {}
        pooled: dict[int, bytes] = {}
        for index, row in enumerate(plan.rows):
            self._fill(row)
            if row.has_prompt_logprobs:
                prompts[index] = self._prompt_logprobs(row)
            if row.request.embedding is not None:
                pooled[index] = self._embedding(row, row.request.embedding)
            if row.sample:
                token, entry = self._next(row)
                sampled[index] = token
                if entry is not None:
                    logprobs[index] = entry
                if self.lookahead:
                    further[index] = self._speculate(row, token)
        return StepResult(sampled, logprobs, prompts, further=further, pooled=pooled)

    def _next(self, row: Row) -> FurtherToken:
        likely = candidates(self._checksum(row, row.end), self.vocab_size)
        token = draw(likely, row, self.eos_token_ids)
        count = row.request.logprobs
        return FurtherToken(token, None if count is None else _logprobs(likely, token, count))

    def _speculate(self, row: Row, token: int) -> list[FurtherToken]:
        accepted: list[FurtherToken] = []
        tokens = [*row.tokens[: row.end], token]
        for end in range(row.end + 1, min(row.end + self.lookahead, len(row.blocks[-1]) * self.block_size) + 1):
            is_wrong = end % 3 == 0
            draft = (tokens[-1] + 1) % self.vocab_size if is_wrong else tokens[-1]
            self._fill(row._replace(tokens=[*tokens[:-1], draft], start=end - 1, end=end))
            if is_wrong:
                break
            accepted.append(self._next(row._replace(tokens=tokens, end=end)))
            tokens.append(accepted[-1].token)
        return accepted

    def _fill(self, row: Row) -> None:
        adapter = zlib.crc32(row.request.adapter.encode())  # 0 for none
        for group, window in enumerate(self.windows):
            before = b""
            for position in range(row.start, row.end):
                sees_previous = window.first_visible(position) < position
                if not sees_previous or position == row.start:
                    before = bytes(self._slot(row, group, position - 1)) if sees_previous else b""
                before = slot_bytes(row.tokens[position] ^ adapter, position, before, group)
                self._slot(row, group, position)[:] = before

    def _slot(self, row: Row, group: int, position: int) -> memoryview:
        block, slot = divmod(position, self.block_size)
        at = row.blocks[group][block] * self.block_bytes + slot * SLOT_BYTES
        return self._bytes[at : at + SLOT_BYTES]

    def _checksum(self, row: Row, count: int) -> int:
        total = 0
        for blocks, window in zip(row.blocks, self.windows, strict=True):
            first = window.first_visible(count - 1)
            for index in range(first // self.block_size, -(-count // self.block_size)):
                begin = max(first - index * self.block_size, 0)
                stop = min(count - index * self.block_size, self.block_size)
                at = blocks[index] * self.block_bytes
                total = zlib.crc32(self._bytes[at + begin * SLOT_BYTES : at + stop * SLOT_BYTES], total)
        return total

    def _prompt_logprobs(self, row: Row) -> list[TokenLogprobs]:
        last = min(row.end, row.request.prompt_len - 1)
        count = row.request.prompt_logprobs or 0
        return [
            _logprobs(candidates(self._checksum(row, position), self.vocab_size), row.tokens[position], count)
            for position in range(row.first_logprob, last + 1)
        ]

    def _embedding(self, row: Row, embedding: EmbeddingParams) -> bytes:
        """Values from all bytes that the row sees, so that a wrong block changes them."""
        total = self._checksum(row, row.end)
        values = [float((total >> shift & 15) - 8) for shift in range(0, 4 * EMBEDDING_SIZE, 4)][: embedding.dimensions]
        length = math.hypot(*values) or 1.0 if embedding.normalize else 1.0
        return struct.pack(f"<{len(values)}f", *(value / length for value in values))


def slot_bytes(token: int, position: int, before: bytes, group: int = 0) -> bytes:
    return _SLOT.pack(token, zlib.crc32(before, position + 1 + (group << 24)))


def candidates(total: int, vocab_size: int) -> list[int]:
    """Return the likely tokens by rank, whose weights are always the same."""
    stride = 1 + 2 * (total >> 16) % vocab_size
    while math.gcd(stride, vocab_size) != 1:
        stride += 1
    return [(total + rank * stride) % vocab_size for rank in range(CANDIDATES)]


def draw(likely: list[int], row: Row, eos: frozenset[int]) -> int:
    request = row.request
    sampling, position = request.sampling, row.end - request.prompt_len
    weights = dict(zip(likely, WEIGHTS, strict=True))
    for edit in row.edits(eos):
        _apply(edit, weights)
    ordered = sorted(weights.items(), key=itemgetter(1), reverse=True)
    if ordered[0][1] == -math.inf:
        return 0  # every token is forbidden
    if sampling.is_greedy:
        return ordered[0][0]
    kept = _keep([(token, weight / sampling.temperature) for token, weight in ordered], row)
    target = counter_uniform(sampling.seed, sampling.output_index, position) * sum(share for _, share in kept)
    for token, share in kept:
        target -= share
        if target < 0:
            return token
    return kept[-1][0]


def _apply(edit: Edit, weights: dict[int, float]) -> None:
    match edit:
        case Add():
            for token, value in zip(edit.tokens, edit.values, strict=True):
                weights[token] = weights.get(token, _OTHER_WEIGHT) + value
        case Forbid():
            weights.update(dict.fromkeys(edit.tokens, -math.inf))
        case Penalise():
            _penalise(edit, weights)
        case Allow():
            known = 8 * len(edit.mask)
            for token in (*weights, *range(known)):
                is_allowed = token < known and edit.mask[token >> 3] >> (token & 7) & 1
                weights[token] = weights.get(token, _OTHER_WEIGHT) if is_allowed else -math.inf
        case _:
            assert_never(edit)


def _penalise(edit: Penalise, weights: dict[int, float]) -> None:
    for token, count in zip(edit.tokens, edit.output, strict=True):
        if (weight := weights.get(token)) is not None:
            weight = weight / edit.repetition if weight > 0 else weight * edit.repetition
            weights[token] = weight - (edit.presence * (count > 0) + edit.frequency * count)


def _keep(ordered: list[tuple[int, float]], row: Row) -> list[tuple[int, float]]:
    sampling = row.request.sampling
    if sampling.top_k:
        ordered = ordered[: sampling.top_k]
    highest = ordered[0][1]
    shares = [(token, math.exp(weight - highest)) for token, weight in ordered]
    whole = sum(share for _, share in shares)
    kept, before = [], 0.0
    for token, share in shares:
        if before < sampling.top_p * whole and share >= sampling.min_p:
            kept.append((token, share))
        before += share
    return kept


def _logprobs(likely: list[int], token: int, count: int) -> TokenLogprobs:
    rank = likely.index(token) if token in likely else CANDIDATES
    logprob = _LOGPROBS[rank] if rank < CANDIDATES else _OTHER_WEIGHT - _NORMAL
    return TokenLogprobs(token, logprob, rank + 1, tuple(zip(likely[:count], _LOGPROBS, strict=False)))
