from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.tls import PeerTls
from decant.runtime.serving.health import Readiness
from decant.runtime.serving.server import Server, Service
from decant.runtime.serving.server_settings import ServerSettings
from decant.runtime.telemetry.metrics import Registry
from tests.worker.waiting import PATIENCE

INFERENCE = pb.DESCRIPTOR.services_by_name["InferenceService"]
DECODE = worker_pb2.DESCRIPTOR.services_by_name["Decode"]


async def _unscripted(*_: object) -> Any:
    raise NotImplementedError


@dataclass
class Script:
    """Methods of a service; each gets the request (or its iterator) and the context."""

    unary: Callable[[Any, Any], Awaitable[Any]] = _unscripted
    stream: Callable[[Any, Any], AsyncIterator[Any]] | None = None
    session: Callable[[Any, Any], AsyncIterator[Any]] | None = None


class _Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self.script.unary(request, context)

    def GenerateStream(self, request: Any, context: Any) -> Any:  # noqa: N802
        assert self.script.stream is not None
        return self.script.stream(request, context)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerInfo(version="1")


class _Decode(worker_pb2_grpc.DecodeServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    def Session(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        assert self.script.session is not None
        return self.script.session(request_iterator, context)


def services(script: Script) -> list[Service]:
    return [
        Service(
            INFERENCE,
            lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Inference(script), server),
            admission_methods=frozenset({"Generate", "GenerateStream"}),
        ),
        Service(DECODE, lambda server: worker_pb2_grpc.add_DecodeServicer_to_server(_Decode(script), server)),
    ]


@dataclass
class Harness:
    server: Server
    registry: Registry
    channel: grpc.aio.Channel
    script: Script
    running: asyncio.Task[bool]
    inference: Any = field(init=False)
    decode: Any = field(init=False)

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.decode = worker_pb2_grpc.DecodeStub(self.channel)

    def counted(self, **labels: str) -> float:
        return sum(
            sample.value
            for metric in self.registry.collectors.collect()
            for sample in metric.samples
            if sample.name == "decant_errors_total" and labels.items() <= sample.labels.items()
        )


@asynccontextmanager
async def harness(
    *,
    drain: Callable[[], Awaitable[None]] | None = None,
    warm_up: Callable[[Server], Awaitable[None]] | None = None,
    peer: PeerTls | None = None,
    options: tuple[tuple[str, int], ...] | None = None,
    **settings: Any,
) -> AsyncIterator[Harness]:
    script = Script()
    registry = Registry(process=False)
    listening = ServerSettings(**{"port": 0, "drain_seconds": 10 * PATIENCE, **settings})
    server = Server(services(script), listening, Readiness(), registry)
    await server.start()
    running = asyncio.create_task(server.run(warm_up=warm_up, drain=drain))
    if options is None:
        channel = open_channel(server.address, peer or PeerTls())
    else:
        channel = grpc.aio.insecure_channel(server.address, options)
    try:
        yield Harness(server, registry, channel, script, running)
    finally:
        await channel.close()
        if not running.done():
            server.shutdown.request("the test ends")
            server.shutdown.request("the test ends")
        await asyncio.wait([running])
