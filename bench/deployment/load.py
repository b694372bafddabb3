"""Clients of a router in their own process: ``python -m bench.deployment.load``.

    parent                                   here
      job, one JSON object  ── stdin ──>     opens a channel, starts
      {"window": "begin"}   <── stdout ──    the measured window starts
      an empty line         ── stdin ──>     after each of both: it goes on
      {"window": "end"}     <── stdout ──
      {"result": {...}}     <── stdout ──    last

closed    each client sends its next request after the last answer; the window is the whole run
open      requests start at random instants (Poisson)
streams   concurrent answers; the window lies within all of them
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import grpc

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc as services
from decant.runtime.grpc_options import NO_PROXY
from decant.runtime.serving.server import freeze_gc

WARM_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    name: str  # prefix of the ids of its requests
    address: str
    kind: Literal["closed", "open", "streams"]
    seconds: float
    clients: int = 1
    rate: float = 1.0
    prompt_tokens: int = 64
    output_tokens: int = 16
    text: bool = True
    seed: int = 0


@dataclass(slots=True)
class RequestTimes:
    id: str
    sent: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    messages: int = 0  # deltas


class Clients:
    def __init__(self, job: Job, channel: grpc.aio.Channel, send: Callable[[dict[str, Any]], None]) -> None:
        self.seen: list[RequestTimes] = []
        self.errors: list[str] = []
        self.in_window: int | None = None  # messages, of streams
        self._job = job
        self._stub = services.InferenceServiceStub(channel)
        self._send = send
        self._random = random.Random(job.seed)

    async def closed(self) -> None:
        self._send({"window": "begin"})
        until = time.monotonic() + self._job.seconds

        async def client() -> None:
            while time.monotonic() < until:
                await self._ask()

        await asyncio.gather(*[client() for _ in range(self._job.clients)])
        self._send({"window": "end"})

    async def open(self) -> None:
        self._send({"window": "begin"})
        at = time.monotonic()
        until = at + self._job.seconds
        async with asyncio.TaskGroup() as group:
            while (at := at + self._random.expovariate(self._job.rate)) < until:
                await asyncio.sleep(at - time.monotonic())
                group.create_task(self._ask())
        self._send({"window": "end"})

    async def streams(self) -> None:
        began = [asyncio.Event() for _ in range(self._job.clients)]
        asking = [asyncio.create_task(self._ask(event)) for event in began]
        await asyncio.gather(*[event.wait() for event in began])
        await asyncio.sleep(WARM_SECONDS)
        before = self._count()
        self._send({"window": "begin"})
        await asyncio.sleep(self._job.seconds)
        self.in_window = self._count() - before
        self._send({"window": "end"})
        if any(task.done() for task in asking):
            raise ValueError(f"{self._job.output_tokens} tokens were written before {self._job.seconds} s had passed")
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)

    def _count(self) -> int:
        return sum(one.messages for one in self.seen)

    async def _ask(self, began: asyncio.Event | None = None) -> None:
        request = self._request(len(self.seen))
        seen = RequestTimes(request.request_id, time.monotonic())
        self.seen.append(seen)
        try:
            async for message in self._stub.GenerateStream(request):
                if message.HasField("delta"):
                    self._on_delta(seen, message.delta)
                    if began is not None:
                        began.set()
        except grpc.aio.AioRpcError as error:
            self.errors.append(f"{error.code().name}: {error.details()}")
        finally:
            if began is not None:
                began.set()

    def _on_delta(self, seen: RequestTimes, delta: pb.Delta) -> None:
        seen.last = time.monotonic()
        seen.first = seen.first or seen.last
        seen.messages += 1
        seen.tokens += delta.num_tokens

    def _request(self, number: int) -> pb.GenerateRequest:
        """Make a request whose prompt begins with its number, so that no prefix is cached."""
        job = self._job
        digits = (job.seed % 1000, number // 1000 % 1000, number % 1000)
        prompt = [2 + digit for digit in digits] + [2 + (7 * k) % 1000 for k in range(job.prompt_tokens - 3)]
        return pb.GenerateRequest(
            request_id=f"{job.name}-{number}",
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(seed=number, temperature=1.0),
            stopping=pb.StoppingParams(max_tokens=job.output_tokens, ignore_eos=True),
            response=pb.ResponseOptions(text=job.text),
        )


async def serve(job: Job, send: Callable[[dict[str, Any]], None]) -> None:
    async with grpc.aio.insecure_channel(job.address, NO_PROXY) as channel:
        clients = Clients(job, channel, send)
        freeze_gc()
        await getattr(clients, job.kind)()
    result = {"seen": [asdict(one) for one in clients.seen], "errors": clients.errors, "in_window": clients.in_window}
    send({"result": result})


def main() -> None:
    job = Job(**json.loads(sys.stdin.readline()))

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)
        if "window" in message:
            sys.stdin.readline()

    asyncio.run(serve(job, send))


if __name__ == "__main__":
    main()
