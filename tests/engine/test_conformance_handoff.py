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
    OutputLog,
    Payload,
    SequenceOutput,
    export_sequence,
    import_sequence,
    make_engine,
    make_request,
    prompt,
    recompute_each_step,
    run,
    step_until,
)
from tests.engine.properties import nothing_is_held, same_output_as_alone

MOVED = make_request("moved", 22, 12, sampling=SamplingParams(temperature=1.0, seed=3), park_after=2, logprobs=1)
_EXPECTED: dict[str, SequenceOutput] = {}


def expected(make: MakeDevice, request: Request = MOVED) -> SequenceOutput:
    device = make()
    key = f"{device.layout} {request}"
    if key not in _EXPECTED:
        _EXPECTED[key] = recompute_each_step(device, request)
    return _EXPECTED[key]


def engine_of(make: MakeDevice, num_blocks: int = 32, **limits: int) -> Engine:
    return make_engine(device=make(num_blocks), **limits)


def parked_sender(make: MakeDevice) -> tuple[Engine, OutputLog]:
    sender = engine_of(make, budget=8)
    return sender, run(sender, MOVED)


# -- a cache changes hands --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached_blocks", [0, 2, 5])
def test_an_output_continues_elsewhere_from_its_blocks(make: MakeDevice, cached_blocks: int) -> None:
    """With nothing there, with a cached prefix, and with all but the last block cached."""
    sender, log = parked_sender(make)
    receiver = engine_of(make)
    if cached_blocks:
        run(receiver, make_request("before", MOVED.token_ids[: cached_blocks * 4 + 1], 1))
    payload = export_sequence(sender, "moved", cached_blocks)
    assert [index for index, _, _ in payload.runs] == list(range(cached_blocks, 6))
    import_sequence(receiver, MOVED, payload)
    assert receiver.scheduler.running[0].remaining == 1, "nothing is computed again"
    run(receiver, log=log)
    same_output_as_alone(log["moved"], expected(make))
    for engine in (sender, receiver):
        nothing_is_held(engine)


def test_blocks_leave_while_the_prompt_is_still_computed(make: MakeDevice) -> None:
    sender, receiver, log = engine_of(make, budget=8), engine_of(make), OutputLog()
    sender.add(MOVED)
    arrival = receiver.transfers.reserve(replace(MOVED, park_after=None))
    export = sender.transfers.export("moved", arrival.cached_blocks)
    filled: list[BlockFilled] = []
    sent = [0]
    while not sender.load().parked:
        filled += log.record(sender.step()).filled
        sent.append(len(export.runs))
        for run_ in export.runs[sent[-2] : sent[-1]]:
            arrival.write(run_.index, bytes(export.read(run_.index)), run_.checksum)
    assert sent[1:4] == [2, 4, 5], "a block is offered by the step that fills it"
    assert [events.block for events in filled] == [run_.index for run_ in export.runs]
    commit = sender.transfers.finalize("moved")
    for run_ in export.runs[sent[-1] :]:
        arrival.write(run_.index, bytes(export.read(run_.index)), run_.checksum)
    receiver.transfers.join(arrival, commit)
    sender.transfers.release("moved")
    run(receiver, log=log)
    same_output_as_alone(log["moved"], expected(make))
    for engine in (sender, receiver):
        nothing_is_held(engine)


def test_the_step_that_reaches_park_after_reports_it(make: MakeDevice) -> None:
    sender = engine_of(make, budget=8)
    sender.add(MOVED)
    sender.add(replace(MOVED, id="short", stop=StopParams(max_tokens=2)))
    parked, ended = list[tuple[str, int]](), list[str]()
    while sender.has_work:
        output = sender.step()
        parked += [(id, token.position) for id in output.parked for token in output.tokens if token.id == id]
        ended += [events.id for events in output.ended]
    assert parked == [("moved", 1)]
    assert ended == ["short"], "what ends is not parked"


def test_a_sequence_is_migrated_in_the_middle_of_its_output(make: MakeDevice) -> None:
    """It decodes while its blocks are sent; only the last ones are sent while it is parked."""
    sender, receiver = engine_of(make), engine_of(make)
    request, other = replace(MOVED, park_after=None), make_request("other", prompt(9, 4), 12)
    sender.add(other)
    sender.add(request)
    log = OutputLog()
    step_until(sender, lambda: len(log["moved"].text) == 4, log)
    arrival, export = receiver.transfers.reserve(request), sender.transfers.export("moved")
    step_until(sender, lambda: len(log["moved"].text) == 8, log)
    sender.park("moved")
    log.record(sender.step())
    assert len(log["moved"].text) == 8, "a parked sequence is not stepped"
    commit = sender.transfers.finalize("moved")
    arrival.extend(len(log["moved"].text) + request.prompt_len)
    for run_ in export.runs:
        arrival.write(run_.index, bytes(export.read(run_.index)), run_.checksum)
    receiver.transfers.join(arrival, commit)
    sender.transfers.release("moved")
    run(receiver, log=log)
    run(sender, log=log)
    for each in (request, other):
        same_output_as_alone(log[each.id], expected(make, each))
    for engine in (sender, receiver):
        nothing_is_held(engine)


def test_a_parked_sequence_without_a_receiver_resumes(make: MakeDevice) -> None:
    sender, log = parked_sender(make)
    sender.transfers.export("moved")
    sender.transfers.finalize("moved")
    sender.resume("moved")
    sender.transfers.release("moved")
    run(sender, log=log)
    same_output_as_alone(log["moved"], expected(make))
    nothing_is_held(sender)


def test_prompt_log_probabilities_are_emitted_once_across_handoff_and_preemption(make: MakeDevice) -> None:
    request = replace(MOVED, prompt_logprobs=1)
    sender, receiver = engine_of(make, budget=8), engine_of(make, num_blocks=12)
    log = run(sender, request)
    import_sequence(receiver, request, export_sequence(sender, "moved"))
    receiver.add(make_request("urgent", prompt(12, 6), 24, priority=9))
    run(receiver, log=log)
    assert receiver.load().preemptions
    same_output_as_alone(log["moved"], expected(make, request))


def test_a_lease_keeps_the_bytes_of_a_sequence_that_has_ended(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    export = sender.transfers.export("moved")
    sums = [run_.checksum for run_ in export.runs]
    sender.cancel("moved")
    run(sender, make_request("after", prompt(80, 9), 2))
    assert export.ended
    assert [block_checksum(default_checksum, run_.index, export.read(run_.index)) for run_ in export.runs] == sums
    sender.transfers.release("moved")
    with pytest.raises(TransferRejected):
        export.read(0)
    nothing_is_held(sender)


def test_blocks_of_a_sequence_and_its_export_are_counted_once(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    held = sender.load().held_blocks
    assert sender.blocks_of(["moved", "nobody"]) == held > 0
    sender.transfers.export("moved", 1)
    assert sender.blocks_of(["moved"]) == held
    sender.cancel("moved")
    assert 0 < sender.blocks_of(["moved"]) == sender.load().held_blocks < held  # the first one is not leased
    sender.transfers.release("moved")
    assert sender.blocks_of(["moved"]) == 0


# -- what does not agree ----------------------------------------------------------------------------------------


def _flip(data: bytes) -> bytes:
    return data[:7] + bytes([data[7] ^ 16]) + data[8:]


def _change(payload: Payload, **commit: object) -> Payload:
    return replace(payload, commit=replace(payload.commit, **commit))  # type: ignore[arg-type]


BROKEN: dict[str, tuple[str, Callable[[Payload], Payload]]] = {
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
    "one is beyond the commit": (
        r"blocks \[\] missing, 7 here",
        lambda c: replace(c, runs=[*c.runs, (6, c.runs[0][1], block_checksum(default_checksum, 6, c.runs[0][1]))]),
    ),
    "the commit's checksum is flipped": (
        "does not match its checksum",
        lambda c: _change(c, checksum=c.commit.checksum ^ 1),
    ),
    "the commit says fewer tokens": ("not of this sequence", lambda c: _change(c, computed=c.commit.computed - 1)),
    "the commit says more tokens": ("not of this sequence", lambda c: _change(c, computed=c.commit.computed + 1)),
    "the commit's output is changed": (
        "does not match its checksum",
        lambda c: _change(c, output=(c.commit.output[0] ^ 1, *c.commit.output[1:])),
    ),
    "the commit's output is cut": ("not of this sequence", lambda c: _change(c, output=c.commit.output[:-1])),
    "the commit has no output": ("not of this sequence", lambda c: _change(c, output=())),
    "the commit is of a shorter output": (
        "does not match its checksum",
        lambda c: _change(c, output=c.commit.output[:-1], computed=c.commit.computed - 1),
    ),
}
"""What is done to a cargo, and the words of the check that finds it."""


@pytest.mark.parametrize("fault", BROKEN)
def test_what_does_not_agree_never_becomes_a_sequence(make: MakeDevice, fault: str) -> None:
    """It is refused, nothing is left of it, and the next attempt is not misled by what came before."""
    sender, _ = parked_sender(make)
    receiver = engine_of(make)
    log = run(receiver, make_request("other", prompt(9, 4)), steps=2)
    found_by, change = BROKEN[fault]
    with pytest.raises(TransferRejected, match=found_by):
        import_sequence(receiver, MOVED, change(export_sequence(sender, "moved")))
    receiver.check_integrity()
    run(receiver, log=log)
    nothing_is_held(receiver)
    assert "moved" not in log.by_id
    again = replace(MOVED, park_after=None)
    same_output_as_alone(run(receiver, again)["moved"], expected(make))


def test_a_cached_block_is_not_overwritten_and_none_goes_beyond_the_block_table(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    run(receiver, make_request("before", MOVED.token_ids[:9], 1))
    arrival = receiver.transfers.reserve(MOVED)
    assert (arrival.cached_blocks, arrival.num_blocks) == (2, 6)
    data = payload.runs[3][1]
    for index in (0, 1, 6):
        with pytest.raises(TransferRejected, match=f"no room for block {index}"):
            arrival.write(index, data, block_checksum(default_checksum, index, data))
    arrival.abort()
    nothing_is_held(receiver)
    same_output_as_alone(run(receiver, replace(MOVED, park_after=None))["moved"], expected(make))


def test_a_byte_that_flips_between_its_computing_and_its_export_is_noticed(make: MakeDevice) -> None:
    """The sum was made when the block was filled."""
    sender, _ = parked_sender(make)
    table = sender.sequences["moved"].block_table
    assert table is not None
    sender.device.write(table.blocks[1], _flip(bytes(sender.device.read(table.blocks[1]))))
    with pytest.raises(TransferRejected, match="block 1"):
        import_sequence(engine_of(make), MOVED, export_sequence(sender, "moved"))
    nothing_is_held(sender)


def test_a_repeated_block_is_accepted_and_another_refused(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    arrival = receiver.transfers.reserve(MOVED)
    for _ in range(2):
        arrival.write(*payload.runs[0])
    other = _flip(payload.runs[0][1])
    with pytest.raises(TransferRejected, match="again"):
        arrival.write(0, other, block_checksum(default_checksum, 0, other))
    arrival.abort()
    nothing_is_held(receiver)


def test_blocks_may_be_written_by_another_thread_during_steps(make: MakeDevice) -> None:
    """Until the arrival is closed; received blocks are complete, and other outputs are as alone."""
    sender, _ = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    arrival = receiver.transfers.reserve(MOVED)
    ends: list[str] = []

    def write() -> None:
        try:
            while True:
                for block in payload.runs:
                    arrival.write(*block)
        except TransferRejected as closed:
            ends.append(str(closed))

    thread = threading.Thread(target=write)
    thread.start()
    other = make_request("other", prompt(9, 4), 12)
    log = run(receiver, other)
    arrival.abort()
    thread.join(20)
    assert ends == ["moved: this arrival is closed"]
    nothing_is_held(receiver)
    same_output_as_alone(log["other"], expected(make, other))
    same_output_as_alone(run(receiver, replace(MOVED, park_after=None))["moved"], expected(make))


def test_a_block_is_not_freed_under_a_copy(make: MakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, _ = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    arrival, kind = receiver.transfers.reserve(MOVED), type(receiver.device)
    original = kind.write
    begun, let = threading.Event(), threading.Event()

    def write(device: Device, block: int, data: bytes) -> None:
        begun.set()
        assert let.wait(20)
        original(device, block, data)

    monkeypatch.setattr(kind, "write", write)
    copying = threading.Thread(target=arrival.write, args=payload.runs[0])
    closing = threading.Thread(target=arrival.abort)
    copying.start()
    assert begun.wait(20)
    closing.start()
    closing.join(0.1)
    held = receiver.load().held_blocks
    let.set()
    for thread in (copying, closing):
        thread.join(20)
    assert held == 6, "it closes only after the copy"
    nothing_is_held(receiver)


def test_blocks_that_came_before_a_break_are_a_prefix_for_the_next_attempt(make: MakeDevice) -> None:
    sender, log = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    arrival = receiver.transfers.reserve(MOVED)
    for block in payload.runs[:3]:
        arrival.write(*block)
    arrival.abort()
    assert receiver.transfers.reserve(MOVED).cached_blocks == 3
    receiver.cancel("moved")
    tokens, written = (*MOVED.token_ids, *payload.commit.output), log["moved"].text
    run(receiver, replace(MOVED, token_ids=tokens, prompt_tokens=MOVED.prompt_len, park_after=None), log=log)
    assert written == log["moved"].text[: len(written)]
    same_output_as_alone(log["moved"], expected(make))


def test_an_output_that_does_not_start_with_the_known_tokens_is_refused(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    known = (*MOVED.token_ids, payload.commit.output[0] ^ 1)
    request = replace(MOVED, token_ids=known, prompt_tokens=MOVED.prompt_len)
    with pytest.raises(TransferRejected, match="not of this sequence"):
        import_sequence(receiver, request, payload)
    nothing_is_held(receiver)


# -- room, and letting go ---------------------------------------------------------------------------------------


def test_a_reservation_without_blocks_leaves_nothing(make: MakeDevice) -> None:
    receiver = engine_of(make, num_blocks=8)
    log = run(receiver, make_request("holder", prompt(16, 2), 8), steps=1)
    before = receiver.load()
    with pytest.raises(OutOfBlocks) as full:
        receiver.transfers.reserve(MOVED)
    assert full.value.needed > full.value.available
    receiver.check_integrity()
    assert receiver.load() == before
    run(receiver, log=log)
    arrival = receiver.transfers.reserve(MOVED)
    assert len(arrival.sequence.block_table.blocks if arrival.sequence.block_table else ()) == 6
    arrival.abort()
    nothing_is_held(receiver)


def test_reservations_respect_max_running(make: MakeDevice) -> None:
    receiver = engine_of(make, max_running=2)
    log = run(receiver, make_request("a", 5), steps=1)
    arrival = receiver.transfers.reserve(MOVED)
    with pytest.raises(OutOfBlocks):
        receiver.transfers.reserve(replace(MOVED, id="second"))
    arrival.abort()
    receiver.transfers.reserve(replace(MOVED, id="second")).abort()
    run(receiver, log=log)
    nothing_is_held(receiver)


@pytest.mark.parametrize("by", ["abort", "cancel"])
def test_an_arrival_that_is_let_go_frees_all_and_takes_nothing_more(make: MakeDevice, by: str) -> None:
    sender, _ = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    arrival = receiver.transfers.reserve(MOVED)
    arrival.write(*payload.runs[0])
    if by == "abort":
        arrival.abort()
    else:
        assert receiver.cancel("moved")
    arrival.abort()
    nothing_is_held(receiver)
    assert not receiver.has_work, "what never was a sequence has no end to tell"
    uses: list[Callable[[], object]] = [
        lambda: arrival.write(*payload.runs[1]),
        lambda: arrival.extend(40),
        lambda: receiver.transfers.join(arrival, payload.commit),
    ]
    for use in uses:
        with pytest.raises(TransferRejected, match="closed"):
            use()
    nothing_is_held(receiver)


def test_an_arrival_that_has_joined_can_no_longer_touch_the_sequence(make: MakeDevice) -> None:
    sender, log = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    arrival: IncomingSequence = receiver.transfers.reserve(replace(MOVED, park_after=None))
    for block in payload.runs:
        arrival.write(*block)
    receiver.transfers.join(arrival, payload.commit)
    arrival.abort()
    uses: list[Callable[[], object]] = [
        lambda: arrival.write(*payload.runs[0]),
        lambda: arrival.extend(40),
        lambda: receiver.transfers.join(arrival, payload.commit),
    ]
    for use in uses:
        with pytest.raises(TransferRejected, match="closed"):
            use()
    run(receiver, log=log)
    same_output_as_alone(log["moved"], expected(make))


@pytest.mark.parametrize("when", ["in its prompt", "parked", "sealed"])
def test_a_cancel_during_an_export_frees_all_but_the_lease(make: MakeDevice, when: str) -> None:
    sender = engine_of(make, budget=8)
    log = run(sender, MOVED, steps=1 if when == "in its prompt" else 99)
    export = sender.transfers.export("moved")
    if when == "sealed":
        sender.transfers.finalize("moved")
    assert sender.cancel("moved")
    sender.check_integrity()
    log.record(sender.step())
    assert log["moved"].reason is FinishReason.CANCELLED
    assert export.ended is (when != "sealed")
    with pytest.raises(UnknownSequence):
        sender.transfers.finalize("moved")
    with pytest.raises(InvalidRequest, match="alive"):
        sender.add(MOVED)
    sender.transfers.release("moved")
    sender.transfers.release("moved")
    nothing_is_held(sender)


def test_a_sequence_in_its_prompt_can_not_be_finalized(make: MakeDevice) -> None:
    sender = engine_of(make, budget=8)
    log = run(sender, MOVED, steps=1)
    sender.park("moved")
    sender.transfers.export("moved")
    with pytest.raises(InvalidRequest) as refused:
        sender.transfers.finalize("moved")
    assert (refused.value.field, refused.value.value) == ("computed", 8)
    sender.transfers.release("moved")
    sender.resume("moved")
    run(sender, log=log)
    sender.resume("moved")
    same_output_as_alone(run(sender, log=log)["moved"], expected(make))


def test_misuse_of_transfers_raises_typed_errors(make: MakeDevice) -> None:
    engine = engine_of(make)
    uses: list[Callable[[str], object]] = [
        engine.park,
        engine.resume,
        engine.transfers.export,
        engine.transfers.finalize,
    ]
    for use in uses:
        with pytest.raises(UnknownSequence):
            use("nobody")
    engine.transfers.release("nobody")
    engine.add(MOVED)
    with pytest.raises(UnknownSequence):
        engine.park("moved")  # it waits
    for cached_blocks in (-1, 6):
        with pytest.raises(InvalidRequest) as refused:
            engine.transfers.export("moved", cached_blocks)
        assert (refused.value.field, refused.value.value) == ("cached_blocks", cached_blocks)
    engine.transfers.export("moved", 5)
    with pytest.raises(InvalidRequest, match="exported already"):
        engine.transfers.export("moved")
    with pytest.raises(InvalidRequest, match="alive"):
        engine.transfers.reserve(MOVED)
    with pytest.raises(InvalidRequest) as refused:
        engine.transfers.reserve(make_request("full", 96))
    assert refused.value.field == "token_ids"
    engine.cancel("moved")
    engine.transfers.release("moved")
    run(engine)
    nothing_is_held(engine)


def test_a_commit_covers_its_blocks_its_output_and_its_length() -> None:
    commit = TransferCommit(3, (5,), transfer_checksum(default_checksum, 3, (5,), (7, 8)))
    others = [(4, (5,), (7, 8)), (3, (6,), (7, 8)), (3, (5,), (8, 7)), (3, (5, 7), (8,)), (3, (), (5, 7, 8))]
    assert commit.checksum not in {transfer_checksum(default_checksum, *words) for words in others}
