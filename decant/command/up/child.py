"""One process of the deployment: its start, what it says, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from decant.command import processes
from decant.command.up.output import Output
from decant.command.up.plan import Spec

_LIFELINE = Path(__file__).with_name("exec_child.py")
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20
_LAST_WORDS = 20  # lines
_REST_SECONDS = 2.0  # for what it wrote last, once it has ended


class Child:
    """A running process. What it logs says when it listens, how it loads, and when it is ready."""

    def __init__(
        self, spec: Spec, process: asyncio.subprocess.Process, output: Output, on_change: Callable[[], None]
    ) -> None:
        """For `start`."""
        self.spec = spec
        self.pid = process.pid
        self.address: str | None = None
        """Where it listens, once it does."""
        self.seen = processes.Process(process.pid)
        """How it stands."""
        self._process = process
        self._output = output
        self._on_change = on_change
        self._ready = asyncio.Event()
        self._unstructured: deque[str] = deque(maxlen=_LAST_WORDS)
        self._reading = asyncio.create_task(self._read())
        self._ending = asyncio.create_task(self._end())

    @classmethod
    async def start(cls, spec: Spec, output: Output, on_change: Callable[[], None] = lambda: None) -> Child:
        """In a process group of its own: a terminal's Ctrl-C is for `up`, which ends the others in order. `on_change`
        is called when its state or its address changes."""
        lifeline = (sys.executable, "-I", "-S", str(_LIFELINE), str(os.getpid()), ",".join(map(str, spec.cores)))
        process = await asyncio.create_subprocess_exec(
            *lifeline,
            *spec.command,
            env=dict(spec.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,
        )
        return cls(spec, process, output, on_change)

    @property
    def running(self) -> bool:
        return not self._ending.done()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    @property
    def last_words(self) -> str:
        """What it said outside its log, the end of it: why it could not start."""
        return "\n".join(self._unstructured)

    async def ready(self) -> bool:
        """Waits until it is ready or has ended; returns whether it is ready."""
        being_ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait([being_ready, self._ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            being_ready.cancel()
        return self.is_ready

    async def ended(self) -> int:
        """Waits until it has ended and all that it said was read; returns its exit status, negative for a signal."""
        return await asyncio.shield(self._ending)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _end(self) -> int:
        status = await self._process.wait()
        await asyncio.wait([self._reading], timeout=_REST_SECONDS)
        self._reading.cancel()
        self._become(processes.LOST, lost_at=time.time())
        return status

    async def _read(self) -> None:
        async for line in self._lines():
            fields = self._output.line(self.spec.name, line)
            if fields.keys() == {"event"}:
                self._unstructured.append(line)
            else:
                self._follow(fields)

    def _follow(self, fields: Mapping[str, Any]) -> None:
        match fields.get("event"), fields.get("state"):
            case "serving", _:
                self.address = str(fields.get("address"))
                self._on_change()
            case "loading steps", _:
                self._become(processes.LOADING, percent=int(fields.get("percent", 0)))
            case "loaded", _:
                self._become(processes.WARMING_UP)
            case "readiness", "ready":
                self._ready.set()
                self._become(processes.READY)
            case "readiness", "draining":
                self._become(processes.DRAINING)

    def _become(self, state: str, *, percent: int | None = None, lost_at: float | None = None) -> None:
        self.seen = processes.Process(self.pid, state, percent, lost_at)
        self._on_change()

    async def _lines(self) -> AsyncIterator[str]:
        """Whole lines; one without an end is cut, so that a process is never held up by what it says."""
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                yield line.decode(errors="replace").rstrip("\r")
        if rest:
            yield rest.decode(errors="replace")
