from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import decant
from decant.client.retry import MORE_TRIES
from decant.runtime.backoff import Backoff
from decant.runtime.error_details import Reason, ResumePoint
from tests.decant.scripted import PATIENCE_S, Break, Script, endless_answer, serving, with_a_tail
from tests.decant.two_routers import LOST, AsyncClient, Client, SkewedClock, Two, is_whole

DRAINING = decant.Aborted(Reason.DRAINING, "draining", resume=ResumePoint(0, 3))
KINDS: list[decant.ServiceError | grpc.StatusCode] = [
    LOST,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    DRAINING,
    decant.Aborted(Reason.OWNER_CHANGED, "taken over", resume=ResumePoint(0, 3)),
    decant.Unavailable(Reason.STATE_STORE_UNAVAILABLE, "away", retry_after=0.001),
]
LONG_BACKOFF = Backoff(first_s=1000.0, longest_s=1000.0)
MESSAGES = 6
"""Of `with_a_tail`: started, three deltas, a tail, finished."""


async def read_to_end(stream: Any) -> None:
    async for _ in stream:
        pass


def read(address: str) -> Any:
    with Client(address) as client, client.stream("x", token_ids=True) as stream:
        is_whole(stream, list(stream))
    return stream


async def read_async(address: str) -> Any:
    async with AsyncClient(address) as client, client.stream("x", token_ids=True) as stream:
        is_whole(stream, [delta async for delta in stream])
    return stream


async def test_a_dns_name_is_one_address(two: Two) -> None:
    two.reset([Break(2, LOST)])
    port = two.address.split(",")[0].rpartition(":")[2]
    name = f"dns:///localhost:{port}"
    is_read = [await asyncio.to_thread(read, name), await read_async(name)]
    assert [stream.resumed_at for stream in is_read] == [[name], []]
    assert two.routers[1].requests == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "name", None) or kind.label)
@pytest.mark.parametrize("after", range(MESSAGES + 1))
async def test_a_break_after_any_message_changes_nothing(some: Two, after: int, kind: Any) -> None:
    for blocking in (True, False):
        some.reset([Break(after, kind)])
        stream = await (asyncio.to_thread(read, some.address) if blocking else read_async(some.address))
        assert some.routers[0].cancelled == []
        if after == MESSAGES:  # all messages arrived
            assert (some.num_requests, some.resumed, stream.resumed_at) == (1, [], [])
        elif after < 2:  # none arrived except `started`
            assert (some.num_requests, some.resumed) == (2, [])
        else:
            assert (some.num_requests, some.resumed) == (1, [min(after - 1, 3)])
            assert len(stream.resumed_at) == 1
            assert stream.resumed_at[0] in some.address


@pytest.mark.slow
@given(
    breaks=st.lists(st.builds(Break, st.integers(0, MESSAGES), st.sampled_from(KINDS[:4])), max_size=6),
    routers=st.integers(1, 2),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_sequence_of_breaks_changes_anything(both: Two, breaks: list[Break], routers: int) -> None:
    both.reset(breaks)
    read(",".join(both.address.split(",")[:routers]))
    assert len(both.resumed) <= len(breaks)


def test_resume_seconds_0_raises_the_break_and_keeps_the_text(two: Two) -> None:
    two.reset([Break(2, LOST)])
    with Client(two.address, resume_seconds=0) as client, client.stream("x") as stream:
        with pytest.raises(decant.Unavailable):
            list(stream)
        assert (stream.text, stream.seq) == ("a", 1)
    assert (two.num_requests, two.resumed) == (1, [])


async def test_a_stream_that_no_router_resumes_ends_after_resume_seconds(two: Two) -> None:
    two.reset([Break(2, LOST), *[Break(1, LOST)] * 10_000])
    clock = SkewedClock()
    async with clock.of(AsyncClient(two.address, resume_seconds=PATIENCE_S)) as client, asyncio.timeout(PATIENCE_S):
        stream = client.stream("x")
        reading = asyncio.create_task(read_to_end(stream))
        while len(two.resumed) < 3 and not reading.done():  # noqa: ASYNC110 - another loop appends
            await asyncio.sleep(0.01)
        assert not reading.done()
        clock.skew = PATIENCE_S
        with pytest.raises(decant.Unavailable):
            await reading
    assert stream.text == "a"
    assert len(two.resumed) < 500  # with backoff in between


NOT_RETRYABLE = [
    decant.InvalidArgument("f", "l", 1),
    decant.NotFound("model", "m"),
    decant.AlreadyExists("r"),
    decant.Unimplemented("f"),
    decant.Unauthenticated(),
    decant.DeadlineExceeded(),
    decant.Cancelled(),
    decant.Internal(),
    decant.Aborted(Reason.WORKERS_LOST, "3 attempts failed", resume=ResumePoint(0, 2)),
    decant.Aborted(Reason.SUPERSEDED, "newer"),
    decant.Aborted(Reason.TAIL_UNCERTAIN, "tail", resume=ResumePoint(0, 2)),
]


@pytest.mark.parametrize("error", NOT_RETRYABLE, ids=lambda error: f"{type(error).__name__}-{error.label}")
async def test_an_error_that_is_not_retryable_is_raised_after_one_call(two: Two, error: Any) -> None:
    for after in (0, 3):
        two.reset([Break(after, error)])
        with Client(two.address) as client, pytest.raises(type(error)) as caught:
            await asyncio.to_thread(list, client.stream("x"))
        assert caught.value.detail == error.detail
        two.routers[0].breaks.append(Break(after, error))
        async with AsyncClient(two.address) as client:
            with pytest.raises(type(error)):
                [delta async for delta in client.stream("x")]
            two.routers[0].breaks.append(Break(after, error))
            with pytest.raises(type(error)):
                await client.generate("x")
        assert (two.num_requests, two.resumed) == (3, [])


@pytest.mark.parametrize("count", [1, 2])
async def test_a_request_that_every_router_refuses_is_tried_a_few_times(two: Two, count: int) -> None:
    address = ",".join(two.address.split(",")[:count])
    for script in two.routers:
        script.refusal = decant.Unavailable(Reason.NO_WORKER, "none", retry_after=0.001)
    async with AsyncClient(address) as client:
        with pytest.raises(decant.Unavailable):
            await client.generate("x")
        assert two.num_requests == count + MORE_TRIES
        with pytest.raises(decant.Unavailable):
            [delta async for delta in client.stream("x")]
        assert two.num_requests == 2 * (count + MORE_TRIES)
    ids = [request.request_id for script in two.routers for request in script.requests]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "name", None) or kind.label)
async def test_a_lost_response_is_requested_again_under_the_same_id(some: Two, kind: Any) -> None:
    some.reset([Break(3, kind)])
    async with AsyncClient(some.address) as client:
        assert (await client.generate("x")).text == "abc!"
    some.routers[0].breaks.append(Break(3, kind))
    with Client(some.address) as blocking:
        assert (await asyncio.to_thread(blocking.generate, "x")).text == "abc!"
    assert some.num_requests == 4
    assert len({request.request_id for script in some.routers for request in script.requests}) == 2


async def test_a_request_that_is_unknown_after_its_first_tokens_is_not_run_again(two: Two) -> None:
    two.reset([Break(3, LOST)])
    async with AsyncClient(two.address) as client:
        stream = client.stream("x")
        reading = aiter(stream)
        await anext(reading)
        for script in two.routers:
            script.known = {}
        with pytest.raises(decant.NotFound):
            [delta async for delta in reading]
        assert stream.text == "ab"
    assert two.num_requests == 1


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_stream_survives_the_end_of_its_server(blocking: bool) -> None:
    known: dict[str, Any] = {}
    scripts = [Script(answering=endless_answer, known=known), Script(answering=endless_answer, known=known)]
    with contextlib.ExitStack() as rest:
        ends = [rest.enter_context(contextlib.ExitStack()) for _ in scripts]
        addresses = [end.enter_context(serving(script)) for end, script in zip(ends, scripts, strict=True)]
        client: Any = (Client if blocking else AsyncClient)(addresses)
        stream = client.stream("x")
        reading = iter(stream) if blocking else aiter(stream)

        async def next_delta() -> Any:
            return await (asyncio.to_thread(next, reading, None) if blocking else anext(reading, None))

        assert [(await next_delta()).text for _ in range(2)] == ["a", "b"]
        at = addresses.index(stream.router)
        scripts[1 - at].answering = with_a_tail
        await asyncio.to_thread(ends[at].close)
        assert [(await next_delta()).text for _ in range(2)] == ["c", "!"]
        assert await next_delta() is None
        assert stream.resumed_at == [addresses[1 - at]]
        assert (stream.text, stream.is_complete) == ("abc!", True)
        closing = client.close()
        if closing is not None:
            await closing


@pytest.mark.slow
async def test_the_deadline_holds_while_resuming(two: Two) -> None:
    for script in two.routers:
        script.answering = endless_answer
    two.routers[0].breaks.extend([Break(2, LOST)] * 3)
    began = time.monotonic()
    async with AsyncClient(two.address) as client:
        stream = client.stream("x", timeout=3.0)
        with pytest.raises(decant.DeadlineExceeded):
            [delta async for delta in stream]
        assert stream.text == "ab"
        with pytest.raises(decant.DeadlineExceeded):
            await asyncio.to_thread(list, Client(two.address).stream("x", timeout=0.5))
    assert time.monotonic() - began < PATIENCE_S
    left = [script.time_left for script in two.routers if script.time_left is not None]
    assert all(0 < one <= 3.1 for one in left)


@pytest.fixture
def breaking(two: Two) -> Two:
    two.reset([Break(2, LOST)])
    return Two(two.address.split(",")[0], two.routers[:1])


@pytest.mark.parametrize("how", ["disconnect", "close", "client"])
def test_closing_ends_the_wait_for_the_next_try(breaking: Two, how: str) -> None:
    before = set(threading.enumerate())
    client = Client(breaking.address, resume_seconds=1e6, backoff=LONG_BACKOFF)
    stream = client.stream("x")
    reading = iter(stream)
    assert next(reading).text == "a"
    closing = {"disconnect": stream.disconnect, "close": stream.close, "client": client.close}[how]
    timer = threading.Timer(0.2, closing)
    timer.start()
    with pytest.raises(decant.Cancelled):
        next(reading)
    timer.join(PATIENCE_S)
    client.close()
    assert breaking.resumed == []
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    with pytest.raises(decant.Cancelled):
        client.server_info()


@pytest.mark.parametrize("how", ["disconnect", "close", "client", "task"])
async def test_closing_ends_the_wait_for_the_next_try_async(breaking: Two, how: str) -> None:
    async with AsyncClient(breaking.address, resume_seconds=1e6, backoff=LONG_BACKOFF) as client:
        stream = client.stream("x")
        began = asyncio.Event()

        async def reading() -> None:
            async for _ in stream:
                began.set()

        task = asyncio.create_task(reading())
        await began.wait()
        await asyncio.sleep(0.2)  # the stream may close before its break or during the wait, with the same result
        if how == "task":
            task.cancel()
        else:
            closed = {"disconnect": stream.disconnect, "close": stream.close, "client": client.close}[how]()
            if closed is not None:
                await closed
        with pytest.raises(asyncio.CancelledError if how == "task" else decant.Cancelled):
            await task
    assert breaking.resumed == []
    assert len(breaking.routers[0].cancelled) == (how in ("close", "task"))
