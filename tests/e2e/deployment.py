"""A deployment of real processes: a private Redis, routers and workers, with logs that tests can wait on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self
from weakref import WeakSet

import grpc

from decant import models
from decant.protos import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from decant.state.private_redis import PrivateRedis
from tests.e2e.fork_server import Forked
from tests.e2e.proxy import Proxy
from tests.ports import kept

PATIENCE_S = 300.0
"""Deadline of whatever a busy machine does slowly."""

SMALL_KV = ("--kv-bytes", str(32 << 20))
ON_A_BUSY_MACHINE = ("--threads", "1", "--lease-ms", "60000")
"""Of a worker: no lease ends because a process of the test waits for its turn on the CPU."""

STARTED: WeakSet[Process] = WeakSet()
"""The processes that something still refers to, as the traceback of a failed test does."""


ROUTER_ON_A_BUSY_MACHINE = ("--stream-keepalive-seconds", "60")
"""Of a router: an answer that waits for the CPU is the same messages as one that does not."""


class Process:
    """A process of this checkout, forked; with ``python``, of the version installed there, started."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        common: Sequence[str] = ("--log-format", "json"),
        python: Path | None = None,
    ) -> None:
        self.module = module
        self.lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._asked = False
        self._is_excused = False
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end
        out, written = os.pipe()
        self._output = open(out, "rb")  # noqa: SIM115 - closed by end
        try:
            words, errors = (*common, *arguments), self._errors.fileno()
            if python is None:
                self._process: Forked | subprocess.Popen[bytes] = Forked(f"decant.{module}", words, written, errors)
            else:
                command = [str(python), "-P", "-m", f"decant.{module}", *words]
                self._process = subprocess.Popen(command, stdout=written, stderr=errors)
        finally:
            os.close(written)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        STARTED.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def until(self, event: str, **fields: object) -> dict[str, Any]:
        """Return the first line with this event and these fields; fail at the process's end or after PATIENCE_S."""
        wanted = {"event": event, **fields}
        ends = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                for line in self.lines:
                    if wanted.items() <= line.items():
                        return line
                alive = self._reader.is_alive()
                if not alive or not self._changed.wait(min(1.0, max(0.0, ends - time.monotonic()))):
                    assert alive, f"{self.module} ended before {wanted}: {self.log_tail()}"
                    assert time.monotonic() < ends, f"{self.module} never logged {wanted}: {self.log_tail()}"

    def warnings(self, most: int = 60) -> str:
        """The last lines above level info, and the very last ones of any level."""
        severe = [line for line in self.lines[:-10] if line.get("level") not in ("info", "debug")]
        return "\n".join(json.dumps(line) for line in [*severe[-most:], *self.lines[-10:]])

    def log_tail(self) -> str:
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")[-3000:]
        return "\n".join([*(json.dumps(line) for line in self.lines[-20:]), errors])

    def kill(self) -> None:
        self._is_excused = True
        os.kill(self.pid, signal.SIGKILL)

    def ask_to_end(self, *, excused: bool = False) -> None:
        """Send SIGTERM once. If `excused`, the exit status may be other than 0."""
        self._is_excused |= excused
        if not self._asked and self._process.poll() is None:
            self._asked = True
            self._process.terminate()

    def end(self) -> int:
        """Send SIGTERM and return the exit status. After PATIENCE_S, send SIGKILL and fail."""
        self.ask_to_end()
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"{self.module} did not end: {self.log_tail()}") from None
        finally:
            self._reader.join(PATIENCE_S)
            self._output.close()
            self._errors.close()

    def _read(self) -> None:
        for raw in self._output:
            try:
                line = json.loads(raw)
            except ValueError:
                line = {"event": raw.decode(errors="replace").rstrip()}
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        status = self.end()
        assert kind or status == 0 or self._is_excused, f"{self.module} ended with {status}"


@dataclass
class Worker:
    process: Process
    address: str = ""

    def audit(self) -> worker_pb2.AuditResponse:
        with grpc.insecure_channel(self.address) as channel:
            stub = worker_pb2_grpc.AdminStub(channel)
            answer: worker_pb2.AuditResponse = stub.Audit(worker_pb2.AuditRequest(), timeout=PATIENCE_S)
            return answer

    def release(self, leases: Iterable[worker_pb2.AuditResponse.Lease]) -> None:
        abandoned = worker_pb2.ReleaseRequest.OUTCOME_ABANDONED
        with grpc.insecure_channel(self.address) as channel:
            stub = worker_pb2_grpc.KvSourceStub(channel)
            for lease in leases:
                request = worker_pb2.ReleaseRequest(ticket=lease.ticket, run=lease.run, outcome=abandoned)
                stub.Release(request, timeout=PATIENCE_S)


@dataclass
class Deployment:
    redis: PrivateRedis
    routers: list[Process] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.addresses[0]

    @contextmanager
    def stub(self) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
        with grpc.insecure_channel(self.address) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)

    def settled(self) -> list[worker_pb2.AuditResponse]:
        """Return audits of all workers, none with violations, once no block is held.

        Releases the tickets that nothing fetches any more, whose leases are long so that none ends before it is used.
        """
        ends = time.monotonic() + PATIENCE_S
        while True:
            audits = [worker.audit() for worker in self.workers]
            for audit in audits:
                assert not audit.violations, list(audit.violations)
                parts = audit.free_blocks + audit.cached_blocks + audit.owned_blocks + audit.leased_blocks
                assert parts == audit.total_blocks, audit
            busy = [
                audit
                for audit in audits
                if audit.owned_blocks or audit.leased_blocks or audit.owners or audit.leases or audit.fetches
            ]
            if not busy:
                return audits
            assert time.monotonic() < ends, busy
            if not any(audit.owners for audit in audits):
                for worker, audit in zip(self.workers, audits, strict=True):
                    worker.release(audit.leases)
            time.sleep(0.05)


@contextmanager
def deployment(
    *,
    prefill: int = 1,
    decode: int = 1,
    routers: int = 1,
    dtype: str = "float32",
    model: str = str(models.path()),
    router: Sequence[str] = (),
    handoff_min_tokens: int | None = 0,
    worker: Sequence[str] = SMALL_KV,
    prefill_worker: Sequence[str] = (),
    redis: PrivateRedis | None = None,
    between: Sequence[Proxy] = (),
    another: str = "",
) -> Iterator[Deployment]:
    """Start a deployment and wait until it is ready; its processes end with it and must exit with 0.

    `handoff_min_tokens`: 0 hands over every prompt if both pools exist, None as measured. `redis`: one that a test
    stops and starts. `prefill_worker`: further arguments of prefill workers. `between`: in front of the first workers,
    prefill workers first. `another`: a second model, ID=FOLDER, on a decode worker of its own.
    """
    with ExitStack() as stack:
        made = Deployment(stack.enter_context(redis or PrivateRedis()))
        common = ("--port", "0", "--admin-port", "0", "--redis-url", made.redis.url)
        for index in range(prefill + decode):
            module = "prefill_worker" if index < prefill else "decode_worker"
            reached = ("--advertise", between[index].address) if index < len(between) else ()
            arguments = (*common, *ON_A_BUSY_MACHINE, "--model", model, "--dtype", dtype, *worker, *reached)
            if index < prefill:
                arguments += tuple(prefill_worker)
            made.workers.append(Worker(stack.enter_context(Process(module, *arguments))))
        if another:
            id, _, folder = another.partition("=")
            arguments = (*common, *ON_A_BUSY_MACHINE, "--model", folder, "--model-id", id, "--dtype", dtype, *worker)
            made.workers.append(Worker(stack.enter_context(Process("decode_worker", *arguments))))
        for one in made.workers:
            one.address = one.process.until("serving")["address"]
            one.process.until("readiness", state="ready")
        for between_, one in zip(between, made.workers, strict=False):
            between_.target = one.address
        threshold = () if handoff_min_tokens is None else ("--handoff-min-tokens", str(handoff_min_tokens))
        served = ",".join([model, another] if another else [model])
        for _ in range(routers):
            arguments = (*common, *ROUTER_ON_A_BUSY_MACHINE, "--reuse-port", "--models", served, *threshold, *router)
            made.routers.append(stack.enter_context(Process("router", *arguments)))
        for routing in made.routers:
            made.addresses.append(routing.until("serving")["address"])
            stack.enter_context(kept(made.addresses[-1]))
            routing.until("readiness", state="ready")
        yield made
        for routing in made.routers:
            routing.end()
        for one in made.workers:  # all at once: an interpreter with torch takes its time to end
            one.process.ask_to_end()
