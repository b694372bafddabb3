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

from decant.command.deployment import processes
from decant.command.up.output import Output
from decant.command.up.plan import Spec

_EXEC_CHILD = Path(__file__).with_name("exec_child.py")
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20
_RECENT_LINES = 20  # lines
_REST_SECONDS = 2.0  # for the rest of its output, once it has ended


class Child:
    def __init__(
        self, spec: Spec, process: asyncio.subprocess.Process, output: Output, on_change: Callable[[], None]
    ) -> None:
        self.spec = spec
        self.pid = process.pid
        self.address: str | None = None
        """None until it listens."""
        self.process = processes.Process(process.pid)
        self._admin_port: int | None = None
        self._subprocess = process
        self._output = output
        self._on_change = on_change
        self._ready = asyncio.Event()
        self._unstructured: deque[str] = deque(maxlen=_RECENT_LINES)
        self._reading = asyncio.create_task(self._read())
        self._ending = asyncio.create_task(self._end())

    @classmethod
    async def start(cls, spec: Spec, output: Output, on_change: Callable[[], None] = lambda: None) -> Child:
        """Start a process in a group of its own: Ctrl-C is for `up`. `on_change` is called after each change of state
        or address.
        """
        options = (str(os.getpid()), ",".join(map(str, spec.cores)), str(spec.niceness))
        exec_child = (sys.executable, "-I", "-S", str(_EXEC_CHILD), *options)
        process = await asyncio.create_subprocess_exec(
            *exec_child,
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
    def recent_output(self) -> str:
        """Last lines that are no log events, such as the reason of a failed start."""
        return "\n".join(self._unstructured)

    async def ready(self) -> bool:
        """Wait until the process is ready or has ended; return whether it is ready."""
        being_ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait([being_ready, self._ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            being_ready.cancel()
        return self.is_ready

    async def ended(self) -> int:
        """Wait for the end and all output; return the exit status, negative for a signal."""
        return await asyncio.shield(self._ending)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._subprocess.send_signal(number)

    async def _end(self) -> int:
        status = await self._subprocess.wait()
        await asyncio.wait([self._reading], timeout=_REST_SECONDS)
        self._reading.cancel()
        self._admin_port = None
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
                port = fields.get("admin_port")
                self._admin_port = port if isinstance(port, int) else None
                self._become(self.process.state)
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
        self.process = processes.Process(self.pid, state, percent, lost_at, self._admin_port)
        self._on_change()

    async def _lines(self) -> AsyncIterator[str]:
        """Yield lines, an endless one in parts: a process never blocks on output."""
        assert self._subprocess.stdout is not None
        rest = b""
        while chunk := await self._subprocess.stdout.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                yield line.decode(errors="replace").rstrip("\r")
        if rest:
            yield rest.decode(errors="replace")
