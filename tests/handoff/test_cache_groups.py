from __future__ import annotations

import pytest

from decant.engine.kv_layout import FULL, Window, WindowKind
from decant.handoff.packing import MESSAGE_BYTES
from decant.protos import worker_pb2 as wire
from tests.handoff.factories import BLOCK, Worker, ask, run_alone
from tests.handoff.harness import hand_over

GROUPS = (FULL, Window(WindowKind.SLIDING, 9), Window(WindowKind.CHUNKED, 6))


@pytest.mark.parametrize("message_bytes", [MESSAGE_BYTES, 20])
@pytest.mark.parametrize("length", [1, 5, 30, 64])
async def test_the_blocks_that_later_tokens_see_are_sent_of_each_group(length: int, message_bytes: int) -> None:
    request, sent = ask(length=length), set[tuple[int, int]]()

    def note(message: wire.FetchResponse) -> list[wire.FetchResponse]:
        chunk = message.kv_chunk
        if message.HasField("kv_chunk"):
            first = chunk.first_position // BLOCK
            sent.update((chunk.group, first + at) for at in range(max(1, len(chunk.block_checksums))))
        return [message]

    workers = [Worker(name, blocks=192, windows=GROUPS, message_bytes=message_bytes) for name in "pd"]
    async with workers[0] as sender, workers[1] as receiver:
        await hand_over(sender, receiver, request, note)
        assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(request, GROUPS)
        await sender.emptied()
        await receiver.emptied()
    stop = -(-length // BLOCK)
    for group, window in enumerate(GROUPS):
        first = window.first_block(length, BLOCK)
        indexes = {index for of, index in sent if of == group}
        assert set(range(first, stop)) <= indexes <= set(range(max(0, first - 1), stop))


async def test_blocks_that_the_receiver_has_cached_are_not_sent_of_any_group() -> None:
    request, received = ask(length=32), list[int]()

    def note(message: wire.FetchResponse) -> list[wire.FetchResponse]:
        received.append(len(message.kv_chunk.data))
        return [message]

    workers = [Worker(name, blocks=192, windows=GROUPS) for name in "pd"]
    async with workers[0] as sender, workers[1] as receiver:
        await receiver.loop.call(lambda engine: engine.add(ask("before", length=32, wanted=1)))
        await receiver.finished("before")
        await hand_over(sender, receiver, request, note)
        assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(request, GROUPS)
    assert sum(received) == len(GROUPS) * sender.engine.device.block_bytes  # seven of eight blocks were there
