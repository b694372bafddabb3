import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from decant.router.request.output import Finish
from decant.router.request.token_stream import TokenStream
from decant.router.request.valid_request import ValidRequest
from decant.router.timings import RouterTimings, WorkerTimings
from decant.runtime.backoff import Backoff
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, Cancelled, NotFound, Unavailable
from decant.state.store import Store
from tests.e2e.fault_injection import (
    CALL_DIRECTIONS,
    MOST,
    OUTPUTS,
    RECEIVER,
    CallDirection,
    CutPoint,
    FaultInjection,
    fault_injection,
)
from tests.e2e.proxy import SESSION, Cut
from tests.router.conftest import bare, server, store
from tests.router.harness import Core, until_ended

pytestmark = pytest.mark.slow

__all__ = ["bare", "server", "store"]


SESSIONS = [calls for calls in CALL_DIRECTIONS if calls.method == SESSION and calls.worker == RECEIVER]


@pytest.fixture
async def harness(store: Store) -> AsyncIterator[FaultInjection]:
    timings = RouterTimings(workers=WorkerTimings(session_backoff=Backoff(0.005, 1.0), forget_batch=1))
    async with fault_injection(store, timings) as made:
        yield made


@pytest.mark.parametrize("calls", CALL_DIRECTIONS, ids=str)
@pytest.mark.parametrize("arrives", [False, True])
async def test_a_stream_cut_after_any_message_is_completed(
    harness: FaultInjection, calls: CallDirection, arrives: bool
) -> None:
    for number in range(MOST):
        happened = [await harness.answered(CutPoint(calls, number, arrives)) for _ in OUTPUTS]
        if not any(cut.happened for (cut,) in happened):
            break


@pytest.mark.rule(
    "any-break-ends-once",
    "router/workers/session.py:WorkerSession._run_connection",
    "worker/decode/service.py:DecodeService._close_session",
)
@pytest.mark.parametrize("first", CALL_DIRECTIONS, ids=str)
async def test_a_stream_cut_after_any_two_messages_is_completed(harness: FaultInjection, first: CallDirection) -> None:
    harness.leave_out_long_calls()
    for number in range(MOST):
        for second in CALL_DIRECTIONS:
            for later in range(MOST):
                before, cut = await harness.answered(CutPoint(first, number), CutPoint(second, later))
                if not cut.happened:
                    break
        if not before.happened:
            break


Doing = Callable[[Core, ValidRequest], Coroutine[Any, Any, object]]


async def cancel(core: Core, request: ValidRequest) -> object:
    return await core.requests.cancel(request.key)


async def resume(core: Core, request: ValidRequest) -> object:
    return await until_ended(await core.requests.resume(request.key))


async def resume_once_known(core: Core, request: ValidRequest) -> object:
    """Retry while the store doesn't know the request: a session that reopens may reach the point first.

    A store that was made long ago says NOT_FOUND, and a new one that it is being filled.
    """
    async with asyncio.timeout(300):
        while True:
            try:
                return await resume(core, request)
            except NotFound:
                pass
            except Unavailable as error:
                if "is unknown so far" not in str(error):
                    raise
            await asyncio.sleep(0.001)


async def attach(core: Core, request: ValidRequest) -> object:
    return await until_ended(await core.requests.begin(request))


async def done_at(
    harness: FaultInjection, doing: Doing, core: Core, *points: CutPoint
) -> tuple[TokenStream, list[list[int]], object, list[Cut]]:
    request, expected = harness.request()
    tasks: list[asyncio.Task[object]] = []

    def now() -> None:
        tasks.append(asyncio.create_task(doing(core, request)))

    cuts = harness.arm(points[0]._replace(instead=now), *points[1:])
    stream = await harness.one.answer(request)
    await harness.quiet(tasks)
    found = await tasks[0] if tasks else None
    return stream, expected, found, cuts


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "on the other router"])
@pytest.mark.parametrize("calls", CALL_DIRECTIONS, ids=str)
async def test_a_cancel_at_any_message_ends_the_request(
    harness: FaultInjection, calls: CallDirection, elsewhere: bool
) -> None:
    for number in range(MOST):
        core = harness.other if elsewhere else harness.one
        stream, expected, end, (cut,) = await done_at(harness, cancel, core, CutPoint(calls, number))
        if not cut.happened:
            break
        assert isinstance(end, Cancelled | Finish)
        assert tokens_of(stream) == prefixes(expected, stream)
        if isinstance(stream.end, Finish):
            assert tokens_of(stream) == expected
        else:
            assert isinstance(stream.end, Cancelled) or superseded(stream)


@pytest.mark.rule("new-owner-drops-attempts", "worker/decode/ownership.py:RunOwnership.on_new_epoch")
@pytest.mark.parametrize("doing", [resume, attach])
@pytest.mark.parametrize("calls", CALL_DIRECTIONS, ids=str)
async def test_the_other_router_takes_over_at_any_message(
    harness: FaultInjection, calls: CallDirection, doing: Doing
) -> None:
    for number in range(MOST):
        stream, expected, taken, (cut,) = await done_at(harness, doing, harness.other, CutPoint(calls, number))
        if not cut.happened:
            break
        check_taken(stream, taken, expected)


async def test_the_other_router_is_asked_before_the_request_has_come(harness: FaultInjection) -> None:
    for step in range(20):
        request, expected = harness.request()
        harness.arm()
        asked = asyncio.create_task(resume_once_known(harness.other, request))
        await asyncio.sleep(0.0005 * step)
        stream = await harness.one.answer(request)
        taken = await asked
        await harness.quiet()
        check_taken(stream, taken, expected)


@pytest.mark.parametrize("first", CALL_DIRECTIONS, ids=str)
async def test_the_other_router_takes_over_and_then_a_session_breaks(
    harness: FaultInjection, first: CallDirection
) -> None:
    harness.leave_out_long_calls()
    for number in range(MOST):
        for second in SESSIONS:
            for later in range(MOST):
                points = CutPoint(first, number), CutPoint(second, later)
                stream, expected, taken, (before, cut) = await done_at(
                    harness, resume_once_known, harness.other, *points
                )
                if before.happened:
                    check_taken(stream, taken, expected)
                if not cut.happened:
                    break
        if not before.happened:
            break


def tokens_of(stream: TokenStream) -> list[list[int]]:
    return [output.tokens for output in stream.outputs]


def prefixes(expected: list[list[int]], stream: TokenStream) -> list[list[int]]:
    return [tokens[:count] for tokens, count in zip(expected, stream.counts, strict=True)]


def check_taken(stream: TokenStream, taken: object, expected: list[list[int]]) -> None:
    assert isinstance(taken, TokenStream)
    assert isinstance(taken.end, Finish), taken.end
    assert tokens_of(taken) == expected
    if isinstance(stream.end, Finish):
        assert tokens_of(stream) == expected
    else:
        assert superseded(stream), stream.end
        assert tokens_of(stream) == prefixes(expected, stream)


def superseded(stream: TokenStream) -> bool:
    return isinstance(stream.end, Aborted) and stream.end.reason is Reason.SUPERSEDED
