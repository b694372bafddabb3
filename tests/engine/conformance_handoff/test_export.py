from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from decant.engine.errors import InvalidRequest, TransferRejected, UnknownSequence
from decant.engine.request import FinishReason
from decant.engine.transfer import BlockAddress, block_checksum, default_checksum
from tests.engine.conformance_handoff.harness import MOVED, engine_of, expected, parked_sender
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    make_request,
    prompt,
    run,
)
from tests.engine.properties import nothing_is_held, same_output_as_alone


def test_a_lease_keeps_the_bytes_of_a_sequence_that_has_ended(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    export = sender.transfers.export("moved")
    sums = [block.checksum for block in export.blocks]
    sender.cancel("moved")
    run(sender, make_request("after", prompt(80, 9), 2))
    assert export.ended
    assert [
        block_checksum(default_checksum, block.address, export.read(block.address)) for block in export.blocks
    ] == sums
    sender.transfers.release("moved")
    with pytest.raises(TransferRejected):
        export.read(BlockAddress(0, 0))
    nothing_is_held(sender)


def test_leased_bytes_are_where_they_are_located_until_the_release(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    export, memory = sender.transfers.export("moved"), sender.device.block_memory
    for one in export.blocks:
        place = export.locate(one.address)
        assert 0 <= place.start < place.stop <= memory.nbytes
        assert ctypes.string_at(memory.address + place.start, len(place)) == bytes(export.read(one.address))
    sender.transfers.release("moved")
    with pytest.raises(TransferRejected):
        export.locate(export.blocks[0].address)


def test_blocks_of_a_sequence_and_its_export_are_counted_once(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    held = sender.load().held_blocks
    assert sender.blocks_of(["moved", "unknown"]) == held > 0
    sender.transfers.export("moved", 1)
    assert sender.blocks_of(["moved"]) == held
    sender.cancel("moved")
    assert 0 < sender.blocks_of(["moved"]) == sender.load().held_blocks < held  # the first one is not leased
    sender.transfers.release("moved")
    assert sender.blocks_of(["moved"]) == 0


@pytest.mark.parametrize("when", ["prefill", "parked", "finalized"])
def test_a_cancel_during_an_export_frees_all_but_the_lease(make: MakeDevice, when: str) -> None:
    sender = engine_of(make, budget=8)
    log = run(sender, MOVED, steps=1 if when == "prefill" else 99)
    export = sender.transfers.export("moved")
    if when == "finalized":
        sender.transfers.finalize("moved")
    assert sender.cancel("moved")
    sender.check_integrity()
    log.record(sender.step())
    assert log["moved"].reason is FinishReason.CANCELLED
    assert export.ended is (when != "finalized")
    with pytest.raises(UnknownSequence):
        sender.transfers.finalize("moved")
    with pytest.raises(InvalidRequest, match="not in use by a live sequence"):
        sender.add(MOVED)
    sender.transfers.release("moved")
    sender.transfers.release("moved")
    nothing_is_held(sender)


def test_a_sequence_in_prefill_cannot_be_finalized(make: MakeDevice) -> None:
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
            use("unknown")
    engine.transfers.release("unknown")
    engine.add(MOVED)
    with pytest.raises(UnknownSequence):
        engine.park("moved")  # it waits
    for cached_blocks in (-1, 6):
        with pytest.raises(InvalidRequest) as refused:
            engine.transfers.export("moved", cached_blocks)
        assert (refused.value.field, refused.value.value) == ("cached_blocks", cached_blocks)
    engine.transfers.export("moved", 5)
    with pytest.raises(InvalidRequest, match="a sequence without an open export"):
        engine.transfers.export("moved")
    with pytest.raises(InvalidRequest, match="not in use by a live sequence"):
        engine.transfers.reserve(MOVED)
    with pytest.raises(InvalidRequest) as refused:
        engine.transfers.reserve(make_request("full", 96))
    assert refused.value.field == "token_ids"
    engine.cancel("moved")
    engine.transfers.release("moved")
    run(engine)
    nothing_is_held(engine)
