import asyncio
import contextlib
import os
import random
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.runtime.error_details import Reason
from decant.runtime.errors import from_call
from decant.runtime.grpc_options import ACCEPTED
from tests.e2e.client_checks import ask, generate_request, open_stub
from tests.e2e.deployment import PATIENCE_S, SMALL_KV, Deployment, deployment
from tests.e2e.proxy import Proxy, proxy

pytestmark = pytest.mark.slow

MOST_AT_WORK = 2
LONG = 1900
PREFILL, DECODE = 0, 1
FAR_S = 3600.0
"""Deadline for which no request is refused, whatever the suspended workers of an earlier test make of the forecast."""


@dataclass
class Harness:
    running: Deployment
    between: Proxy
    stub: InferenceServiceStub
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Ends a test's request ids, each of which is valid once."""
    deadline_s: float = FAR_S
    """Of the request `it`."""
    output: int = 1000
    share: float = 1.0
    """Of the tokens that a test asks for."""

    def begin(self, request_id: str, prompt: int = 200, output: int | None = None) -> Any:
        length, most = (max(16, round(tokens * self.share)) for tokens in (prompt, output or self.output))
        ids = [0] + [5 + (prompt * 31 + n) % 4000 for n in range(length - 1)]
        request = generate_request(ids, max_tokens=most)
        request.request_id = f"{request_id}-{self.mark}"
        request.stopping.ignore_eos = True
        return self.stub.GenerateStream(request, timeout=self.deadline_s if request_id == "it" else FAR_S)

    async def until(self, worker: int, holds: Callable[[wire.AuditResponse], bool], call: Any) -> None:
        """Raises the error of the call if it ends before."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds(await asyncio.to_thread(self.running.workers[worker].audit)):
                await raise_error(call)
                await asyncio.sleep(0.005)

    async def cancel(self, request_id: str) -> int:
        answer = await self.stub.CancelGeneration(pb.CancelGenerationRequest(request_id=f"{request_id}-{self.mark}"))
        return int(answer.status)


async def raise_error(call: Any) -> None:
    if call.done():
        await call.read()


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Deployment, Proxy]]:
    with ExitStack() as stack:
        between = stack.enter_context(proxy())
        small = (*SMALL_KV, "--token-budget", "16", "--max-running", "16")
        router = ("--resume-grace-ms", "0", "--max-active", str(MOST_AT_WORK))
        yield stack.enter_context(deployment(worker=small, router=router, between=(between,))), between


@pytest.fixture
async def harness(processes: tuple[Deployment, Proxy]) -> AsyncIterator[Harness]:
    running, between = processes
    channel, stub = open_stub(running.address)
    async with channel:
        yield Harness(running, between, stub)
        between.tamper = None
        async with asyncio.timeout(PATIENCE_S):
            while not await is_handed_over(stub):  # a worker that stalled is avoided until its heartbeats resume
                pass
    await asyncio.to_thread(running.settled)


async def is_handed_over(stub: InferenceServiceStub) -> bool:
    request = generate_request("x = 1\n", max_tokens=4)
    request.stopping.ignore_eos = True
    answer = await ask(stub, request)
    assert len(answer.ids) == 4
    return bool(answer.receipt.prefill_worker)


def holding(phase: int) -> Callable[[wire.AuditResponse], bool]:
    return lambda audit: any(owner.phase == phase for owner in audit.owners)


def without_runs(message: wire.FetchResponse) -> Iterable[wire.FetchResponse]:
    return [message] if message.HasField("heartbeat") else []


async def queued(harness: Harness) -> Any:
    others = [harness.begin(f"before-{n}") for n in range(MOST_AT_WORK)]
    for other in others:
        await other.read()
    call = harness.begin("it")
    if (ACCEPTED, "true") not in tuple(await call.initial_metadata()):
        for other in others:
            other.cancel()
        await call.read()  # raises its refusal
    return call, others


async def prefilling(harness: Harness) -> Any:
    call = harness.begin("it", prompt=LONG, output=100)
    await harness.until(PREFILL, holding(wire.RunStatus.PHASE_RUNNING), call)
    return call, []


async def handing_over(harness: Harness) -> Any:
    harness.between.tamper = without_runs
    call = harness.begin("it", prompt=LONG, output=100)
    await harness.until(DECODE, holding(wire.RunStatus.PHASE_ARRIVING), call)
    return call, []


async def decoding(harness: Harness) -> Any:
    call = harness.begin("it")
    await harness.until(DECODE, holding(wire.RunStatus.PHASE_RUNNING), call)
    return call, []


INSTANTS = [queued, prefilling, handing_over, decoding]


def by_name(instant: Callable[..., object]) -> str:
    return instant.__name__


@pytest.mark.parametrize("instant", INSTANTS, ids=by_name)
async def test_a_cancel_call_ends_a_request_and_frees_its_blocks(
    harness: Harness, instant: Callable[[Harness], Any]
) -> None:
    call, others = await instant(harness)
    assert await harness.cancel("it") == pb.CancelGenerationResponse.STATUS_CANCELLED
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        async for _ in call:
            pass
    error = from_call(ended.value)
    assert (error.code, error.reason) == (grpc.StatusCode.CANCELLED, Reason.CANCELLED)
    if instant is not queued:  # one that was never admitted is not recorded
        assert await harness.cancel("it") == pb.CancelGenerationResponse.STATUS_CANCELLED
    for other in others:
        other.cancel()


@pytest.mark.parametrize("instant", INSTANTS, ids=by_name)
async def test_a_disconnect_ends_a_request_and_frees_its_blocks(
    harness: Harness, instant: Callable[[Harness], Any]
) -> None:
    call, others = await instant(harness)
    for one in (call, *others):
        one.cancel()
    if instant is queued:
        return  # the harness's end finds its place free
    async with asyncio.timeout(PATIENCE_S):
        while await harness.cancel("it") != pb.CancelGenerationResponse.STATUS_CANCELLED:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextmanager
def suspended(running: Deployment) -> Iterator[None]:
    for worker in running.workers:
        os.kill(worker.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in running.workers:
            os.kill(worker.process.pid, signal.SIGCONT)


async def within_a_deadline(harness: Harness, instant: Callable[[Harness], Any]) -> Any:
    """Reach an instant of a request that has 6 s: after 8 s without a worker it would end for that reason.

    A busy machine may be late or refuse what it can't compute in the time, so each try asks for less than the one
    before. The forecast may also still know suspended workers.
    """
    share = 1.0
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                mark = uuid.uuid4().hex
                return await instant(replace(harness, deadline_s=6.0, output=300, mark=mark, share=share))
            except grpc.aio.AioRpcError:
                share /= 2
                await is_handed_over(harness.stub)  # an answer, which the forecast learns from


@pytest.mark.parametrize("instant", INSTANTS, ids=by_name)
async def test_the_deadline_ends_a_request_and_frees_its_blocks(
    harness: Harness, instant: Callable[[Harness], Any]
) -> None:
    call, others = await within_a_deadline(harness, instant)
    with suspended(harness.running), pytest.raises(grpc.aio.AioRpcError) as ended:
        async for _ in call:
            pass
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for other in others:
        other.cancel()


async def test_a_cancel_at_any_instant_and_of_any_kind_frees_all_blocks(harness: Harness) -> None:
    chance = random.Random(7)

    async def give_up(n: int) -> None:
        call = harness.begin(f"any-{n}", prompt=chance.randrange(1, 400), output=chance.randrange(2, 300))
        reading = asyncio.create_task(_drained(call))
        await asyncio.sleep(chance.random() * 0.4)
        if chance.random() < 0.5:
            with contextlib.suppress(grpc.aio.AioRpcError):  # not known yet: it may not even have arrived
                await harness.cancel(f"any-{n}")
        call.cancel()
        await reading

    for _ in range(6):
        await asyncio.gather(*(give_up(chance.getrandbits(32)) for _ in range(6)))


async def _drained(call: Any) -> None:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        ended = error.code()
    except asyncio.CancelledError:
        ended = grpc.StatusCode.CANCELLED
    else:
        ended = grpc.StatusCode.OK
    assert ended in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
