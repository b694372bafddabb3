"""Cost of Redis: its CPU and memory for routers that journal running streams, and for registered workers.

    python -m bench.store --streams 2000 [--routers 4] [--workers 40] [--seconds 10] [--json OUT]

Does the work of so many seconds as fast as the machine allows, through the store's client, and divides the CPU of
redis-server by these seconds: other load on the machine does not matter. It is an upper limit, as the journal writer
of a busy router writes less often. Streams get tokens at 10 to 30 tokens/s, have exponential lengths, and another
request follows each that ends. Per router: a write of all streams every --flush-ms, a write of each end at once, its
registration, searches for lost routers, reads of the directory. Redis is reached over TCP.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import psutil
import uvloop

from bench import machine
from bench.deployment.processes import cpu_seconds
from bench.options import add_json, positive, write_result
from decant.protos.inference_pb2 import GenerateRequest, Generation
from decant.protos.state_pb2 import RequestRecord, RouterRegistration, WorkerRegistration
from decant.protos.worker_pb2 import Load, Peer
from decant.router.settings import RouterSettings
from decant.runtime.protocol import PROTOCOL
from decant.state.client import Client
from decant.state.directory import RegistrationHandle
from decant.state.ids import Incarnation, RequestKey
from decant.state.journal import Entry
from decant.state.keys import Ttls
from decant.state.owned import OwnedRequest
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store, StoreSettings

TOKENS_PER_SECOND = (10.0, 30.0)
FLUSH_MS = RouterSettings.model_fields["flush_ms"].default
DEADLINE_S = 30.0
STATES = (Generation.STATE_PREFILLING, Generation.STATE_HANDING_OFF, Generation.STATE_DECODING)


class RunningStream:
    def __init__(self, owned: OwnedRequest, num_tokens: int) -> None:
        self.owned = owned
        self._num_tokens = num_tokens
        self._rate = random.uniform(*TOKENS_PER_SECOND)
        self._due = random.random()

    def decode(self, seconds: float) -> bool:
        """Append the tokens of ``seconds``; return whether the stream has ended."""
        self._due += seconds * self._rate
        count = min(int(self._due), self._num_tokens - self.owned.length)
        self._due -= int(self._due)
        self.owned.append([Entry(0, random.randrange(150_000)) for _ in range(count)])
        if self.owned.length < self._num_tokens:
            return False
        self.owned.transition(Generation.STATE_SUCCEEDED, datetime.now(UTC))
        return True


class Router:
    def __init__(self, store: Store, number: int, args: argparse.Namespace) -> None:
        self._me = Incarnation(f"router-{number}", random.getrandbits(63))
        self._store = store
        self._args = args
        self._registration: RegistrationHandle[RouterRegistration] | None = None
        self._streams: list[RunningStream] = []

    async def start(self, streams: int) -> None:
        registration = RouterRegistration(peer=_peer(self._me), address="127.0.0.1:1")
        self._registration = await self._store.routers.register(registration)
        await asyncio.gather(*(self._begin() for _ in range(streams)))
        await self._flush()

    async def tick(self) -> None:
        """Do the work between two writes of all streams."""
        seconds = self._args.flush_ms / 1000
        ended = [stream for stream in self._streams if stream.decode(seconds)]
        self._streams = [stream for stream in self._streams if not stream.owned.ended]
        for stream in ended:
            await self._store.requests.flush([stream.owned])
            await self._begin()
        await self._flush()

    async def renew(self) -> None:
        """Do the work between two renewals of the registration."""
        assert self._registration is not None
        await self._registration.renew()
        await self._store.instance.current()
        await self._store.open.orphaned()
        await self._store.routers.listing()
        await self._store.workers.listing()

    async def _flush(self) -> None:
        await self._store.requests.flush([stream.owned for stream in self._streams])

    async def _begin(self) -> None:
        key = RequestKey("tenant", f"{random.getrandbits(96):x}")
        payload = GenerateRequest(request_id=key.id, prompt="x" * self._args.prompt_bytes)
        owned = OwnedRequest.begin(key, self._me, payload, _record(), datetime.now(UTC))
        await self._store.requests.accept(owned)
        for state in STATES:
            owned.transition(state, datetime.now(UTC))
        self._streams.append(RunningStream(owned, 1 + int(random.expovariate(1 / self._args.tokens))))


def _peer(incarnation: Incarnation) -> Peer:
    return Peer(id=incarnation.id, incarnation=incarnation.incarnation, protocol=PROTOCOL)


def _record() -> RequestRecord:
    prefill, decode = (_peer(Incarnation(id, random.getrandbits(63))) for id in ("prefill-1", "decode-1"))
    record = RequestRecord(model="served", seed=random.getrandbits(63), prompt_tokens=500, prompt_hash=1)
    record.attempts.add(attempt=1, prefill_worker=prefill, decode_worker=decode, layout_hash=1)
    return record


async def register_workers(store: Store, count: int) -> list[RegistrationHandle[WorkerRegistration]]:
    workers = [Incarnation(f"worker-{number}", random.getrandbits(63)) for number in range(count)]
    registrations = [
        WorkerRegistration(peer=_peer(worker), address="127.0.0.1:2", model="served", layout_hash=1)
        for worker in workers
    ]
    return [await store.workers.register(registration) for registration in registrations]


class Counters:
    """CPU and memory of redis-server, and the number of its commands."""

    def __init__(self, redis: Client, server: psutil.Process) -> None:
        self._redis = redis
        self._server = server

    async def read(self) -> dict[str, float]:
        stats = await self._redis.execute("INFO", "commandstats")
        memory = await self._redis.execute("INFO", "memory")
        calls = {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "append")}
        return {"cpu": cpu_seconds(self._server), "memory": memory["used_memory"], **calls}


async def work(
    routers: Sequence[Router], workers: Sequence[RegistrationHandle[Any]], seconds: float, flush_ms: int
) -> None:
    renew_at = 0.0
    for tick in range(round(1000 * seconds / flush_ms)):
        for router in routers:
            await router.tick()
        if tick * flush_ms / 1000 >= renew_at:
            renew_at += Ttls().renew_every_s
            for worker in workers:
                await worker.renew(Load(running=tick))
            for router in routers:
                await router.renew()


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(PrivateRedis(port=_free_port()))
        redis = Client(server.url, DEADLINE_S, max_connections=2)
        stack.push_async_callback(redis.close)
        counters = Counters(redis, psutil.Process((await redis.execute("INFO", "server"))["process_id"]))
        store = await stack.enter_async_context(Store(StoreSettings(server.url, DEADLINE_S)))
        empty = await counters.read()
        workers = await register_workers(store, args.workers)
        routers = [Router(store, number, args) for number in range(args.routers)]
        share = -(-args.streams // args.routers)
        for router in routers:
            await router.start(share)
        before = await counters.read()
        await work(routers, workers, args.seconds, args.flush_ms)
        after = await counters.read()
        results = await store.results.trim(1 << 62)
    spent = {name: value - before[name] for name, value in after.items()}
    streams = share * args.routers
    return {
        "streams": streams,
        "cores": spent["cpu"] / args.seconds,
        "writes_per_s": spent["append"] / args.seconds,
        "scripts_per_s": spent["evalsha"] / args.seconds,
        "ends_per_s": results.count / args.seconds,
        "us_per_script": 1e6 * spent["cpu"] / spent["evalsha"],
        "bytes_per_running_request": (before["memory"] - empty["memory"]) / streams,
        "bytes_per_result": results.bytes / max(1, results.count),
        "machine": machine.facts(),
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def show(result: dict[str, Any]) -> None:
    for name, value in result.items():
        if name != "machine":
            print(f"{name:28}{value:>12,.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=positive, default=2000)
    parser.add_argument("--routers", type=positive, default=4)
    parser.add_argument("--workers", type=positive, default=40)
    parser.add_argument("--tokens", type=positive, default=400, help="mean tokens of an answer")
    parser.add_argument("--prompt-bytes", type=positive, default=2000)
    parser.add_argument("--flush-ms", type=positive, default=FLUSH_MS)
    parser.add_argument("--seconds", type=float, default=10.0, help="how many seconds of work")
    add_json(parser)
    args = parser.parse_args()
    result = uvloop.run(measure(args))
    write_result(result, args.json, lambda: show(result))


if __name__ == "__main__":
    main()
