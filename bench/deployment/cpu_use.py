from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.deployment.processes import end

RATE = 200
"""Requests per second."""
END_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class CpuUse:
    user: float
    system: float
    main_thread: float
    switches: int

    @classmethod
    def of(cls, process: psutil.Process) -> CpuUse:
        with process.oneshot():
            times = process.cpu_times()
            main = sum(one.user_time + one.system_time for one in process.threads() if one.id == process.pid)
        return cls(times.user, times.system, main, _switches(process.pid))

    @property
    def seconds(self) -> float:
        return self.user + self.system

    def since(self, before: CpuUse) -> CpuUse:
        then, now = asdict(before), asdict(self)
        return CpuUse(**{name: value - then[name] for name, value in now.items()})


def _switches(pid: int) -> int:
    count = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            lines = (task / "status").read_text().splitlines()
            count += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return count


def profiler() -> str:
    """Find py-spy. Raises FileNotFoundError."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.is_file() else shutil.which("py-spy")
    if found is None:
        raise FileNotFoundError("--profile needs py-spy: pip install py-spy")
    return found


@asynccontextmanager
async def sampled(processes: Mapping[str, psutil.Process], folder: Path) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for name, process in processes.items():
            await stack.enter_async_context(_sampled(process.pid, folder / f"{name}.txt"))
        yield


@asynccontextmanager
async def _sampled(pid: int, out: Path) -> AsyncIterator[None]:
    command = ("record", "--pid", str(pid), "--rate", str(RATE), "--format", "raw", "--threads", "--output", str(out))
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(profiler(), *command, "--nonblocking", stdout=null, stderr=null)
    try:
        yield
    finally:
        await end(process, signal.SIGINT, END_SECONDS)


def hottest(samples: Path, count: int = 15) -> list[dict[str, Any]]:
    own, within, total = Counter[str](), Counter[str](), 0
    for line in samples.read_text().splitlines():
        stack, _, number = line.rpartition(" ")
        functions = [_function(frame) for frame in stack.split(";")]
        total += int(number)
        own[functions[-1]] += int(number)
        within.update(dict.fromkeys(functions, int(number)))
    return [
        {"function": name, "own": samples / total, "within": within[name] / total}
        for name, samples in own.most_common(count)
    ]


def _function(frame: str) -> str:
    return frame.rpartition(":")[0] + ")" if ":" in frame and frame.endswith(")") else frame
