"""What the seams of a handoff promise, on a device of plain bytes and on a real model alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from decant.engine.engine import Engine
from decant.engine.errors import InvalidRequest, OutOfBlocks, TransferRejected, UnknownSequence
from decant.engine.output import BlockFilled
from decant.engine.plan import Device
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from decant.engine.transfer import IncomingSequence, TransferCommit, block_checksum, default_checksum, transfer_checksum
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    Cargo,
    Ear,
    Heard,
    deliver,
    make_engine,
    make_request,
    plainly,
    prompt,
    run,
    step_until,
    unload,
)
from tests.engine.properties import nothing_is_held, told_as_alone

MOVED = make_request("moved", 22, 12, sampling=SamplingParams(temperature=1.0, seed=3), park_after=2, logprobs=1)
_EXPECTED: dict[str, Heard] = {}


def expected(make: MakeDevice, request: Request = MOVED) -> Heard:
    device = make()
    key = f"{device.layout} {request}"
    if key not in _EXPECTED:
        _EXPECTED[key] = plainly(device, request)
    return _EXPECTED[key]


def engine_of(make: MakeDevice, num_blocks: int = 32, **limits: int) -> Engine:
    return make_engine(device=make(num_blocks), **limits)


def parked_giver(make: MakeDevice) -> tuple[Engine, Ear]:
    giver = engine_of(make, budget=8)
    return giver, run(giver, MOVED)


# -- a cache changes hands --------------------------------------------------------------------------------------


@pytest.mark.parametrize("have", [0, 2, 5])
def test_a_text_goes_on_elsewhere_from_its_blocks(make: MakeDevice, have: int) -> None:
    """With nothing there, with a cached prefix, and with all but the last block cached."""
    giver, ear = parked_giver(make)
    taker = engine_of(make)
    if have:
        run(taker, make_request("before", MOVED.token_ids[: have * 4 + 1], 1))
    cargo = unload(giver, "moved", have)
    assert [index for index, _, _ in cargo.runs] == list(range(have, 6))
    deliver(taker, MOVED, cargo)
    assert taker.scheduler.running[0].remaining == 1, "nothing is computed again"
    run(taker, ear=ear)
    told_as_alone(ear["moved"], expected(make))
    for engine in (giver, taker):
        nothing_is_held(engine)


def test_blocks_leave_while_the_prompt_is_still_computed(make: MakeDevice) -> None:
    giver, taker, ear = engine_of(make, budget=8), engine_of(make), Ear()
    giver.add(MOVED)
    arrival = taker.reserve(replace(MOVED, park_after=None))
    export = giver.export("moved", arrival.have)
    filled: list[BlockFilled] = []
    sent = [0]
    while not giver.load().parked:
        filled += ear.hear(giver.step()).filled
        sent.append(len(export.runs))
        for run_ in export.runs[sent[-2] : sent[-1]]:
            arrival.write(run_.index, bytes(export.read(run_.index)), run_.checksum)
    assert sent[1:4] == [2, 4, 5], "a block is offered by the step that fills it"
    assert [told.block for told in filled] == [run_.index for run_ in export.runs]
    seal = giver.seal("moved")
    for run_ in export.runs[sent[-1] :]:
        arrival.write(run_.index, bytes(export.read(run_.index)), run_.checksum)
    taker.join(arrival, seal)
    giver.release("moved")
    run(taker, ear=ear)
    told_as_alone(ear["moved"], expected(make))
    for engine in (giver, taker):
        nothing_is_held(engine)


def test_the_step_that_writes_the_last_token_before_a_handoff_says_that_it_parked(make: MakeDevice) -> None:
    giver = engine_of(make, budget=8)
    giver.add(MOVED)
    giver.add(replace(MOVED, id="short", stop=StopParams(max_tokens=2)))
    parked, ended = list[tuple[str, int]](), list[str]()
    while giver.has_work:
        output = giver.step()
        parked += [(id, token.position) for id in output.parked for token in output.tokens if token.id == id]
        ended += [told.id for told in output.ended]
    assert parked == [("moved", 1)]
    assert ended == ["short"], "what ends is not parked"


def test_a_sequence_is_drained_in_the_middle_of_its_text(make: MakeDevice) -> None:
    """It writes on while its blocks leave; only the last ones are moved while it stands still."""
    giver, taker = engine_of(make), engine_of(make)
    request, other = replace(MOVED, park_after=None), make_request("other", prompt(9, 4), 12)
    giver.add(other)
    giver.add(request)
    ear = Ear()
    step_until(giver, lambda: len(ear["moved"].text) == 4, ear)
    arrival, export = taker.reserve(request), giver.export("moved")
    step_until(giver, lambda: len(ear["moved"].text) == 8, ear)
    giver.park("moved")
    ear.hear(giver.step())
    assert len(ear["moved"].text) == 8, "a parked sequence is not stepped"
    seal = giver.seal("moved")
    arrival.extend(len(ear["moved"].text) + request.prompt_len)
    for run_ in export.runs:
        arrival.write(run_.index, bytes(export.read(run_.index)), run_.checksum)
    taker.join(arrival, seal)
    giver.release("moved")
    run(taker, ear=ear)
    run(giver, ear=ear)
    for each in (request, other):
        told_as_alone(ear[each.id], expected(make, each))
    for engine in (giver, taker):
        nothing_is_held(engine)


def test_a_parked_sequence_that_nobody_takes_goes_on_here(make: MakeDevice) -> None:
    giver, ear = parked_giver(make)
    giver.export("moved")
    giver.seal("moved")
    giver.resume("moved")
    giver.release("moved")
    run(giver, ear=ear)
    told_as_alone(ear["moved"], expected(make))
    nothing_is_held(giver)


def test_prompt_log_probabilities_are_told_once_across_a_handoff_and_a_preemption(make: MakeDevice) -> None:
    request = replace(MOVED, prompt_logprobs=1)
    giver, taker = engine_of(make, budget=8), engine_of(make, num_blocks=12)
    ear = run(giver, request)
    deliver(taker, request, unload(giver, "moved"))
    taker.add(make_request("urgent", prompt(12, 6), 24, priority=9))
    run(taker, ear=ear)
    assert taker.load().preemptions
    told_as_alone(ear["moved"], expected(make, request))


def test_a_lease_keeps_the_bytes_of_a_sequence_that_has_ended(make: MakeDevice) -> None:
    giver, _ = parked_giver(make)
    export = giver.export("moved")
    sums = [run_.checksum for run_ in export.runs]
    giver.cancel("moved")
    run(giver, make_request("after", prompt(80, 9), 2))
    assert export.ended
    assert [block_checksum(default_checksum, run_.index, export.read(run_.index)) for run_ in export.runs] == sums
    giver.release("moved")
    with pytest.raises(TransferRejected):
        export.read(0)
    nothing_is_held(giver)


def test_what_a_sequence_and_its_export_hold_is_counted_once(make: MakeDevice) -> None:
    giver, _ = parked_giver(make)
    held = giver.load().held_blocks
    assert giver.blocks_of(["moved", "nobody"]) == held > 0
    giver.export("moved", 1)
    assert giver.blocks_of(["moved"]) == held
    giver.cancel("moved")
    assert 0 < giver.blocks_of(["moved"]) == giver.load().held_blocks < held  # the first one is not leased
    giver.release("moved")
    assert giver.blocks_of(["moved"]) == 0


# -- what does not agree ----------------------------------------------------------------------------------------


def _flip(data: bytes) -> bytes:
    return data[:7] + bytes([data[7] ^ 16]) + data[8:]


def _change(cargo: Cargo, **seal: object) -> Cargo:
    return replace(cargo, seal=replace(cargo.seal, **seal))  # type: ignore[arg-type]


BROKEN: dict[str, tuple[str, Callable[[Cargo], Cargo]]] = {
    "a byte is flipped": (
        "bytes of block 0",
        lambda c: replace(c, runs=[(c.runs[0][0], _flip(c.runs[0][1]), c.runs[0][2]), *c.runs[1:]]),
    ),
    "a sum is another's": (
        "bytes of block 0",
        lambda c: replace(c, runs=[(*c.runs[0][:2], c.runs[1][2]), *c.runs[1:]]),
    ),
    "two are swapped": (
        "bytes of block 1",
        lambda c: replace(c, runs=[(1, *c.runs[0][1:]), (0, *c.runs[1][1:]), *c.runs[2:]]),
    ),
    "a block is cut short": (
        "block 0 has",
        lambda c: replace(c, runs=[(0, c.runs[0][1][:-1], c.runs[0][2]), *c.runs[1:]]),
    ),
    "a block is too long": (
        "block 0 has",
        lambda c: replace(c, runs=[(0, c.runs[0][1] + b"\0", c.runs[0][2]), *c.runs[1:]]),
    ),
    "a block is empty": ("block 0 has 0", lambda c: replace(c, runs=[(0, b"", c.runs[0][2]), *c.runs[1:]])),
    "the first is missing": (r"blocks \[0\] missing", lambda c: replace(c, runs=c.runs[1:])),
    "the last is missing": (r"blocks \[5\] missing", lambda c: replace(c, runs=c.runs[:-1])),
    "all are missing": (r"blocks \[0, .* missing", lambda c: replace(c, runs=[])),
    "one is beyond the seal": (
        r"blocks \[\] missing, 7 here",
        lambda c: replace(c, runs=[*c.runs, (6, c.runs[0][1], block_checksum(default_checksum, 6, c.runs[0][1]))]),
    ),
    "the seal's sum is flipped": ("agree with its sum", lambda c: _change(c, checksum=c.seal.checksum ^ 1)),
    "the seal says fewer tokens": ("does not speak", lambda c: _change(c, computed=c.seal.computed - 1)),
    "the seal says more tokens": ("does not speak", lambda c: _change(c, computed=c.seal.computed + 1)),
    "the seal's text is changed": (
        "agree with its sum",
        lambda c: _change(c, output=(c.seal.output[0] ^ 1, *c.seal.output[1:])),
    ),
    "the seal's text is cut": ("does not speak", lambda c: _change(c, output=c.seal.output[:-1])),
    "the seal has no text": ("does not speak", lambda c: _change(c, output=())),
    "the seal is of a shorter text": (
        "agree with its sum",
        lambda c: _change(c, output=c.seal.output[:-1], computed=c.seal.computed - 1),
    ),
}
"""What is done to a cargo, and the words of the check that finds it."""


@pytest.mark.parametrize("fault", BROKEN)
def test_what_does_not_agree_never_becomes_a_sequence(make: MakeDevice, fault: str) -> None:
    """It is refused, nothing is left of it, and the next attempt is not misled by what came before."""
    giver, _ = parked_giver(make)
    taker = engine_of(make)
    ear = run(taker, make_request("other", prompt(9, 4)), steps=2)
    found_by, change = BROKEN[fault]
    with pytest.raises(TransferRejected, match=found_by):
        deliver(taker, MOVED, change(unload(giver, "moved")))
    taker.check_integrity()
    run(taker, ear=ear)
    nothing_is_held(taker)
    assert "moved" not in ear.heard
    again = replace(MOVED, park_after=None)
    told_as_alone(run(taker, again)["moved"], expected(make))


def test_a_block_that_is_here_already_is_not_written_over_and_none_goes_beyond_the_room(make: MakeDevice) -> None:
    giver, _ = parked_giver(make)
    cargo, taker = unload(giver, "moved"), engine_of(make)
    run(taker, make_request("before", MOVED.token_ids[:9], 1))
    arrival = taker.reserve(MOVED)
    assert (arrival.have, arrival.room) == (2, 6)
    data = cargo.runs[3][1]
    for index in (0, 1, 6):
        with pytest.raises(TransferRejected, match=f"no room for block {index}"):
            arrival.write(index, data, block_checksum(default_checksum, index, data))
    arrival.abort()
    nothing_is_held(taker)
    told_as_alone(run(taker, replace(MOVED, park_after=None))["moved"], expected(make))


def test_a_byte_that_flips_between_its_computing_and_its_export_is_noticed(make: MakeDevice) -> None:
    """The sum was made when the block was filled."""
    giver, _ = parked_giver(make)
    holding = giver._sequences["moved"].holding
    assert holding is not None
    giver.device.write(holding.blocks[1], _flip(bytes(giver.device.read(holding.blocks[1]))))
    with pytest.raises(TransferRejected, match="block 1"):
        deliver(engine_of(make), MOVED, unload(giver, "moved"))
    nothing_is_held(giver)


def test_the_same_block_may_come_again_and_no_other_in_its_place(make: MakeDevice) -> None:
    giver, _ = parked_giver(make)
    cargo, taker = unload(giver, "moved"), engine_of(make)
    arrival = taker.reserve(MOVED)
    for _ in range(2):
        arrival.write(*cargo.runs[0])
    other = _flip(cargo.runs[0][1])
    with pytest.raises(TransferRejected, match="again"):
        arrival.write(0, other, block_checksum(default_checksum, 0, other))
    arrival.abort()
    nothing_is_held(taker)


def test_blocks_may_be_written_by_another_thread_beside_the_steps(make: MakeDevice) -> None:
    """Until the arrival is closed; what came is whole, and the others' texts are what they are alone."""
    giver, _ = parked_giver(make)
    cargo, taker = unload(giver, "moved"), engine_of(make)
    arrival = taker.reserve(MOVED)
    ends: list[str] = []

    def write() -> None:
        try:
            while True:
                for block in cargo.runs:
                    arrival.write(*block)
        except TransferRejected as closed:
            ends.append(str(closed))

    thread = threading.Thread(target=write)
    thread.start()
    other = make_request("other", prompt(9, 4), 12)
    ear = run(taker, other)
    arrival.abort()
    thread.join(20)
    assert ends == ["moved: this arrival is closed"]
    nothing_is_held(taker)
    told_as_alone(ear["other"], expected(make, other))
    told_as_alone(run(taker, replace(MOVED, park_after=None))["moved"], expected(make))


def test_a_block_is_not_freed_under_a_copy(make: MakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, _ = parked_giver(make)
    cargo, taker = unload(giver, "moved"), engine_of(make)
    arrival, kind = taker.reserve(MOVED), type(taker.device)
    original = kind.write
    begun, let = threading.Event(), threading.Event()

    def write(device: Device, block: int, data: bytes) -> None:
        begun.set()
        assert let.wait(20)
        original(device, block, data)

    monkeypatch.setattr(kind, "write", write)
    copying = threading.Thread(target=arrival.write, args=cargo.runs[0])
    closing = threading.Thread(target=arrival.abort)
    copying.start()
    assert begun.wait(20)
    closing.start()
    closing.join(0.1)
    held = taker.load().held_blocks
    let.set()
    for thread in (copying, closing):
        thread.join(20)
    assert held == 6, "it closes only after the copy"
    nothing_is_held(taker)


def test_blocks_that_came_before_a_break_are_a_prefix_for_the_next_attempt(make: MakeDevice) -> None:
    giver, ear = parked_giver(make)
    cargo, taker = unload(giver, "moved"), engine_of(make)
    arrival = taker.reserve(MOVED)
    for block in cargo.runs[:3]:
        arrival.write(*block)
    arrival.abort()
    assert taker.reserve(MOVED).have == 3
    taker.cancel("moved")
    tokens, written = (*MOVED.token_ids, *cargo.seal.output), ear["moved"].text
    run(taker, replace(MOVED, token_ids=tokens, prompt_tokens=MOVED.prompt_len, park_after=None), ear=ear)
    assert written == ear["moved"].text[: len(written)]
    told_as_alone(ear["moved"], expected(make))


def test_a_text_that_does_not_begin_with_what_is_known_is_refused(make: MakeDevice) -> None:
    giver, _ = parked_giver(make)
    cargo, taker = unload(giver, "moved"), engine_of(make)
    known = (*MOVED.token_ids, cargo.seal.output[0] ^ 1)
    request = replace(MOVED, token_ids=known, prompt_tokens=MOVED.prompt_len)
    with pytest.raises(TransferRejected, match="does not speak"):
        deliver(taker, request, cargo)
    nothing_is_held(taker)


# -- room, and letting go ---------------------------------------------------------------------------------------


def test_no_room_reserves_nothing(make: MakeDevice) -> None:
    taker = engine_of(make, num_blocks=8)
    ear = run(taker, make_request("holder", prompt(16, 2), 8), steps=1)
    before = taker.load()
    with pytest.raises(OutOfBlocks) as full:
        taker.reserve(MOVED)
    assert full.value.needed > full.value.available
    taker.check_integrity()
    assert taker.load() == before
    run(taker, ear=ear)
    arrival = taker.reserve(MOVED)
    assert len(arrival.sequence.holding.blocks if arrival.sequence.holding else ()) == 6
    arrival.abort()
    nothing_is_held(taker)


def test_room_is_reserved_for_no_more_than_may_run(make: MakeDevice) -> None:
    taker = engine_of(make, max_running=2)
    ear = run(taker, make_request("a", 5), steps=1)
    arrival = taker.reserve(MOVED)
    with pytest.raises(OutOfBlocks):
        taker.reserve(replace(MOVED, id="second"))
    arrival.abort()
    taker.reserve(replace(MOVED, id="second")).abort()
    run(taker, ear=ear)
    nothing_is_held(taker)


@pytest.mark.parametrize("by", ["abort", "cancel"])
def test_an_arrival_that_is_let_go_frees_all_and_takes_nothing_more(make: MakeDevice, by: str) -> None:
    giver, _ = parked_giver(make)
    cargo, taker = unload(giver, "moved"), engine_of(make)
    arrival = taker.reserve(MOVED)
    arrival.write(*cargo.runs[0])
    if by == "abort":
        arrival.abort()
    else:
        assert taker.cancel("moved")
    arrival.abort()
    nothing_is_held(taker)
    assert not taker.has_work, "what never was a sequence has no end to tell"
    uses: list[Callable[[], object]] = [
        lambda: arrival.write(*cargo.runs[1]),
        lambda: arrival.extend(40),
        lambda: taker.join(arrival, cargo.seal),
    ]
    for use in uses:
        with pytest.raises(TransferRejected, match="closed"):
            use()
    nothing_is_held(taker)


def test_an_arrival_that_has_joined_can_no_longer_touch_the_sequence(make: MakeDevice) -> None:
    giver, ear = parked_giver(make)
    cargo, taker = unload(giver, "moved"), engine_of(make)
    arrival: IncomingSequence = taker.reserve(replace(MOVED, park_after=None))
    for block in cargo.runs:
        arrival.write(*block)
    taker.join(arrival, cargo.seal)
    arrival.abort()
    uses: list[Callable[[], object]] = [
        lambda: arrival.write(*cargo.runs[0]),
        lambda: arrival.extend(40),
        lambda: taker.join(arrival, cargo.seal),
    ]
    for use in uses:
        with pytest.raises(TransferRejected, match="closed"):
            use()
    run(taker, ear=ear)
    told_as_alone(ear["moved"], expected(make))


@pytest.mark.parametrize("when", ["in its prompt", "parked", "sealed"])
def test_a_cancel_during_an_export_frees_all_but_the_lease(make: MakeDevice, when: str) -> None:
    giver = engine_of(make, budget=8)
    ear = run(giver, MOVED, steps=1 if when == "in its prompt" else 99)
    export = giver.export("moved")
    if when == "sealed":
        giver.seal("moved")
    assert giver.cancel("moved")
    giver.check_integrity()
    ear.hear(giver.step())
    assert ear["moved"].reason is FinishReason.CANCELLED
    assert export.ended is (when != "sealed")
    with pytest.raises(UnknownSequence):
        giver.seal("moved")
    with pytest.raises(InvalidRequest, match="alive"):
        giver.add(MOVED)
    giver.release("moved")
    giver.release("moved")
    nothing_is_held(giver)


def test_a_sequence_in_its_prompt_can_not_be_sealed(make: MakeDevice) -> None:
    giver = engine_of(make, budget=8)
    ear = run(giver, MOVED, steps=1)
    giver.park("moved")
    giver.export("moved")
    with pytest.raises(InvalidRequest) as refused:
        giver.seal("moved")
    assert (refused.value.field, refused.value.value) == ("computed", 8)
    giver.release("moved")
    giver.resume("moved")
    run(giver, ear=ear)
    giver.resume("moved")
    told_as_alone(run(giver, ear=ear)["moved"], expected(make))


def test_seams_that_do_not_fit_are_typed_errors(make: MakeDevice) -> None:
    engine = engine_of(make)
    uses: list[Callable[[str], object]] = [engine.park, engine.resume, engine.export, engine.seal]
    for use in uses:
        with pytest.raises(UnknownSequence):
            use("nobody")
    engine.release("nobody")
    engine.add(MOVED)
    with pytest.raises(UnknownSequence):
        engine.park("moved")  # it waits
    for have in (-1, 6):
        with pytest.raises(InvalidRequest) as refused:
            engine.export("moved", have)
        assert (refused.value.field, refused.value.value) == ("have", have)
    engine.export("moved", 5)
    with pytest.raises(InvalidRequest, match="exported already"):
        engine.export("moved")
    with pytest.raises(InvalidRequest, match="alive"):
        engine.reserve(MOVED)
    with pytest.raises(InvalidRequest) as refused:
        engine.reserve(make_request("full", 96))
    assert refused.value.field == "token_ids"
    engine.cancel("moved")
    engine.release("moved")
    run(engine)
    nothing_is_held(engine)


def test_a_seal_speaks_of_its_blocks_its_text_and_its_length() -> None:
    seal = TransferCommit(3, (5,), transfer_checksum(default_checksum, 3, (5,), (7, 8)))
    others = [(4, (5,), (7, 8)), (3, (6,), (7, 8)), (3, (5,), (8, 7)), (3, (5, 7), (8,)), (3, (), (5, 7, 8))]
    assert seal.checksum not in {transfer_checksum(default_checksum, *words) for words in others}
