from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from decant.engine.errors import TransferRejected
from decant.engine.transfer import BlockAddress, CommittedOutput, block_checksum, default_checksum, transfer_checksum
from tests.engine.conformance_handoff.harness import MOVED, engine_of, expected, flip_a_bit, parked_sender
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    Payload,
    export_sequence,
    import_sequence,
    make_request,
    prompt,
    run,
)
from tests.engine.properties import nothing_is_held, same_output_as_alone

BEYOND = BlockAddress(0, 6)


def _change(payload: Payload, tokens: tuple[int, ...] | None = None, **commit: object) -> Payload:
    if tokens is not None:
        commit["outputs"] = (payload.commit.outputs[0]._replace(tokens=tokens),)
    return replace(payload, commit=replace(payload.commit, **commit))  # type: ignore[arg-type]


def _tokens(payload: Payload) -> tuple[int, ...]:
    return payload.commit.outputs[0].tokens


BROKEN: dict[str, tuple[str, Callable[[Payload], Payload]]] = {
    "a byte is flipped": (
        "bytes of block 0",
        lambda c: replace(c, blocks=[(c.blocks[0][0], flip_a_bit(c.blocks[0][1]), c.blocks[0][2]), *c.blocks[1:]]),
    ),
    "a checksum is that of another block": (
        "bytes of block 0",
        lambda c: replace(c, blocks=[(*c.blocks[0][:2], c.blocks[1][2]), *c.blocks[1:]]),
    ),
    "two blocks are swapped": (
        "bytes of block 1",
        lambda c: replace(
            c, blocks=[(c.blocks[1][0], *c.blocks[0][1:]), (c.blocks[0][0], *c.blocks[1][1:]), *c.blocks[2:]]
        ),
    ),
    "a block is cut short": (
        "block 0 of group 0 has",
        lambda c: replace(c, blocks=[(c.blocks[0][0], c.blocks[0][1][:-1], c.blocks[0][2]), *c.blocks[1:]]),
    ),
    "a block is too long": (
        "block 0 of group 0 has",
        lambda c: replace(c, blocks=[(c.blocks[0][0], c.blocks[0][1] + b"\0", c.blocks[0][2]), *c.blocks[1:]]),
    ),
    "a block is empty": (
        "block 0 of group 0 has 0",
        lambda c: replace(c, blocks=[(c.blocks[0][0], b"", c.blocks[0][2]), *c.blocks[1:]]),
    ),
    "the first block is missing": (
        "6 in the commit, got 5; missing: block 0 of group 0",
        lambda c: replace(c, blocks=c.blocks[1:]),
    ),
    "the last block is missing": (
        "6 in the commit, got 5; missing: block 5 of group 0",
        lambda c: replace(c, blocks=c.blocks[:-1]),
    ),
    "all blocks are missing": (
        "6 in the commit, got 0; missing: block 0 .*, block 5 of group 0",
        lambda c: replace(c, blocks=[]),
    ),
    "a block is beyond the commit": (
        "6 in the commit, got 7; missing: none",
        lambda c: replace(
            c, blocks=[*c.blocks, (BEYOND, c.blocks[0][1], block_checksum(default_checksum, BEYOND, c.blocks[0][1]))]
        ),
    ),
    "the commit's checksum is flipped": (
        "does not match its checksum",
        lambda c: _change(c, checksum=c.commit.checksum ^ 1),
    ),
    "the commit says fewer tokens": ("not of this sequence", lambda c: _change(c, computed=c.commit.computed - 1)),
    "the commit says more tokens": ("not of this sequence", lambda c: _change(c, computed=c.commit.computed + 1)),
    "the commit's output is changed": (
        "does not match its checksum",
        lambda c: _change(c, tokens=(_tokens(c)[0] ^ 1, *_tokens(c)[1:])),
    ),
    "the commit's output is cut": ("not of this sequence", lambda c: _change(c, tokens=_tokens(c)[:-1])),
    "the commit has no output": ("not of this sequence", lambda c: _change(c, tokens=())),
    "the commit is of a shorter output": (
        "does not match its checksum",
        lambda c: _change(c, tokens=_tokens(c)[:-1], computed=c.commit.computed - 1),
    ),
}
"""Change of a payload, and the message of the check that detects it."""


@pytest.mark.rule(
    "all-checksums-agree",
    "engine/transfer.py:IncomingSequence.write",
    "engine/transfer.py:IncomingSequence.accept",
    "handoff/packing.py:Unpacker.unpack",
)
@pytest.mark.parametrize("fault", BROKEN)
def test_an_inconsistent_transfer_is_rejected(make: MakeDevice, fault: str) -> None:
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


def test_a_byte_that_flips_before_the_export_is_detected(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    table = sender.sequences["moved"].block_table
    assert table is not None
    sender.device.write(table.blocks[0][1], flip_a_bit(bytes(sender.device.read(table.blocks[0][1]))))
    with pytest.raises(TransferRejected, match="block 1"):
        import_sequence(engine_of(make), MOVED, export_sequence(sender, "moved"))
    nothing_is_held(sender)


def test_an_output_that_does_not_start_with_the_known_tokens_is_refused(make: MakeDevice) -> None:
    sender, _ = parked_sender(make)
    payload, receiver = export_sequence(sender, "moved"), engine_of(make)
    known = (*MOVED.token_ids, _tokens(payload)[0] ^ 1)
    request = replace(MOVED, token_ids=known, prompt_tokens=MOVED.prompt_len)
    with pytest.raises(TransferRejected, match="not of this sequence"):
        import_sequence(receiver, request, payload)
    nothing_is_held(receiver)


def test_the_checksum_of_a_commit_covers_blocks_output_and_length() -> None:
    def checksum_of(computed: int, checksums: tuple[int, ...], *outputs: tuple[int, tuple[int, ...]]) -> int:
        return transfer_checksum(default_checksum, computed, [CommittedOutput(*each) for each in outputs], checksums)

    checksum = checksum_of(3, (7, 8), (0, (5,)))
    others = [
        checksum_of(4, (7, 8), (0, (5,))),
        checksum_of(3, (7, 8), (0, (6,))),
        checksum_of(3, (7, 8), (1, (5,))),
        checksum_of(3, (8, 7), (0, (5,))),
        checksum_of(3, (8,), (0, (5, 7))),
        checksum_of(3, (5, 7, 8), (0, ())),
        checksum_of(3, (7, 8), (0, (5,)), (1, (5,))),
        checksum_of(3, (7, 8), (1, (5,)), (0, (5,))),
    ]
    assert len({checksum, *others}) == 1 + len(others)
