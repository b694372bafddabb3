"""The service with a real model."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import psutil

from bench.comparison.subprocess_runner import Job
from bench.deployment.cpu_use import CpuUse, sampled
from bench.deployment.processes import READY_SECONDS, module_process, registered, router_address, serving
from bench.deployment.replay import Replay
from bench.workloads import Item
from decant.state.client import Client
from decant.state.private_redis import PrivateRedis

PARTS = ("client", "router", "worker", "redis")


MAX_RUNNING = 256

T = TypeVar("T")


class LoadFailed(RuntimeError):
    pass


@asynccontextmanager
async def service(job: Job, folder: Path) -> AsyncIterator[Service]:
    """Run the service while entered. Raises LoadFailed, TimeoutError."""
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(PrivateRedis())
        client = Client(redis.url, deadline_s=10.0, max_connections=2)
        stack.push_async_callback(client.close)
        processes = {"redis": psutil.Process((await client.execute("INFO", "server"))["process_id"])}
        shared = ["--port", "0", "--redis-url", redis.url]
        worker = ["decant.decode_worker", "--model", job.model, "--dtype", job.dtype, "--threads", str(job.threads)]
        worker += ["--token-budget", str(job.token_budget), "--kv-bytes", str(job.kv_bytes), *shared]
        worker += ["--max-running", str(min(MAX_RUNNING, job.token_budget))]
        async with asyncio.timeout(READY_SECONDS):
            log = folder / "worker.log"
            started = await stack.enter_async_context(module_process(worker, log))
            processes["worker"] = psutil.Process(started.pid)
            await _while_running(registered(redis.url, 1), started, log)
            command, log = ["decant.router", "--models", job.model, *shared], folder / "router.log"
            started = await stack.enter_async_context(module_process(command, log))
            processes["router"] = psutil.Process(started.pid)
            address = await _while_running(router_address(redis.url), started, log)
            await _while_running(serving(address), started, log)
        yield Service(address, processes, folder)


class Service:
    def __init__(self, address: str, processes: dict[str, psutil.Process], folder: Path) -> None:
        self._address = address
        self._processes = processes
        self._folder = folder

    async def serve(self, items: Sequence[Item], profile: Path | None = None) -> dict[str, Any]:
        """Send the requests; ``profile`` is a folder for py-spy's samples. Raises LoadFailed."""
        errors = self._folder / "client.log"
        with errors.open("wb") as output:
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.deployment.replay", stdin=PIPE, stdout=PIPE, stderr=output, limit=1 << 26
            )
        try:
            await _write(client, json.dumps(asdict(Replay(self._address, items))))
            pid = (await self._read(client))["ready"]
            processes = {"client": psutil.Process(pid), **self._processes}
            watched = {name: one for name, one in processes.items() if name != "redis"}
            async with nullcontext() if profile is None else sampled(watched, profile):
                before = {name: CpuUse.of(one) for name, one in processes.items()}
                await _write(client, "go")
                served = (await self._read(client))["served"]
                spent = {name: asdict(CpuUse.of(one).since(before[name])) for name, one in processes.items()}
        finally:
            if client.returncode is None:
                client.kill()
            await client.wait()
        return {"served": served, "cpu": spent}

    async def _read(self, client: Process) -> dict[str, Any]:
        assert client.stdout is not None
        line = await client.stdout.readline()
        if not line:
            raise _failure(self._folder / "client.log")
        message: dict[str, Any] = json.loads(line)
        return message


async def _while_running(waiting: Coroutine[Any, Any, T], process: Process, log: Path) -> T:
    ready, ended = asyncio.create_task(waiting), asyncio.create_task(process.wait())
    try:
        await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise _failure(log)
        return ready.result()
    finally:
        ready.cancel()
        ended.cancel()
        await asyncio.wait([ready, ended])


def _failure(log: Path) -> LoadFailed:
    return LoadFailed(f"the {log.stem} ended early:\n{log.read_text()[-2000:]}")


async def _write(client: Process, line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line.encode() + b"\n")
    await client.stdin.drain()
