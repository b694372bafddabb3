from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc
from decant.protos import worker_pb2 as wire
from decant.protos.kserve import grpc_service_pb2_grpc
from decant.protos.vllm import vllm_engine_pb2_grpc
from decant.router.api.auth import Authenticator, NoAuthentication
from decant.router.api.generation_calls import GenerationCalls
from decant.router.api.keepalive import StreamKeepalive
from decant.router.api.prompt_calls import PromptCalls
from decant.router.api.service import InferenceService, ServerInfoSource
from decant.router.execution.registry import RequestRegistry
from decant.router.kserve.service import KServeService
from decant.router.kv_events.publisher import KvEvents, NoKvEvents
from decant.router.limits import limits
from decant.router.placement.capacity import PoolCapacity
from decant.router.request.token_stream import TokenStream
from decant.router.text.served_model import Models
from decant.router.timings import RouterTimings
from decant.router.vllm.engine_info import EngineInfoSource
from decant.router.vllm.service import VllmEngineService
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.tls import PeerTls
from decant.runtime.errors import (
    ServiceError,
    from_call,
)
from decant.runtime.serving.health import Readiness
from decant.runtime.serving.server import Server
from decant.runtime.serving.server_settings import ServerSettings
from decant.runtime.telemetry.metrics import Registry, RequestMetrics
from decant.state.ids import Incarnation
from tests.router.factories import STOPPED, ScriptedPrompts, ScriptedRegistry, tiny, write

PATIENCE = 60.0
HERE = Incarnation("router-a", 1)
CANCEL = pb.CancelGenerationResponse


UNREAD_S = RouterTimings().unread_s


@dataclass
class Harness:
    stub: Any
    requests: ScriptedRegistry
    server: Server
    registry: Registry
    vllm: Any
    """Stub of ``vllm.grpc.engine.VllmEngine``."""
    kserve: Any
    """Stub of ``inference.GRPCInferenceService``."""
    keepalive: StreamKeepalive
    """Its timer never ends: a test sends what it would send."""

    async def stream(self) -> TokenStream:
        async with asyncio.timeout(PATIENCE):
            return await self.requests.streams.get()

    async def lost(self) -> TokenStream:
        async with asyncio.timeout(PATIENCE):
            return await self.requests.lost.get()

    def count(self, name: str) -> float | None:
        return self.registry.collectors.get_sample_value(f"decant_{name}", {"model": "tiny-python"})


def make_service(
    requests: ScriptedRegistry | RequestRegistry,
    registry: Registry,
    served: Models | None = None,
    callers: Authenticator | None = None,
    unread_s: float = UNREAD_S,
    calls: GenerationCalls | None = None,
    metrics: RequestMetrics | None = None,
) -> InferenceService:
    served = served or Models([tiny()])
    reported = limits(max_queued_requests=8, resume_grace_ms=0, result_ttl_ms=0)
    about = ServerInfoSource(HERE, "1.2.3", reported, lambda: True, lambda: False)
    authenticator = callers or NoAuthentication(served)
    metrics = metrics or RequestMetrics(registry)
    calls = calls or GenerationCalls(served, cast(Any, requests), metrics, unread_s)
    prompt_runs: Any = requests.prompts if isinstance(requests, ScriptedRegistry) else ScriptedPrompts()
    prompts = PromptCalls(cast(Any, requests), prompt_runs, metrics)
    return InferenceService(calls, cast(Any, requests), about, authenticator, prompts)


def make_vllm_service(
    calls: GenerationCalls, requests: ScriptedRegistry, callers: Authenticator, metrics: RequestMetrics
) -> VllmEngineService:
    pool: Any = SimpleNamespace(
        capacity=lambda model: PoolCapacity(batch_limit=8, queued_prompt_tokens=30),
        cache_usage=lambda model: 0.25,
        cache_tokens=lambda model: 1600,
    )
    load = wire.Load(running=2, waiting=1)
    info = EngineInfoSource("1.2.3", pool, lambda: load, lambda: True, lambda: 5.0)
    prompt_runs: Any = requests.prompts if isinstance(requests, ScriptedRegistry) else ScriptedPrompts()
    prompts = PromptCalls(cast(Any, requests), prompt_runs, metrics)
    return VllmEngineService(calls, cast(Any, requests), info, callers, {"critical": 100}, prompts)


@asynccontextmanager
async def harness(
    served: Models | None = None,
    callers: Authenticator | None = None,
    unread_s: float = UNREAD_S,
    drain_seconds: float = 1.0,
    kv_events: KvEvents | None = None,
) -> AsyncIterator[Harness]:
    requests, registry, readiness = ScriptedRegistry(), Registry(process=False), Readiness()
    requests.kv_events = kv_events or NoKvEvents()
    served = served or Models([tiny()])
    metrics = RequestMetrics(registry)
    calls = GenerationCalls(served, cast(Any, requests), metrics, unread_s, keepalive_s=1e6)
    service = make_service(requests, registry, served, callers, unread_s, calls, metrics).service()
    authenticator = callers or NoAuthentication(served)
    vllm = make_vllm_service(calls, requests, authenticator, metrics).service()
    tensors = KServeService(calls, cast(Any, requests), authenticator, "1.2.3", lambda: readiness.is_ready)
    server = Server(
        [service, vllm, tensors.service()], ServerSettings(port=0, drain_seconds=drain_seconds), readiness, registry
    )
    await server.start()
    running = asyncio.create_task(server.run())
    channel = open_channel(server.address, PeerTls())
    try:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        others = vllm_engine_pb2_grpc.VllmEngineStub(channel), grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        yield Harness(stub, requests, server, registry, *others, calls.keepalive)
    finally:
        await channel.close()
        server.shutdown.request("the test ends")
        server.shutdown.request("the test ends")
        await asyncio.wait([running])


def generate_request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"prompt": "def f(x):", **fields})


async def error_of_call(call: Awaitable[Any]) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return from_call(error.value)


async def all_of(call: Any) -> list[pb.GenerateStreamResponse]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    if await call.code() is not grpc.StatusCode.OK:
        await call.wait_for_connection()  # raises what it ended with
    return messages


def writes(*tokens: int, end: Any = STOPPED) -> Callable[[TokenStream], None]:
    return lambda stream: write(stream, *tokens, end=end)
