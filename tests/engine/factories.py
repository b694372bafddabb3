"""Scenes in two lines: small engines that run out of blocks, requests, and an ear that holds the contract."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from decant.engine.engine import Engine
from decant.engine.fake import FakeDevice
from decant.engine.output import SequenceFinished, SequenceStarted, StepOutput, Token
from decant.engine.plan import Device, Row, StepPlan, TokenLogprobs
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from decant.engine.sampler_state import SamplerState
from decant.engine.scheduler import Limits
from decant.engine.sequence import Timeline
from decant.engine.transfer import TransferCommit, block_checksum, default_checksum, transfer_checksum

BLOCK = 4
WINDOW = 96
VOCABULARY = 512


def make_device(num_blocks: int = 64, eos: Iterable[int] = ()) -> FakeDevice:
    """A fake one with blocks of ``BLOCK`` tokens."""
    return FakeDevice(
        num_blocks=num_blocks,
        block_size=BLOCK,
        vocab_size=VOCABULARY,
        window=WINDOW,
        eos_token_ids=frozenset(eos),
    )


def make_engine(
    num_blocks: int = 64,
    *,
    budget: int = 64,
    max_running: int = 8,
    window: int = WINDOW,
    device: Device | None = None,
) -> Engine:
    """On a fake device unless told; the window shrinks to what the blocks hold."""
    device = device or make_device(num_blocks)
    room = device.num_blocks * device.block_size
    limits = Limits(token_budget=budget, max_running=min(budget, max_running), window=min(window, room))
    return Engine(device, limits, clock=ticking())


def ticking() -> Callable[[], float]:
    """A clock that moves by one at each look."""
    now = 0.0

    def look() -> float:
        nonlocal now
        now += 1.0
        return now

    return look


def prompt(length: int, start: int = 1) -> tuple[int, ...]:
    """Tokens that differ from those of every other small ``start`` from the first one on."""
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
    """``tokens``: a prompt, or the length of one."""
    ids = prompt(tokens) if isinstance(tokens, int) else tuple(tokens)
    request = Request(id, ids, stop=stop or StopParams(max_tokens=max_tokens), sampling=sampling or SamplingParams())
    return replace(request, **more)  # type: ignore[arg-type]


@dataclass(slots=True)
class Heard:
    """All that was told of one sequence."""

    tokens: list[Token] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    begun: SequenceStarted | None = None
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


class Ear:
    """Hears the steps of an engine and holds them to the contract: positions without gap or repeat, one end, last."""

    def __init__(self) -> None:
        self.heard: dict[str, Heard] = {}

    def __getitem__(self, id: str) -> Heard:
        return self.heard.setdefault(id, Heard())

    def hear(self, output: StepOutput) -> StepOutput:
        for begun in output.begun:
            heard = self[begun.id]
            assert not heard.ended, f"{begun.id} began after its end"
            assert 0 <= begun.cached < begun.tokens, begun
            heard.begun = begun
        for told in output.prompt_logprobs:
            heard = self[told.id]
            assert told.position == 1 + len(heard.prompt_logprobs), f"{told.id}: prompt log-probabilities have a gap"
            assert not heard.ended, f"{told.id} went on after its end"
            heard.prompt_logprobs.extend(told.entries)
        for token in output.tokens:
            heard = self[token.id]
            assert heard.begun or token.position, f"{token.id} wrote before it began"
            expected = heard.tokens[-1].position + 1 if heard.tokens else token.position
            assert token.position == expected, f"{token.id}: token {token.position} after {expected - 1}"
            assert not heard.ended, f"{token.id} went on after its end"
            heard.tokens.append(token)
        for ended in output.ended:
            assert self[ended.id].ended is None, f"{ended.id} ended twice"
            self[ended.id].ended = ended
        return output


def run(engine: Engine, *requests: Request, ear: Ear | None = None, steps: int = 2000) -> Ear:
    """Add ``requests`` and step to the end of all work (or ``steps``), held to the contract."""
    ear = ear or Ear()
    for request in requests:
        engine.add(request)
    while engine.has_work and steps:
        ear.hear(engine.step())
        steps -= 1
    return ear


def alone(request: Request, make: Callable[[], Engine] = make_engine) -> Heard:
    """What is told of a request that has an engine to itself."""
    whole = replace(request, park_after=None)
    return run(make(), whole)[request.id]


def plainly(device: Device, request: Request, window: int = WINDOW) -> Heard:
    """What a device gives when all tokens are computed again for each new one: no engine, no cache, no company."""
    heard, tokens, stop = Heard(), list(request.token_ids), request.stop
    reason = None
    while reason is None:
        blocks = array("i", range(-(-len(tokens) // device.block_size)))
        row = Row(request, tokens, 0, len(tokens), blocks, True, SamplerState(request))
        result = device.run(StepPlan((row,), len(tokens)))
        token = result.sampled[0]
        assert token is not None
        heard.prompt_logprobs = heard.prompt_logprobs or list(result.prompt_logprobs.get(0, ()))
        heard.tokens.append(Token(request.id, len(tokens) - request.prompt_len, token, result.logprobs.get(0)))
        tokens.append(token)
        if token in stop.stop_token_ids or (token in device.eos_token_ids and not stop.ignore_eos):
            reason = FinishReason.STOP
        elif len(tokens) - request.prompt_len == stop.max_tokens:
            reason = FinishReason.LENGTH
        elif len(tokens) >= window:
            reason = FinishReason.CONTEXT_LENGTH
    heard.ended = SequenceFinished(request.id, reason, Timeline(0.0), token if reason is FinishReason.STOP else None)
    return heard


# -- handoffs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cargo:
    """All that travels: (index, bytes, sum) of each block, and the seal."""

    runs: list[tuple[int, bytes, int]]
    seal: TransferCommit


def unload(engine: Engine, id: str, have: int = 0) -> Cargo:
    """What a parked sequence gives to an engine that has its first ``have`` blocks; then it is gone here."""
    export = engine.export(id, have)
    seal = engine.seal(id)
    cargo = Cargo([(run.index, bytes(export.read(run.index)), run.checksum) for run in export.runs], seal)
    engine.release(id)
    return cargo


def deliver(engine: Engine, request: Request, cargo: Cargo) -> None:
    """Room, all blocks, the seal. An arrival that fails leaves nothing behind."""
    arrival = engine.reserve(replace(request, park_after=None))
    try:
        arrival.extend(request.prompt_len + len(cargo.seal.output))
        for block in cargo.runs:
            arrival.write(*block)
        engine.join(arrival, cargo.seal)
    finally:
        arrival.abort()


def forged(cargo: Cargo, blocks: dict[int, bytes]) -> Cargo:
    """Other bytes in some blocks, and sums that agree with them."""
    changed = [(index, blocks.get(index, data)) for index, data, _ in cargo.runs]
    runs = [(index, data, block_checksum(default_checksum, index, data)) for index, data in changed]
    sums = [total for _, _, total in runs]
    seal = replace(
        cargo.seal, checksum=transfer_checksum(default_checksum, cargo.seal.computed, cargo.seal.output, sums)
    )
    return Cargo(runs, seal)


def step_until(engine: Engine, reached: Callable[[], bool], ear: Ear | None = None) -> Ear:
    """Step until something has happened."""
    ear = ear or Ear()
    for _ in range(2000):
        if reached():
            return ear
        ear.hear(engine.step())
    raise AssertionError("it never happened")
