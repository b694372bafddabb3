"""A deployment to measure: each part a process, with engines of known times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decant import models
from decant.runtime.grpc_options import NO_PROXY
from decant.state.client import Client
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store, StoreSettings

READY_SECONDS = 120.0
END_SECONDS = 10.0
MODEL = "m"
ROLES = ("prefill", "decode")
_COUNT_SCRIPTS = "return {redis.call('INFO', 'commandstats'), redis.call('TIME')}"
_SCHEDULED = 2
"""The kind of clock of a process that counts the time for which it ran, as in clock_getcpuclockid(3)."""


@dataclass(frozen=True)
class Speed:
    first_ms: float = 20.0
    step_ms: float = 10.0


class Deployment:
    def __init__(
        self, address: str, bare: str, folder: Path, processes: dict[str, psutil.Process], redis: Client
    ) -> None:
        self.address = address
        self.bare = bare
        self._folder = folder
        self._processes = processes
        self._redis = redis

    def cpu(self) -> dict[str, float]:
        return {name: cpu_seconds(process) for name, process in self._processes.items()}

    async def scripts(self) -> tuple[int, float]:
        """Number of scripts that Redis has run, one per write of a router, and its time in seconds then."""
        stats, (seconds, micros) = await self._redis.execute("EVAL", _COUNT_SCRIPTS, 0)
        found = re.search(rb"cmdstat_evalsha:calls=(\d+)", stats)
        return int(found[1]) if found else 0, int(seconds) + int(micros) / 1e6

    def engine_ms(self) -> dict[str, float]:
        lines = (self._folder / "prefill.times").read_text().splitlines()
        times = [json.loads(line) for line in lines]
        return {one["id"].partition("/")[2]: one["engine_ms"] for one in times}


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds; on Linux by the process's clock, as those of /proc have ticks of 10 ms."""
    if sys.platform != "linux":
        times = process.cpu_times()
        return float(times.user + times.system)
    return time.clock_gettime(~process.pid << 3 | _SCHEDULED)


@asynccontextmanager
async def deployment(speed: Speed, folder: Path) -> AsyncIterator[Deployment]:
    """Run a deployment while entered. Raises TimeoutError; the logs in ``folder`` have the reason."""
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(PrivateRedis())
        client = Client(redis.url, deadline_s=10.0, max_connections=2)
        stack.push_async_callback(client.close)
        processes = {"redis": psutil.Process((await client.execute("INFO", "server"))["process_id"])}
        shared = ["--redis-url", redis.url]
        for role in ROLES:
            fake = [str(folder / f"{role}.times"), str(speed.first_ms), str(speed.step_ms)]
            model = ["--model", str(models.path()), "--model-id", MODEL, "--id", role, "--port", "0"]
            command = ["bench.deployment.fake_worker", role, *fake, *model, *shared]
            started = await stack.enter_async_context(module_process(command, folder / f"{role}.log"))
            processes[role] = psutil.Process(started.pid)
        command = ["bench.deployment.grpc_baseline", str(speed.first_ms), str(speed.step_ms)]
        baseline = await stack.enter_async_context(module_process(command, folder / "bare.log", stdout=PIPE))
        processes["bare"] = psutil.Process(baseline.pid)
        async with asyncio.timeout(READY_SECONDS):
            await registered(redis.url, len(ROLES))
            command = ["router", "--models", f"{MODEL}={models.path()}", "--port", "0", *shared]
            command += ["--handoff-min-tokens", "0"]  # every prompt uses the handoff
            started = await stack.enter_async_context(module_process(command, folder / "router.log"))
            processes["router"] = psutil.Process(started.pid)
            address = await router_address(redis.url)
            await serving(address)
            bare = f"127.0.0.1:{await _printed_port(baseline)}"
        yield Deployment(address, bare, folder, processes, client)


@asynccontextmanager
async def module_process(command: Sequence[str], log: Path, stdout: int | None = None) -> AsyncIterator[Process]:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, stdout=stdout or output, stderr=output
        )
    try:
        yield process
    finally:
        await end(process)


async def end(process: Process, by: int = signal.SIGTERM, timeout_s: float = END_SECONDS) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(by)
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def registered(url: str, workers: int) -> None:
    async with Store(StoreSettings(url)) as store:
        listing = await store.workers.listing()
        while len(listing.present) < workers:
            listing = await store.workers.wait_for_change(listing, READY_SECONDS)


async def router_address(url: str) -> str:
    async with Store(StoreSettings(url)) as store:
        listing = await store.routers.listing()
        while not listing.present:
            listing = await store.routers.wait_for_change(listing, READY_SECONDS)
        return listing.present[0].registration.address


async def _printed_port(process: Process) -> int:
    assert process.stdout
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("bench.deployment.grpc_baseline ended before it served")
    return int(line)


async def serving(address: str) -> None:
    async with grpc.aio.insecure_channel(address, NO_PROXY) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
