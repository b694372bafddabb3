"""Cost of Redis: its CPU and memory while routers journal many running streams and workers are registered.

    python -m bench.store --streams 2000 [--routers 4] [--workers 40] [--seconds 20] [--json OUT]

Each router is a process with the journal writer and the store's client of a real one. Its streams get tokens at 10 to
30 tokens/s each, have exponential lengths, and a new request follows each that ends. Redis is reached over TCP.

    CPU         of redis-server, in cores, by its process clock
    writes/s    scripts that write a request; streams over these is the interval between two writes of one
    us a write  CPU of redis-server per write, all other commands included
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import psutil
import uvloop

from bench.deployment.processes import cpu_seconds, end
from bench.options import add_json, positive, write_result
from decant.protos.inference_pb2 import GenerateRequest, Generation
from decant.protos.state_pb2 import RequestRecord, RouterRegistration, WorkerRegistration
from decant.protos.worker_pb2 import Load, Peer
from decant.router.execution.journal_writer import JournalWriter
from decant.router.settings import RouterSettings
from decant.runtime.protocol import PROTOCOL
from decant.state.client import Client
from decant.state.ids import Incarnation, RequestKey
from decant.state.keys import Ttls
from decant.state.logprobs import Logprobs
from decant.state.owned import OwnedRequest
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store, StoreSettings

TOKENS_PER_SECOND = (10.0, 30.0)
TICK_SECONDS = 0.02
FLUSH_MS = RouterSettings.model_fields["flush_ms"].default


@dataclass(frozen=True)
class Job:
    url: str
    number: int
    """Of the process: 0 registers workers, others are routers."""
    count: int
    """Workers, or streams of this router."""
    output_tokens: int
    prompt_bytes: int


class Output:
    def __init__(self) -> None:
        self.index = 0
        self.tokens: list[int] = []
        self.logprobs = Logprobs()


class Stream:
    """What the journal writer reads of a token stream."""

    has_prompt_logprobs = False

    def __init__(self) -> None:
        self.outputs = [Output()]

    @property
    def num_tokens(self) -> int:
        return len(self.outputs[0].tokens)


class RunningRequest:
    def __init__(self, owned: OwnedRequest, length: int) -> None:
        self.owned = owned
        self.stream = Stream()
        self.length = length
        self.rate = random.uniform(*TOKENS_PER_SECOND)
        self.due = 0.0  # tokens

    def on_superseded(self, error: Exception) -> None:
        raise error

    def mark_persisted(self) -> None:
        pass

    def decode(self, seconds: float) -> bool:
        """Append the tokens of ``seconds``; return whether these were the last."""
        self.due += seconds * self.rate
        tokens = self.stream.outputs[0].tokens
        while self.due >= 1 and len(tokens) < self.length:
            tokens.append(random.randrange(150_000))
            self.due -= 1
        return len(tokens) == self.length


class Router:
    def __init__(self, store: Store, job: Job) -> None:
        self.me = Incarnation(f"router-{job.number}", random.getrandbits(63))
        self._store = store
        self._job = job
        self._writer = JournalWriter(store.requests, FLUSH_MS)
        self._running: set[RunningRequest] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._writer.run())
            tasks.create_task(self._register())
            tasks.create_task(self._watch())
            for _ in range(self._job.count):
                tasks.create_task(self._begin(random.randrange(self._job.output_tokens) + 1))
            while len(self._running) < self._job.count:
                await asyncio.sleep(TICK_SECONDS)
            print(json.dumps({"ready": self._job.number}), flush=True)
            clock = asyncio.get_running_loop().time
            then = clock()
            while True:
                await asyncio.sleep(TICK_SECONDS)
                now = clock()
                for request in [one for one in self._running if one.decode(now - then)]:
                    self._finish(request)
                    tasks.create_task(self._begin(1 + int(random.expovariate(1 / self._job.output_tokens))))
                then = now

    async def _begin(self, length: int) -> None:
        key = RequestKey("tenant", f"{random.getrandbits(96):x}")
        payload = GenerateRequest(request_id=key.id, prompt="x" * self._job.prompt_bytes)
        owned = OwnedRequest.begin(key, self.me, payload, _record(), datetime.now(UTC))
        await self._store.requests.accept(owned)
        for state in (Generation.STATE_PREFILLING, Generation.STATE_HANDING_OFF, Generation.STATE_DECODING):
            owned.transition(state, datetime.now(UTC))
        request = RunningRequest(owned, length)
        self._running.add(request)
        self._writer.begin(request)  # type: ignore[arg-type]

    def _finish(self, request: RunningRequest) -> None:
        self._running.remove(request)
        owned = request.owned
        tokens = request.stream.outputs[0].tokens[owned.length :]
        owned.append(((0, token) for token in tokens), b"")  # type: ignore[misc]
        owned.transition(Generation.STATE_SUCCEEDED, datetime.now(UTC))
        self._writer.finish(request)  # type: ignore[arg-type]

    async def _register(self) -> None:
        peer = Peer(id=self.me.id, incarnation=self.me.incarnation, protocol=PROTOCOL)
        handle = await self._store.routers.register(RouterRegistration(peer=peer, address="127.0.0.1:1"))
        while True:
            await asyncio.sleep(Ttls().renew_every_s)
            await handle.renew()
            await self._store.instance.current()
            await self._store.open.orphaned()

    async def _watch(self) -> None:
        listing = await self._store.workers.listing()
        while True:
            listing = await self._store.workers.wait_for_change(listing, 30.0)


def _record() -> RequestRecord:
    workers = [Peer(id=f"{role}-1", incarnation=random.getrandbits(63), protocol=PROTOCOL) for role in "pd"]
    record = RequestRecord(model="served", seed=random.getrandbits(63), prompt_tokens=500, prompt_hash=1)
    record.attempts.add(attempt=1, prefill_worker=workers[0], decode_worker=workers[1], layout_hash=1)
    return record


async def register_workers(store: Store, count: int) -> None:
    handles = []
    for number in range(count):
        peer = Peer(id=f"worker-{number}", incarnation=random.getrandbits(63), protocol=PROTOCOL)
        registration = WorkerRegistration(peer=peer, address="127.0.0.1:2", model="served", layout_hash=1)
        handles.append(await store.workers.register(registration))
    print(json.dumps({"ready": 0}), flush=True)
    while True:
        await asyncio.sleep(Ttls().renew_every_s)
        for number, handle in enumerate(handles):
            await handle.renew(Load(running=number))


async def part(job: Job) -> None:
    async with Store(StoreSettings(job.url, deadline_s=10.0)) as store:
        await (Router(store, job).run() if job.number else register_workers(store, job.count))


@asynccontextmanager
async def running_part(job: Job) -> AsyncIterator[Process]:
    command = (sys.executable, "-m", "bench.store", "--part", json.dumps(asdict(job)))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert process.stdout is not None
    try:
        if not await process.stdout.readline():
            raise RuntimeError("a part ended before it was ready")
        yield process
    finally:
        await end(process)


async def sample(redis: Client, server: psutil.Process) -> dict[str, float]:
    stats = await redis.execute("INFO", "commandstats")
    memory = await redis.execute("INFO", "memory")
    clock = asyncio.get_running_loop().time()
    appended = stats.get("cmdstat_append", {"calls": 0})["calls"]
    calls = stats.get("cmdstat_evalsha", {"calls": 0})["calls"]
    return {
        "at": clock,
        "cpu": cpu_seconds(server),
        "scripts": calls,
        "writes": appended,
        "memory": memory["used_memory"],
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    from bench import machine  # it imports torch, which the parts do without

    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(PrivateRedis(port=free_port()))
        redis = Client(server.url, deadline_s=10.0, max_connections=2)
        stack.push_async_callback(redis.close)
        process = psutil.Process((await redis.execute("INFO", "server"))["process_id"])
        empty = (await sample(redis, process))["memory"]
        share = -(-args.streams // args.routers)
        sizes = [args.workers, *([share] * args.routers)]
        jobs = [Job(server.url, number, count, args.tokens, args.prompt_bytes) for number, count in enumerate(sizes)]
        parts = [await stack.enter_async_context(running_part(job)) for job in jobs]
        full = (await sample(redis, process))["memory"]
        await asyncio.sleep(args.warm)
        before = await sample(redis, process)
        clients = sum(cpu_seconds(psutil.Process(each.pid)) for each in parts)
        await asyncio.sleep(args.seconds)
        after = await sample(redis, process)
        clients = sum(cpu_seconds(psutil.Process(each.pid)) for each in parts) - clients
    seconds, cpu, scripts, writes = (after[name] - before[name] for name in ("at", "cpu", "scripts", "writes"))
    return {
        "streams": share * args.routers,
        "cores": cpu / seconds,
        "writes_per_s": writes / seconds,
        "scripts_per_s": scripts / seconds,
        "seconds_between_writes": share * args.routers * seconds / writes,
        "us_per_write": 1e6 * cpu / writes,
        "client_cores": clients / seconds,
        "bytes_per_running_request": (full - empty) / (share * args.routers),
        "machine": machine.facts(),
    }


def show(result: dict[str, Any]) -> None:
    for name, value in result.items():
        if name != "machine":
            print(f"{name:28}{value:,.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=positive, default=2000)
    parser.add_argument("--routers", type=positive, default=4)
    parser.add_argument("--workers", type=positive, default=40)
    parser.add_argument("--tokens", type=positive, default=400, help="mean tokens of an answer")
    parser.add_argument("--prompt-bytes", type=positive, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm", type=float, default=5.0, help="seconds before the measurement")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    add_json(parser)
    args = parser.parse_args()
    if args.part:
        uvloop.run(part(Job(**json.loads(args.part))))
        return
    result = asyncio.run(measure(args))
    write_result(result, args.json, lambda: show(result))


if __name__ == "__main__":
    main()
