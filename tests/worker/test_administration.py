from __future__ import annotations

from typing import Any

import grpc
import pytest

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.error_details import Reason
from decant.runtime.errors import FailedPrecondition, ServiceError, Unavailable, from_call
from tests.worker.harness import WorkerHarness, make_work, worker

OTHER = wire.Peer(id="p", incarnation=1)


async def call(harness: WorkerHarness, method: str, request: Any) -> Any:
    """Call a method of the Admin service. Raises ServiceError."""
    try:
        return await getattr(services.AdminStub(harness.channel), method)(request)
    except grpc.aio.AioRpcError as error:
        raise from_call(error) from None


async def drain(harness: WorkerHarness) -> int:
    answer: wire.DrainResponse = await call(harness, "Drain", wire.DrainRequest(worker=harness.host.peer))
    return answer.runs


async def undrain(harness: WorkerHarness) -> None:
    await call(harness, "Undrain", wire.UndrainRequest(worker=harness.host.peer))


async def test_a_drained_worker_ends_what_runs_and_refuses_new_runs_until_it_is_put_back() -> None:
    async with worker() as harness:
        running = harness.ask(make_work(30), request="t/before", handoff=False)
        await running.expect("first")
        await running.ended()
        handed_over = harness.ask(make_work(30), request="t/kept")
        await handed_over.expect("ticket")
        assert [await drain(harness) for _ in range(2)] == [1, 1], "the ticket keeps its prompt"
        assert (harness.host.load().draining, harness.renewals) == (True, 1), "the second call changes nothing"
        late = await harness.ask(make_work(30), request="t/late").expect("refused")
        assert late.failure.cause == wire.CAUSE_DRAINING
        await handed_over.expect("first")
        await handed_over.break_off()
        await harness.emptied()
        assert await drain(harness) == 0
        for _ in range(2):
            await undrain(harness)
        assert (harness.host.load().draining, harness.renewals) == (False, 2)
        await harness.ask(make_work(30), request="t/after", handoff=False).expect("first")


@pytest.mark.parametrize(("method", "request_type"), [("Drain", wire.DrainRequest), ("Undrain", wire.UndrainRequest)])
async def test_another_incarnation_at_the_address_is_not_changed(method: str, request_type: Any) -> None:
    async with worker() as harness:
        with pytest.raises(FailedPrecondition, match="another incarnation of p than 1") as caught:
            await call(harness, method, request_type(worker=OTHER))
        assert caught.value.reason is Reason.WRONG_PEER
        assert not harness.renewals


async def test_a_process_that_ends_is_not_put_back() -> None:
    async with worker() as harness:
        harness.readiness.mark_draining()
        with pytest.raises(ServiceError, match="is ending") as caught:
            await undrain(harness)
        assert isinstance(caught.value, Unavailable)
        assert caught.value.reason is Reason.DRAINING
        assert await drain(harness) == 0
