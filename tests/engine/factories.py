from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from decant.engine.blocks import BlockPool
from decant.engine.engine import Engine
from decant.engine.fake import FakeDevice
from decant.engine.kv_layout import longest_sequence
from decant.engine.output import SequenceFinished, SequenceStarted, StepOutput, Token
from decant.engine.plan import Device, Row, StepPlan, TokenLogprobs
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from decant.engine.sampler_state import SamplerState
from decant.engine.scheduler import Limits
from decant.engine.sequence import Timeline
from decant.engine.transfer import BlockAddress, TransferCommit, block_checksum, default_checksum, transfer_checksum

BLOCK = 4
CONTEXT_LENGTH = 96
VOCABULARY = 512


def make_device(num_blocks: int = 64, eos: Iterable[int] = ()) -> FakeDevice:
    return FakeDevice(
        num_blocks=num_blocks,
        block_size=BLOCK,
        vocab_size=VOCABULARY,
        context_length=CONTEXT_LENGTH,
        eos_token_ids=frozenset(eos),
    )


def make_engine(
    num_blocks: int = 64,
    *,
    budget: int = 64,
    max_running: int = 8,
    context_length: int = CONTEXT_LENGTH,
    device: Device | None = None,
) -> Engine:
    """Engine on a fake device by default; the context length is at most the capacity of the blocks."""
    device = device or make_device(num_blocks)
    room = longest_sequence(device.windows, device.num_blocks, device.block_size, device.context_length)
    limits = Limits(token_budget=budget, max_running=min(budget, max_running), context_length=min(context_length, room))
    return Engine(device, limits, clock=ticking())


def ticking() -> Callable[[], float]:
    now = 0.0

    def read() -> float:
        nonlocal now
        now += 1.0
        return now

    return read


def prompt(length: int, start: int = 1) -> tuple[int, ...]:
    """Make a prompt; those of different small ``start`` differ from the first token on."""
    return tuple((start * 37 + index * 11) % (VOCABULARY - 1) + 1 for index in range(length))


def make_request(
    id: str = "a",
    tokens: int | Sequence[int] = 6,
    max_tokens: int | None = 8,
    *,
    stop: StopParams | None = None,
    sampling: SamplingParams | None = None,
    **more: object,
) -> Request:
    ids = prompt(tokens) if isinstance(tokens, int) else tuple(tokens)
    request = Request(id, ids, stop=stop or StopParams(max_tokens=max_tokens), sampling=sampling or SamplingParams())
    return replace(request, **more)  # type: ignore[arg-type]


@dataclass(slots=True)
class SequenceOutput:
    tokens: list[Token] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    started: SequenceStarted | None = None
    ended: SequenceFinished | None = None

    @property
    def text(self) -> list[int]:
        return [token.token for token in self.tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs | None]:
        return [token.logprobs for token in self.tokens]

    @property
    def reason(self) -> FinishReason | None:
        return self.ended.reason if self.ended else None


class OutputLog:
    """Output by sequence. Recording checks each step: positions without gap or repeat; one end, last."""

    def __init__(self) -> None:
        self.by_id: dict[str, SequenceOutput] = {}

    def __getitem__(self, id: str) -> SequenceOutput:
        return self.by_id.setdefault(id, SequenceOutput())

    def record(self, output: StepOutput) -> StepOutput:
        for started in output.started:
            result = self[started.id]
            assert not result.ended, f"{started.id} started after its end"
            assert 0 <= started.cached < started.tokens, started
            result.started = started
        for events in output.prompt_logprobs:
            result = self[events.id]
            assert events.position == 1 + len(result.prompt_logprobs), (
                f"{events.id}: prompt log-probabilities have a gap"
            )
            assert not result.ended, f"{events.id} went on after its end"
            result.prompt_logprobs.extend(events.entries)
        for token in output.tokens:
            result = self[token.id]
            assert result.started or token.position, f"{token.id} has a token before its start"
            expected = result.tokens[-1].position + 1 if result.tokens else token.position
            assert token.position == expected, f"{token.id}: token {token.position} after {expected - 1}"
            assert not result.ended, f"{token.id} went on after its end"
            result.tokens.append(token)
        for ended in output.ended:
            assert self[ended.id].ended is None, f"{ended.id} ended twice"
            self[ended.id].ended = ended
        return output


def run(engine: Engine, *requests: Request, log: OutputLog | None = None, steps: int = 2000) -> OutputLog:
    log = log or OutputLog()
    for request in requests:
        engine.add(request)
    while engine.has_work and steps:
        log.record(engine.step())
        steps -= 1
    return log


def run_alone(request: Request, make: Callable[[], Engine] = make_engine) -> SequenceOutput:
    whole = replace(request, park_after=None)
    return run(make(), whole)[request.id]


def recompute_each_step(device: Device, request: Request, context_length: int = CONTEXT_LENGTH) -> SequenceOutput:
    """Recompute all tokens for each new one, without engine, cache or other rows."""
    output, tokens, stop = SequenceOutput(), list(request.token_ids), request.stop
    reason = None
    while reason is None:
        count = -(-len(tokens) // device.block_size)
        blocks = [array("i", range(group * count, (group + 1) * count)) for group in range(len(device.windows))]
        row = Row(request, tokens, 0, len(tokens), tuple(blocks), True, SamplerState(request))
        result = device.run(StepPlan((row,), len(tokens)))
        token = result.sampled[0]
        assert token is not None
        output.prompt_logprobs = output.prompt_logprobs or list(result.prompt_logprobs.get(0, ()))
        output.tokens.append(Token(request.id, len(tokens) - request.prompt_len, token, result.logprobs.get(0)))
        tokens.append(token)
        if token in stop.stop_token_ids or (token in device.eos_token_ids and not stop.ignore_eos):
            reason = FinishReason.STOP
        elif len(tokens) - request.prompt_len == stop.max_tokens:
            reason = FinishReason.LENGTH
        elif len(tokens) >= context_length:
            reason = FinishReason.CONTEXT_LENGTH
    output.ended = SequenceFinished(request.id, reason, Timeline(0.0), token if reason is FinishReason.STOP else None)
    return output


# -- handoffs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Payload:
    blocks: list[tuple[BlockAddress, bytes, int]]
    commit: TransferCommit


def export_sequence(engine: Engine, id: str, cached_blocks: int = 0, siblings: Sequence[str] = ()) -> Payload:
    export = engine.transfers.export(id, cached_blocks, siblings)
    commit = engine.transfers.finalize(id)
    payload = Payload(
        [(block.address, bytes(export.read(block.address)), block.checksum) for block in export.blocks], commit
    )
    engine.transfers.release(id)
    return payload


def import_sequence(engine: Engine, request: Request, payload: Payload, forks: Sequence[Request] = ()) -> None:
    others = [replace(fork, park_after=None) for fork in forks]
    arrival = engine.transfers.reserve(replace(request, park_after=None), others)
    try:
        arrival.extend(payload.commit.computed + 1)
        for block in payload.blocks:
            arrival.write(*block)
        engine.transfers.join(arrival, payload.commit)
    finally:
        arrival.abort()


def forged(payload: Payload, replaced: dict[BlockAddress, bytes]) -> Payload:
    """Replace the bytes of some blocks, with matching checksums."""
    changed = [(address, replaced.get(address, data)) for address, data, _ in payload.blocks]
    blocks = [(address, data, block_checksum(default_checksum, address, data)) for address, data in changed]
    sums = [total for _, _, total in blocks]
    commit = replace(
        payload.commit,
        checksum=transfer_checksum(default_checksum, payload.commit.computed, payload.commit.outputs, sums),
    )
    return Payload(blocks, commit)


def step_until(engine: Engine, reached: Callable[[], bool], log: OutputLog | None = None) -> OutputLog:
    log = log or OutputLog()
    for _ in range(2000):
        if reached():
            return log
        log.record(engine.step())
    raise AssertionError("not reached within 2000 steps")


def evict_all(pool: BlockPool) -> None:
    """Empty the prefix cache."""
    pool.release_blocks(pool.allocate_blocks(pool.available_blocks))
