from __future__ import annotations

from collections.abc import Callable

import pytest

from decant.engine import transfer
from decant.engine.exports import KvTransfers
from decant.engine.sequence import Sequence as EngineSequence
from decant.engine.transfer import (
    BlockAddress,
    ExportedBlock,
    IncomingSequence,
    KvExport,
    TransferCommit,
    block_checksum,
)
from tests.engine.factories import (
    OutputLog,
    Payload,
    export_sequence,
    forged,
    import_sequence,
    make_engine,
    make_request,
    run,
    run_alone,
)
from tests.engine.mutations.harness import Patch, check_found
from tests.engine.properties import same_output_as_alone

pytestmark = pytest.mark.slow


def swap_two_blocks(patch: Patch) -> None:
    """Swap two blocks; all checksums match."""

    def accept(arrival: IncomingSequence, commit: TransferCommit) -> list[EngineSequence]:
        received, store = sorted(arrival._checksums), arrival._store
        if len(received) > 1 and arrival.sequence.block_table:
            one, other = (arrival.sequence.block_table.blocks[group][index] for group, index in received[:2])
            data = bytes(store.read(one))
            store.write(one, bytes(store.read(other)))
            store.write(other, data)
        return original(arrival, commit)

    original = IncomingSequence.accept
    patch.setattr(IncomingSequence, "accept", accept)


def accept_a_missing_block(patch: Patch) -> None:
    def write(arrival: IncomingSequence, address: BlockAddress, data: bytes, total: int) -> None:
        if address.block == arrival.cached_blocks + 1:
            arrival._checksums[address] = total
        else:
            original(arrival, address, data, total)

    original: Callable[..., None] = IncomingSequence.write
    patch.setattr(IncomingSequence, "write", write)


def flip_a_byte_and_forge_the_sum(patch: Patch) -> None:
    def write(arrival: IncomingSequence, index: int, data: bytes, total: int) -> None:
        changed = bytes([data[0] ^ 1]) + data[1:]
        patch.setattr(transfer, "block_checksum", lambda *_: total)
        original(arrival, index, changed, total)
        patch.setattr(transfer, "block_checksum", block_checksum)

    original: Callable[..., None] = IncomingSequence.write
    patch.setattr(IncomingSequence, "write", write)


def end_a_lease_early(patch: Patch) -> None:
    """Free blocks with their sequence, so that the export reads later contents."""

    def offer(
        export: KvExport, sequence: EngineSequence, address: BlockAddress, checksum: transfer.Checksum
    ) -> ExportedBlock:
        run = original(export, sequence, address, checksum)
        table = export._lease
        if len(table.blocks[0]) > 1:
            table.pool._ref_counts[table.blocks[0][-1]] -= 1
        return run

    original = KvExport.offer
    patch.setattr(KvExport, "offer", offer)


def keep_a_sequence_that_was_sent(patch: Patch) -> None:
    def release(transfers: KvTransfers, id: str) -> None:
        export = transfers.exports.get(id)
        if export is not None:
            export.commit = None
        original(transfers, id)

    original = KvTransfers.release
    patch.setattr(KvTransfers, "release", release)


REQUEST = make_request("moved", 14, 20, park_after=3)
CHANGES: dict[str, Callable[[bytes, bytes], tuple[bytes, bytes]]] = {
    "nothing": lambda one, other: (one, other),
    "two blocks swapped": lambda one, other: (other, one),
    "a byte flipped": lambda one, other: (one, other[:5] + bytes([other[5] ^ 1]) + other[6:]),
    "a block lost": lambda one, other: (one, bytes(len(other))),
    "a block twice": lambda one, other: (one, one),
}


def continued(log: OutputLog, payload: Payload) -> OutputLog:
    receiver = make_engine()
    import_sequence(receiver, REQUEST, payload)
    return run(receiver, log=log)


@pytest.mark.parametrize("change", CHANGES)
def test_a_fault_with_matching_checksums_changes_the_output(change: str) -> None:
    sender = make_engine()
    log = run(sender, REQUEST)
    payload = export_sequence(sender, REQUEST.id)
    one, other = CHANGES[change](payload.blocks[1][1], payload.blocks[2][1])
    log = continued(log, forged(payload, {payload.blocks[1][0]: one, payload.blocks[2][0]: other}))
    if change == "nothing":
        same_output_as_alone(log[REQUEST.id], run_alone(REQUEST))
    else:
        with pytest.raises(AssertionError, match="wrote"):
            same_output_as_alone(log[REQUEST.id], run_alone(REQUEST))


FAULTS: dict[Callable[[Patch], None], str] = {
    swap_two_blocks: "does not hold|holds other bytes",
    accept_a_missing_block: "does not hold|published before it received",
    flip_a_byte_and_forge_the_sum: "does not hold|holds other bytes",
    end_a_lease_early: "reference counts differ",
    keep_a_sequence_that_was_sent: "after its end|ended twice|token|went on|here and there",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_properties_detect(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    check_found(fault, FAULTS[fault], monkeypatch)
