"""Calls of real processes break at every message. `test_every_cut.py` tests more cuts in one process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client_checks import Answer, ask, generate_request, open_stub
from tests.e2e.deployment import PATIENCE_S, SMALL_KV, Deployment, deployment
from tests.e2e.proxy import FETCH, PREFILL, RELEASE, SESSION, TO_CALLER, TO_WORKER, Cut, Direction, Proxy, proxy
from tests.e2e.test_resume import join_streams, rest

pytestmark = pytest.mark.slow

TOKENS = 8
MOST = 100
LINES = [(SESSION, TO_WORKER), (SESSION, TO_CALLER), *((PREFILL, way) for way in (TO_WORKER, TO_CALLER))]
LINES += [(FETCH, TO_WORKER), (FETCH, TO_CALLER), (RELEASE, TO_WORKER), (RELEASE, TO_CALLER)]


@dataclass
class Harness:
    running: Deployment
    proxies: tuple[Proxy, Proxy]
    one: InferenceServiceStub
    other: InferenceServiceStub

    def between(self, method: str) -> Proxy:
        """Return the decode worker's proxy for sessions, else the prefill worker's."""
        return self.proxies[method == SESSION]


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Deployment, tuple[Proxy, Proxy]]]:
    with ExitStack() as stack:
        proxies = stack.enter_context(proxy()), stack.enter_context(proxy())
        small = (*SMALL_KV, "--token-budget", "32", "--max-running", "16")
        yield stack.enter_context(deployment(routers=2, worker=small, between=proxies)), proxies


@pytest.fixture
async def harness(processes: tuple[Deployment, tuple[Proxy, Proxy]]) -> AsyncIterator[Harness]:
    running, proxies = processes
    first, one = open_stub(running.addresses[0])
    second, other = open_stub(running.addresses[1])
    async with first, second:
        yield Harness(running, proxies, one, other)
    for between in proxies:
        between.cuts = ()
    await asyncio.to_thread(running.settled)


def request(number: int) -> pb.GenerateRequest:
    made = generate_request([0, *(5 + (number * 97 + n * 31) % 4000 for n in range(70))], max_tokens=TOKENS)
    made.request_id = str(uuid.uuid4())
    made.stopping.ignore_eos = True
    return made


async def undisturbed(harness: Harness, number: int) -> Answer:
    """Ask under another salt, so that nothing is cached for the disturbed request."""
    plain = request(number)
    plain.cache.cache_salt = "undisturbed"
    return await ask(harness.one, plain)


@pytest.mark.rule(
    "any-break-ends-once",
    "router/workers/session.py:WorkerSession._run_connection",
    "worker/decode/service.py:DecodeService._close_session",
)
@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line[0].rpartition('/')[2]} {line[1]}")
async def test_a_call_that_breaks_at_any_message(harness: Harness, line: tuple[str, Direction]) -> None:
    base = 100 * (1 + LINES.index(line))
    between = harness.between(line[0])
    for number in range(MOST):
        expected = await undisturbed(harness, base + number)
        cut = Cut(*line, number, arrives=number % 2 == 1)
        between.cuts = (cut,)
        answer = await ask(harness.one, request(base + number))
        between.cuts = ()
        assert (answer.text, answer.ids) == (expected.text, expected.ids), (line, number)
        if not cut.happened:
            break


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "on the other router"])
async def test_a_stream_that_is_left_at_any_message_goes_on(harness: Harness, elsewhere: bool) -> None:
    whole = await undisturbed(harness, 1)
    stub = harness.other if elsewhere else harness.one
    for messages in range(MOST):
        asking = request(1)
        call = harness.one.GenerateStream(asking, timeout=PATIENCE_S)
        begun = [message for message in [await call.read() for _ in range(messages)] if message is not grpc.aio.EOF]
        if messages:  # nothing before the first says that it arrived
            call.cancel()
        seq = begun[-1].seq if begun else 0
        if messages:
            resume = pb.ResumeStreamRequest(request_id=asking.request_id, after_seq=seq)
            ended = await rest(stub.ResumeStream(resume, timeout=PATIENCE_S))
        else:
            ended = await rest(call)
        assert join_streams(begun, ended) == (whole.text, whole.ids)
        assert ended[-1].usage.completion_tokens == TOKENS
        if len(begun) < messages:
            break


@pytest.mark.parametrize("way", ["attach", "cancel"])
async def test_the_other_router_is_asked_at_any_message(harness: Harness, way: str) -> None:
    whole = await undisturbed(harness, 2)
    for messages in range(1, MOST):
        asking = request(2)
        call = harness.one.GenerateStream(asking, timeout=PATIENCE_S)
        begun = [await call.read() for _ in range(messages)]
        if way == "attach":
            again = await ask(harness.other, asking)
            assert (again.text, again.ids) == (whole.text, whole.ids)
        else:
            cancelled = await harness.other.CancelGeneration(pb.CancelGenerationRequest(request_id=asking.request_id))
            assert cancelled.status != pb.CancelGenerationResponse.STATUS_UNKNOWN_REQUEST
        await _over(call)
        if begun[-1] is grpc.aio.EOF:
            break


async def _over(call: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        code = await call.code() if call.done() else None
        while code is None:
            try:
                if await call.read() is grpc.aio.EOF:
                    code = await call.code()
            except grpc.aio.AioRpcError as error:
                code = error.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)
