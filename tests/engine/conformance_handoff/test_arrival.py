from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from decant.engine.errors import OutOfBlocks, TransferRejected
from decant.engine.plan import Device
from decant.engine.transfer import BlockAddress, IncomingSequence, block_checksum, default_checksum
from tests.engine.conformance_handoff.harness import MOVED, engine_of, expected, flip_a_bit, parked_sender
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    export_sequence,
    make_request,
    prompt,
    run,
)
from tests.engine.properties import nothing_is_held, same_output_as_alone


def test_only_missing_blocks_of_the_table_are_written(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    run(receiver, make_request("before", MOVED.token_ids[:9], 1))
    arrival = receiver.transfers.reserve(MOVED)
    assert (arrival.cached_blocks, arrival.num_blocks) == (2, 6)
    data = payload.blocks[3][1]
    for index in (0, 1, 6):
        address = BlockAddress(0, index)
        with pytest.raises(TransferRejected, match=f"no block is allocated for block {index}"):
            arrival.write(address, data, block_checksum(default_checksum, address, data))
    arrival.abort()
    nothing_is_held(receiver)
    same_output_as_alone(run(receiver, replace(MOVED, park_after=None))["moved"], expected(make))


def test_a_repeated_block_must_have_the_same_bytes(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    arrival = receiver.transfers.reserve(MOVED)
    for _ in range(2):
        arrival.write(*payload.blocks[0])
    other = flip_a_bit(payload.blocks[0][1])
    with pytest.raises(TransferRejected, match="again"):
        arrival.write(payload.blocks[0][0], other, block_checksum(default_checksum, payload.blocks[0][0], other))
    arrival.abort()
    nothing_is_held(receiver)


def test_blocks_may_be_written_by_another_thread_during_steps(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    arrival = receiver.transfers.reserve(MOVED)
    ends: list[str] = []

    def write() -> None:
        try:
            while True:
                for block in payload.blocks:
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


def test_a_block_is_not_freed_during_a_copy(make: MakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
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
    copying = threading.Thread(target=arrival.write, args=payload.blocks[0])
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


@pytest.mark.rule("aborted-blocks-stay-cached", "engine/transfer.py:IncomingSequence.abort")
def test_blocks_received_before_an_abort_stay_cached(make: MakeDevice) -> None:
    sender, log = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    arrival = receiver.transfers.reserve(MOVED)
    for block in payload.blocks[:3]:
        arrival.write(*block)
    arrival.abort()
    assert receiver.transfers.reserve(MOVED).cached_blocks == 3
    receiver.cancel("moved")
    tokens, written = (*MOVED.token_ids, *payload.commit.outputs[0].tokens), log["moved"].text
    run(receiver, replace(MOVED, token_ids=tokens, prompt_tokens=MOVED.prompt_len, park_after=None), log=log)
    assert written == log["moved"].text[: len(written)]
    same_output_as_alone(log["moved"], expected(make))


@pytest.mark.rule(
    "all-blocks-or-none", "engine/exports.py:KvTransfers.reserve", "worker/decode/admission.py:DecodeAdmission.enter"
)
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
    assert arrival.num_blocks == 6
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
def test_an_aborted_arrival_frees_its_blocks_and_accepts_no_more(make: MakeDevice, by: str) -> None:
    sender, _ = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    arrival = receiver.transfers.reserve(MOVED)
    arrival.write(*payload.blocks[0])
    if by == "abort":
        arrival.abort()
    else:
        assert receiver.cancel("moved")
    arrival.abort()
    nothing_is_held(receiver)
    assert not receiver.has_work, "an arrival has no end event"
    uses: list[Callable[[], object]] = [
        lambda: arrival.write(*payload.blocks[1]),
        lambda: arrival.extend(40),
        lambda: receiver.transfers.join(arrival, payload.commit),
    ]
    for use in uses:
        with pytest.raises(TransferRejected, match="closed"):
            use()
    nothing_is_held(receiver)


def test_an_arrival_cannot_change_a_sequence_that_has_joined(make: MakeDevice) -> None:
    sender, log = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    arrival: IncomingSequence = receiver.transfers.reserve(replace(MOVED, park_after=None))
    for block in payload.blocks:
        arrival.write(*block)
    receiver.transfers.join(arrival, payload.commit)
    arrival.abort()
    uses: list[Callable[[], object]] = [
        lambda: arrival.write(*payload.blocks[0]),
        lambda: arrival.extend(40),
        lambda: receiver.transfers.join(arrival, payload.commit),
    ]
    for use in uses:
        with pytest.raises(TransferRejected, match="closed"):
            use()
    run(receiver, log=log)
    same_output_as_alone(log["moved"], expected(make))
