from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import AsyncExitStack

from decant.engine.plan import Device
from decant.handoff.memory_reads import MemoryReads
from decant.handoff.nixl_agent import NixlAgent, NixlUnusable
from decant.handoff.transport import GrpcTransport, Transport
from decant.protos import worker_pb2 as wire
from decant.runtime.connections.channel import Connector
from decant.runtime.settings import SettingError
from decant.runtime.telemetry import logs
from decant.worker.engine_host import transfer_layout
from decant.worker.settings import WorkerSettings

START_SECONDS = 60.0
"""Time for NIXL, which probes networks and registers the KV cache. It holds the GIL for seconds of that, during which
the event loop stands still and cannot notice the limit.
"""

_log = logs.get(__name__)


async def make_transport(
    settings: WorkerSettings,
    device: Device,
    peer: wire.Peer,
    stack: AsyncExitStack,
    start_seconds: float = START_SECONDS,
) -> Transport:
    """Make the transport, which ``stack`` closes. Raises SettingError."""
    messages = GrpcTransport(Connector(settings).open)
    stack.push_async_callback(messages.close)
    if settings.handoff == "grpc":
        return messages
    _log.warning("NIXL's ports have no authentication: any process that reaches them can read and write this KV cache")
    _log.info("NIXL starts", seconds=start_seconds)
    layout = transfer_layout(device)
    try:
        agent = await _start(f"{peer.id}/{peer.incarnation:x}", device, layout.message_bytes, start_seconds)
    except NixlUnusable as error:
        raise SettingError("handoff", f"grpc, as {error}", settings.handoff) from error
    stack.push_async_callback(agent.aclose)
    return MemoryReads(messages, agent, layout)


async def _start(name: str, device: Device, buffer_bytes: int, seconds: float) -> NixlAgent:
    """Start NIXL in a daemon thread, which may still run after NixlUnusable."""
    started: Future[NixlAgent] = Future()
    started.set_running_or_notify_cancel()  # cannot be cancelled

    def start() -> None:
        try:
            started.set_result(NixlAgent(name, device.block_memory, buffer_bytes))
        except BaseException as error:  # noqa: BLE001 - raised by the waiter
            started.set_exception(error)

    threading.Thread(target=start, name="nixl", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(started)
    except TimeoutError:
        raise NixlUnusable(f"NIXL has not started in {seconds:g} s") from None
