"""The cost of gRPC alone: a server in the router's position that knows each answer and its schedule.

python -m bench.deployment.grpc_baseline FIRST_MS STEP_MS prints the port that it serves.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import grpc

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc as services
from decant.runtime.serving import shutdown
from decant.runtime.serving.server import freeze_gc


def next_step(now: float, step_s: float, latest: int) -> int:
    """Number of the next multiple of ``step_s``, above ``latest``: timers may fire early, and multiples are rounded."""
    return max(latest + 1, int(now / step_s) + 1)


class Bare(services.InferenceServiceServicer):
    def __init__(self, first_s: float, step_s: float) -> None:
        self._first_s = first_s
        self._step_s = step_s
        self._next: asyncio.Future[None] | None = None
        self._number = 0  # of the latest step

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> None:  # noqa: N802
        message = pb.GenerateStreamResponse(request_id=request.request_id)
        await asyncio.sleep(self._first_s)
        for number in range(1, request.stopping.max_tokens + 1):
            message.seq = number
            message.delta.num_tokens = 1
            message.delta.text = " some"
            await context.write(message)
            await self._step()

    async def _step(self) -> None:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            self._number = next_step(loop.time(), self._step_s, self._number)
            loop.call_at(self._number * self._step_s, self._tick)
        await asyncio.shield(self._next)

    def _tick(self) -> None:
        if self._next is not None:
            self._next.set_result(None)
            self._next = None


async def serve(first_ms: float, step_ms: float, on_serving: Callable[[int], object]) -> None:
    asked = shutdown.Shutdown()
    asked.on_signals()
    server = grpc.aio.server()
    services.add_InferenceServiceServicer_to_server(Bare(first_ms / 1000, step_ms / 1000), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    freeze_gc()
    on_serving(port)
    await asked.wait_requested()
    await server.stop(None)


if __name__ == "__main__":
    shutdown.run(serve(float(sys.argv[1]), float(sys.argv[2]), lambda port: print(port, flush=True)))
