from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.tls import PeerTls
from decant.runtime.error_details import Reason
from decant.runtime.errors import from_call
from decant.runtime.serving.interceptor import ErrorInterceptor
from decant.worker.startup.deferred_service import DeferredService


class Prompts(services.PrefillServicer):
    async def Prefill(self, request: Any, _: Any) -> AsyncIterator[wire.PrefillEvent]:  # noqa: N802
        yield wire.PrefillEvent(first=wire.FirstTokens(cached_tokens=len(request.run.request)))


async def test_calls_are_refused_until_the_service_arrives_and_answered_from_then_on() -> None:
    late = {name: DeferredService(descriptor) for name, descriptor in wire.DESCRIPTOR.services_by_name.items()}
    server = grpc.aio.server(interceptors=[ErrorInterceptor(lambda _: None)])
    for service in late.values():
        service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", PeerTls()) as channel:
        prefill, request = services.PrefillStub(channel), wire.PrefillRequest(run=wire.Run(request="abc"))
        starting: list[Any] = [
            prefill.Prefill(request),
            services.DecodeStub(channel).Session(iter([wire.RouterMessage()])),
            services.AdminStub(channel).Audit(wire.AuditRequest()),
        ]
        for call in starting:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await (call if call is starting[2] else call.read())
            error = from_call(refused.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.NO_WORKER)
            assert error.retry_after
        late["Prefill"].attach(partial(services.add_PrefillServicer_to_server, Prompts()))
        assert [event.first.cached_tokens async for event in prefill.Prefill(request)] == [3]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await services.AdminStub(channel).Audit(wire.AuditRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)
