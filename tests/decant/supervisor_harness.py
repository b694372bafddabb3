"""`decant up` with stand-ins, as a process that is forked: `python -m tests.decant.supervisor_harness JSON`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from decant.command.errors import one_line_errors
from decant.command.up.command import supervise
from decant.command.up.output import Output
from decant.command.up.peers import OF_PEERS, OF_SERVERS
from decant.command.up.plan import Plan, Spec
from tests.e2e.fork_server import Forked

PATIENCE_S = 600.0
ROOT = Path(__file__).parents[2]


def plan(
    workers: Mapping[str, str],
    routers: Mapping[str, str],
    redis_url: str,
    *,
    has_gateway: bool = False,
    **limits: float,
) -> Plan:
    def spec(name: str, does: str) -> Spec:
        arguments = ("--does", does, "--variables", *sorted(OF_PEERS | OF_SERVERS))
        return Spec(name, "tests.decant.fake_process", arguments, os.environ | {"PYTHONPATH": str(ROOT)})

    gateway = spec("openai", "")
    return Plan(
        workers=tuple(spec(*one) for one in workers.items()),
        routers=tuple(spec(*one) for one in routers.items()),
        redis_url=redis_url,
        reached_at="127.0.0.1",
        ready_seconds=limits.get("ready_seconds", PATIENCE_S),
        drain_seconds=limits.get("drain_seconds", PATIENCE_S),
        facts={},
        gateways=(replace(gateway, arguments=(*gateway.arguments, "--routers")),) if has_gateway else (),
    )


class _Process(Protocol):
    """What a test needs of a process: subprocess.Popen's methods."""

    pid: int

    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


class Up:
    def __init__(self, process: _Process, output: IO[str], errors: IO[str]) -> None:
        self.process = process
        self._output = output
        self._errors = errors
        self.lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            with self._changed:
                self.lines.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def until(self, process: str, event: str, count: int = 1, **fields: object) -> dict[str, Any]:
        """Return the `count`-th matching line; fail at the end of the output or after PATIENCE_S."""
        wanted = {"process": process, "event": event, **fields}
        ends = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                found = [line for line in self.lines if wanted.items() <= line.items()]
                if len(found) >= count:
                    return found[count - 1]
                assert self._reader.is_alive(), f"ended before {wanted}: {self.lines}"
                assert time.monotonic() < ends, f"no event with {wanted}: {self.lines}"
                self._changed.wait(1.0)

    def events(self, process: str) -> list[str]:
        return [line["event"] for line in self.lines if line["process"] == process]

    @property
    def has_output(self) -> bool:
        return self._reader.is_alive()

    def descendants(self) -> list[psutil.Process]:
        """Return the processes below this one, none after its end."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def child(self, port: int) -> psutil.Process:
        (found,) = [one for one in self.descendants() if _listens(one, port)]
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        try:
            status = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end: {self.lines}") from None
        self._reader.join(PATIENCE_S)
        return status

    def stderr(self) -> str:
        return self._errors.read()


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections()
    except psutil.NoSuchProcess:  # a test has just killed it
        return False
    return any(one.laddr.port == port for one in connections if one.status == "LISTEN")


def nothing_left(descendants: list[psutil.Process], folder: Path) -> None:
    _, alive = psutil.wait_procs(descendants, timeout=PATIENCE_S)
    assert not alive
    ends = time.monotonic() + PATIENCE_S
    while left := [*folder.iterdir(), *_processes_with(folder)]:
        assert time.monotonic() < ends, left
        time.sleep(0.02)


def _processes_with(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process)
    return found


@contextmanager
def up(folder: Path, command: Sequence[str] | StandIns, **variables: str) -> Iterator[Up]:
    """Run `decant up` with all temporary files in `folder`; kill it at the end of the block."""
    environment = os.environ | {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)} | variables
    process: _Process
    with ExitStack() as stack:
        (output, written), (errors, written_errors) = (_pipe(stack) for _ in range(2))
        with written, written_errors:
            if isinstance(command, StandIns):
                streams = written.fileno(), written_errors.fileno()
                process = Forked("tests.decant.supervisor_harness", [command.described], *streams, environment)
            else:
                process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=written, stderr=written_errors)
        try:
            yield Up(process, output, errors)
        finally:
            process.kill()
            process.wait(PATIENCE_S)


def _pipe(stack: ExitStack) -> tuple[IO[str], IO[str]]:
    reading, writing = os.pipe()
    return stack.enter_context(open(reading)), open(writing, "w")


@dataclass(frozen=True)
class StandIns:
    described: str


def stand_ins(workers: Mapping[str, str], routers: Mapping[str, str], **limits: float) -> StandIns:
    return StandIns(json.dumps({"workers": workers, "routers": routers, **limits}))


if __name__ == "__main__":
    described = json.loads(sys.argv[1])
    with one_line_errors():
        raise SystemExit(supervise(lambda url: plan(redis_url=url, **described), None, Output(sys.stdout)))
