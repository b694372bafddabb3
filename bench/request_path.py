"""The functions that one streamed request enters, in the order of their first calls.

    python -m bench.request_path [--json OUT]

Client, router, prefill worker and decode worker run in this process, with engines without torch; a Redis runs beside
it. A request before fills what is made once. What runs too while no request is open is left out, and so are lambdas
and comprehensions.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType

import structlog

from bench.options import add_json, write_result
from decant import models
from decant.client import Client
from decant.decode_worker.main import ROLE as DECODE
from decant.engine.fake import FakeDevice
from decant.engine.kv_layout import BLOCK_SIZE
from decant.prefill_worker.main import ROLE as PREFILL
from decant.router.api import auth
from decant.router.main import RouterProcess
from decant.router.settings import RouterSettings
from decant.router.text import served_model
from decant.runtime.model_files import ModelFiles
from decant.runtime.serving.health import Readiness
from decant.runtime.serving.server import Server, Service
from decant.runtime.serving.server_settings import ServerSettings
from decant.runtime.telemetry.metrics import Registry
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store, StoreSettings
from decant.worker.main import Worker, WorkerRole
from decant.worker.settings import WorkerSettings

MODEL = "m"
PROMPT = "Once upon a time there was a little bird who wanted to fly over the sea. " * 4
TOKENS = 12
IDLE_SECONDS = 3.0
"""Longer than any interval of a process's own work."""
LATE_SECONDS = 1.0
"""Time for what follows an answer: its last write and the end of its run."""

PRODUCT = ("decant/", "engine/", "handoff/", "router/", "runtime/", "state/", "worker/")

Function = tuple[str, str]
"""File, and qualified name."""


class CallRecorder:
    """Recorder of the functions that are called in all threads while it is on, in order."""

    def __init__(self) -> None:
        self._root = Path(models.__file__).resolve().parents[1]
        self._files: dict[str, str | None] = {}
        self._calls: dict[Function, None] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        before, before_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before_threads)

    @contextmanager
    def record(self) -> Iterator[dict[Function, None]]:
        self._calls = calls = dict[Function, None]()
        try:
            yield calls
        finally:
            self._calls = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self._calls is None or event != "call":
            return
        code = frame.f_code
        file = self._file(code.co_filename)
        if file is not None and not code.co_name.startswith("<"):
            self._calls[file, code.co_qualname] = None

    def _file(self, name: str) -> str | None:
        """Return a product file's path in the repository; None for another file."""
        if name not in self._files:
            path = Path(name).resolve()
            relative = path.relative_to(self._root).as_posix() if path.is_relative_to(self._root) else ""
            is_product = relative.startswith(PRODUCT) and not name.startswith("<")
            self._files[name] = relative if is_product else None
        return self._files[name]


def _device(settings: WorkerSettings, _: ModelFiles) -> FakeDevice:
    size = settings.block_size or BLOCK_SIZE
    return FakeDevice(num_blocks=1 << 10, block_size=size, vocab_size=4096, context_length=2048)


@asynccontextmanager
async def _served(
    services: Sequence[Service],
    settings: ServerSettings,
    parts: tuple[Readiness, Registry],
    warm_up: Callable[[Server], Awaitable[None]],
) -> AsyncIterator[str]:
    server = Server(services, settings, *parts)
    await server.start()
    running = asyncio.create_task(server.run())
    try:
        await warm_up(server)
        yield server.address
    finally:
        server.shutdown.request("the request was recorded")
        await asyncio.wait([running])


@asynccontextmanager
async def _worker(role: WorkerRole, url: str) -> AsyncIterator[None]:
    folder = str(models.path())
    settings = role.settings(model=folder, model_id=MODEL, id=role.program, port=0, redis_url=url)
    async with AsyncExitStack() as stack:
        worker = Worker(settings, role.role, _device, stack)
        parts = worker.readiness, worker.registry
        async with _served(worker.services(), settings, parts, worker.warm_up):
            yield


@asynccontextmanager
async def _router(url: str) -> AsyncIterator[str]:
    settings = RouterSettings(models=f"{MODEL}={models.path()}", port=0, redis_url=url, handoff_min_tokens=0)  # type: ignore[arg-type]
    served = served_model.load(settings.models, settings.add_bos)
    async with Store(StoreSettings(url)) as store, AsyncExitStack() as stack:
        process = RouterProcess(settings, served, auth.load(settings.credentials, served), store)
        stack.push_async_callback(process.close)
        parts = process.readiness, process.registry
        async with _served(process.services, settings, parts, process.start) as address:
            yield address


def _stream(address: str) -> str:
    with Client(address) as client:
        return "".join(delta.text for delta in client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True))


async def record_path(idle_s: float = IDLE_SECONDS, late_s: float = LATE_SECONDS) -> list[Function]:
    recorder = CallRecorder()
    with recorder.installed():
        async with (
            PrivateRedis() as redis,
            _worker(PREFILL, redis.url),
            _worker(DECODE, redis.url),
            _router(redis.url) as address,
        ):
            await asyncio.to_thread(_stream, address)
            await asyncio.sleep(late_s)
            with recorder.record() as idle:
                await asyncio.sleep(idle_s)
            with recorder.record() as calls:
                await asyncio.to_thread(_stream, address)
                await asyncio.sleep(late_s)
    return [function for function in calls if function not in idle]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    out = parser.parse_args().json
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    path = asyncio.run(record_path())

    def show() -> None:
        last = ""
        for file, name in path:
            print(f"{file if file != last else '':48} {name}")
            last = file
        print(f"{len(path)} functions in {len({file for file, _ in path})} files")

    write_result([{"file": file, "function": name} for file, name in path], out, show)


if __name__ == "__main__":
    main()
