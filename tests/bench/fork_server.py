"""Processes of benchmarks in forks of a process that has imported torch.

``run`` stands for ``subprocess_runner.run``, with tiny sizes, ``module_process`` for ``bench.deployment``'s.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.comparison.subprocess_runner import ChildFailed, Job, OnProgress
from bench.deployment import processes
from tests.e2e.fork_server import Forked

Run = Callable[..., dict[str, Any]]

READ_BYTES = 1 << 24
TRIES = 2

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.e2e.loaded"])


def run(module: str, job: Job, on_progress: OnProgress, python: Path | None = None) -> dict[str, Any]:
    assert python is None
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_measure, args=(module, json.dumps(asdict(job)), sender))
    process.start()
    sender.close()
    try:
        message: Mapping[str, Any] = json.loads(receiver.recv_bytes())
        while "result" not in message:
            on_progress(message["progress"])
            message = json.loads(receiver.recv_bytes())
        return dict(message["result"])
    except EOFError:
        process.join()
        raise ChildFailed(module, process.exitcode or 0, "") from None
    finally:
        receiver.close()
        process.kill()
        process.join()


def run_one_of(modules: Sequence[str], otherwise: Run, module: str, *arguments: Any) -> dict[str, Any]:
    return run(module, *arguments) if module in modules else otherwise(module, *arguments)


class _Awaitable:
    """What ``bench.deployment`` needs of an asyncio.subprocess.Process."""

    def __init__(self, process: Forked) -> None:
        self._process = process
        self.pid = process.pid
        self.send_signal = process.send_signal
        self.kill = process.kill

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)


@asynccontextmanager
async def module_process(command: Sequence[str], log: Path) -> AsyncIterator[_Awaitable]:
    with log.open("wb") as output:
        process = _Awaitable(Forked(command[0], command[1:], output.fileno(), output.fileno()))
    try:
        yield process
    finally:
        await processes.end(process)  # type: ignore[arg-type]


def _measure(module: str, job: str, channel: Connection) -> None:
    from bench import machine

    machine.TRIES = TRIES
    machine.read_bytes = lambda: READ_BYTES  # the size of a cache: tests do not compare with the machine

    def send(message: Mapping[str, Any]) -> None:
        channel.send_bytes(json.dumps(message).encode())

    result = importlib.import_module(module).measure(Job.from_json(job), lambda share: send({"progress": share}))
    send({"result": result})
