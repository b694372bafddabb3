from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
import uuid
from typing import Any

import pytest

import decant
from decant import AsyncClient, Client
from decant.client.routers import CancelSignal
from decant.protos import inference_pb2 as pb
from tests.decant.scripted import PATIENCE_S, Script, endless_answer, never


def break_out(client: Client) -> None:
    for _ in client.stream("x", request_id="r"):
        break


def raise_inside(client: Client) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in client.stream("x", request_id="r"):
            raise ZeroDivisionError


def end_with_block(client: Client) -> None:
    with client.stream("x", request_id="r") as stream:
        assert next(iter(stream)).text == "a"


def close(client: Client) -> None:
    stream = client.stream("x", request_id="r")
    next(reading := iter(stream))
    stream.close()
    stream.close()
    with pytest.raises(decant.Cancelled):
        list(reading)


@pytest.mark.parametrize(
    "leave",
    [break_out, raise_inside, end_with_block, close],
    ids=lambda f: f.__name__,
)
def test_an_abandoned_stream_cancels_its_request_and_ends_its_call(client: Client, script: Script, leave: Any) -> None:
    script.answering = endless_answer
    leave(client)
    assert script.was_cancelled.wait(PATIENCE_S)
    assert script.call_ended.wait(PATIENCE_S)
    assert script.cancelled == ["r"]


def test_each_request_has_a_generated_id_by_which_it_is_cancelled(client: Client, script: Script) -> None:
    script.answering = endless_answer
    with client.stream("x") as stream:
        next(iter(stream))
    assert script.was_cancelled.wait(PATIENCE_S)
    assert script.cancelled == [stream.request_id]
    script.answering = None
    client.generate("x")
    ids = {request.request_id for request in script.requests}
    assert len(ids) == 2
    assert all(uuid.UUID(id) for id in ids)


def test_an_abandoned_detached_stream_is_not_cancelled(client: Client, script: Script) -> None:
    script.answering = endless_answer
    with client.stream("x", on_disconnect="detach") as stream:
        next(iter(stream))
    assert script.call_ended.wait(PATIENCE_S)
    assert script.cancelled == []
    assert script.requests[0].stream.on_disconnect == pb.StreamOptions.ON_DISCONNECT_DETACH


def test_a_stream_abandoned_before_its_first_message_ends_its_call(client: Client, script: Script) -> None:
    script.answering = never
    with client.stream("x"):
        pass
    client.server_info()
    if script.requests:  # otherwise the stream closed before it arrived
        assert script.call_ended.wait(PATIENCE_S)


def drop(client: Any) -> None:
    client.stream("x", request_id="r")


def fail_before_the_first_read(client: Any) -> None:
    def begin() -> None:
        stream = client.stream("x", request_id="r")
        raise ZeroDivisionError(stream.request_id)

    with contextlib.suppress(ZeroDivisionError):
        begin()


def drop_an_iterator(client: Any) -> None:
    stream = client.stream("x", request_id="r")
    iter(stream) if isinstance(client, Client) else aiter(stream)


DROPS = [drop, fail_before_the_first_read, drop_an_iterator]


@pytest.mark.parametrize("leave", DROPS, ids=lambda f: f.__name__)
def test_a_stream_that_is_dropped_before_its_first_read_runs_nothing(
    client: Client, script: Script, leave: Any
) -> None:
    script.answering = endless_answer
    leave(client)
    client.server_info()  # comes after a call that began before
    assert script.requests == []


@pytest.mark.parametrize("leave", DROPS, ids=lambda f: f.__name__)
async def test_an_async_stream_dropped_before_its_first_read_runs_nothing(
    address: str, script: Script, leave: Any
) -> None:
    script.answering = endless_answer
    async with AsyncClient(address) as client:
        leave(client)

        async def cancelled_between() -> None:
            stream = client.stream("x", request_id="r")
            await asyncio.Event().wait()
            await anext(aiter(stream))

        task = asyncio.create_task(cancelled_between())
        await client.server_info()
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0.05)  # for calls that began
        await client.server_info()
    assert script.requests == []


def test_a_with_block_begins_the_call_that_its_end_cancels(client: Client, script: Script) -> None:
    script.answering = endless_answer
    with client.stream("x", request_id="r"):
        client.server_info()
        assert [request.request_id for request in script.requests] == ["r"]
    assert script.was_cancelled.wait(PATIENCE_S)
    assert script.call_ended.wait(PATIENCE_S)


async def test_an_async_with_block_begins_the_call_that_its_end_cancels(address: str, script: Script) -> None:
    script.answering = endless_answer
    async with AsyncClient(address) as client:
        async with client.stream("x", request_id="r"), asyncio.timeout(PATIENCE_S):
            while not script.requests:  # noqa: ASYNC110 - another loop appends
                await asyncio.sleep(0.01)
        assert await asyncio.to_thread(script.was_cancelled.wait, PATIENCE_S)
        assert await asyncio.to_thread(script.call_ended.wait, PATIENCE_S)


@pytest.mark.parametrize("how", ["close", "disconnect", "client"])
async def test_a_stream_that_was_closed_before_its_first_read_is_cancelled(
    address: str, script: Script, how: str
) -> None:
    client = Client(address)
    stream = client.stream("x")
    {"close": stream.close, "disconnect": stream.disconnect, "client": client.close}[how]()
    with pytest.raises(decant.Cancelled):
        list(stream)
    async with AsyncClient(address) as other:
        unread = other.stream("x")
        closed = {"close": unread.close, "disconnect": unread.disconnect, "client": other.close}[how]()
        if closed is not None:
            await closed
        with pytest.raises(decant.Cancelled):
            [delta async for delta in unread]
    client.close()
    assert script.requests == []


def test_a_stream_s_timeout_counts_from_its_first_read(client: Client, script: Script) -> None:
    now = [100.0]
    client._routers.selector.clock = lambda: now[0]
    stream = client.stream("x", timeout=PATIENCE_S)
    now[0] += 2 * PATIENCE_S
    assert [delta.text for delta in stream] == ["a", "b", "c"]
    assert script.time_left is not None


def test_a_signal_just_before_a_wait_for_the_next_try_ends_it() -> None:
    """The timer's thread receives the signal: like one just before the wait, it does not wake the main thread."""
    closing = CancelSignal()
    before = signal.signal(signal.SIGUSR1, lambda *_: closing.set())
    sending = threading.Timer(0.05, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
    began = time.monotonic()
    try:
        sending.start()
        closing.wait(PATIENCE_S)
    finally:
        sending.join(PATIENCE_S)
        signal.signal(signal.SIGUSR1, before)
    assert closing.is_set
    assert time.monotonic() - began < PATIENCE_S / 2


async def break_out_async(client: AsyncClient, script: Script) -> None:
    async for _ in client.stream("x", request_id="r"):
        break


async def end_with_block_async(client: AsyncClient, script: Script) -> None:
    async with client.stream("x", request_id="r") as stream:
        async for _ in stream:
            break


async def cancel_the_reader(client: AsyncClient, script: Script) -> None:
    arrived = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream("x", request_id="r"):
            arrived.set()

    reading = asyncio.create_task(read())
    await arrived.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def time_out_around_generate(client: AsyncClient, script: Script) -> None:
    limit = asyncio.timeout(PATIENCE_S)

    async def expire_once_asked() -> None:
        while not script.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        limit.reschedule(asyncio.get_running_loop().time())

    expiring = asyncio.create_task(expire_once_asked())
    with pytest.raises(TimeoutError):
        async with limit:
            await client.generate("x", request_id="r")
    await expiring


@pytest.mark.parametrize(
    "leave",
    [
        break_out_async,
        end_with_block_async,
        cancel_the_reader,
        time_out_around_generate,
    ],
    ids=lambda f: f.__name__,
)
async def test_an_abandoned_async_call_cancels_its_request_and_ends(address: str, script: Script, leave: Any) -> None:
    script.answering = endless_answer
    async with AsyncClient(address) as client:
        await leave(client, script)
        assert await asyncio.to_thread(script.was_cancelled.wait, PATIENCE_S)
        assert await asyncio.to_thread(script.call_ended.wait, PATIENCE_S)
    assert script.cancelled == ["r"]
