from __future__ import annotations

from typing import Any, cast

import grpc
import pytest

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.error_details import Reason
from decant.runtime.errors import FailedPrecondition, InvalidArgument, ServiceError, Unavailable, from_call
from decant.runtime.telemetry.metrics import Registry
from decant.worker.report.metrics import WorkerMetrics
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
        assert (harness.host.load().draining, len(harness.renewals)) == (True, 1), "the second call changes nothing"
        late = await harness.ask(make_work(30), request="t/late").expect("refused")
        assert late.failure.cause == wire.CAUSE_DRAINING
        await handed_over.expect("first")
        await handed_over.break_off()
        await harness.emptied()
        assert await drain(harness) == 0
        for _ in range(2):
            await undrain(harness)
        assert (harness.host.load().draining, len(harness.renewals)) == (False, 2)
        await harness.ask(make_work(30), request="t/after", handoff=False).expect("first")


@pytest.mark.parametrize("method", ["Drain", "Undrain", "SetRole", "AddAdapter", "RemoveAdapter"])
async def test_another_incarnation_at_the_address_is_not_changed(method: str) -> None:
    async with worker() as harness:
        with pytest.raises(FailedPrecondition, match="another incarnation of p than 1") as caught:
            await call(harness, method, getattr(wire, f"{method}Request")(worker=OTHER))
        assert caught.value.reason is Reason.WRONG_PEER
        assert (harness.renewals, harness.host.role) == ([], wire.ROLE_PREFILL)


async def test_a_process_that_ends_is_not_put_back() -> None:
    async with worker() as harness:
        harness.readiness.mark_draining()
        with pytest.raises(ServiceError, match="is ending") as caught:
            await undrain(harness)
        assert isinstance(caught.value, Unavailable)
        assert caught.value.reason is Reason.DRAINING
        assert await drain(harness) == 0


async def test_a_role_is_reported_and_registered_once_it_was_changed() -> None:
    async with worker(role=wire.ROLE_PREFILL) as harness:
        registered = list[wire.Role]()
        harness.host.role_changes.subscribe(registered.append)
        for role, previous in ((wire.ROLE_DECODE, wire.ROLE_PREFILL), (wire.ROLE_DECODE, wire.ROLE_DECODE)):
            request = wire.SetRoleRequest(worker=harness.host.peer, role=role)
            assert (await call(harness, "SetRole", request)).previous == previous
        assert harness.host.heartbeat().load.role == (await harness.audit()).role == wire.ROLE_DECODE
        assert registered == [wire.ROLE_DECODE], "the second call changes nothing"


@pytest.mark.parametrize("role", [wire.ROLE_UNSPECIFIED, 7])
async def test_an_unknown_role_is_refused(role: int) -> None:
    async with worker() as harness:
        with pytest.raises(InvalidArgument, match="role: ROLE_PREFILL or ROLE_DECODE"):
            await call(harness, "SetRole", wire.SetRoleRequest(worker=harness.host.peer, role=cast(wire.Role, role)))


async def test_the_metric_of_the_role_follows_it() -> None:
    async with worker(role=wire.ROLE_PREFILL) as harness:
        registry = Registry(process=False)
        WorkerMetrics(registry, harness.host)
        assert b'decant_worker_info{model="m",role="prefill"} 1.0' in registry.text()
        harness.host.role = wire.ROLE_DECODE
        text = registry.text()
        assert b'role="decode"} 1.0' in text
        assert b'role="prefill"' not in text
