"""Workers as processes of their own, and calls to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decant import models
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.protos.state_pb2 import WorkerRegistration
from decant.runtime.packed import pack
from decant.runtime.protocol import PROTOCOL
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store, StoreSettings
from tests.e2e.fork_server import Forked

PATIENCE_S = 300.0


ROUTER = wire.Peer(id="router", incarnation=7, protocol=PROTOCOL)


FAKE = ("tests.worker.fake_process", "decode")


MODEL = ("--model", str(models.path()))


SMALL = ("--kv-bytes", str(1 << 16))


class Process:
    """Process of a worker: an interpreter of its own if ``whole``, else a fork. Ends with the test."""

    def __init__(self, module: Sequence[str], *arguments: str, whole: bool = False, **environ: str) -> None:
        name, words = module[0], [*module[1:], "--log-format", "json", "--port", "0", *arguments]
        out, written = os.pipe()
        self._output = open(out)  # noqa: SIM115 - closed by kill
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by kill
        try:
            self.process: subprocess.Popen[bytes] | Forked
            if whole:
                command = [sys.executable, "-m", name, *words]
                self.process = subprocess.Popen(
                    command, stdout=written, stderr=self._errors, env={**os.environ, **environ}
                )
            else:
                self.process = Forked(name, words, written, self._errors.fileno(), environ)
        finally:
            os.close(written)
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

    def until(self, event: str, **fields: object) -> dict[str, Any]:
        wanted = {"event": event, **fields}

        def found() -> dict[str, Any] | None:
            return next((line for line in self.lines if wanted.items() <= line.items()), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or not self._reader.is_alive(), PATIENCE_S)
            line = found()
        assert line is not None, f"no line {wanted}: {self.lines[-5:]}"
        return line

    def ready(self) -> str:
        self.until("readiness", state="ready")
        return str(self.until("serving")["address"])

    def ended(self) -> tuple[int, str]:
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        self._errors.seek(0)
        return status, self._errors.read()

    def terminate(self) -> tuple[int, str]:
        self.process.terminate()
        return self.ended()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self._output.close()
        self._errors.close()


@contextmanager
def channel_to(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


def healthy(channel: grpc.Channel, name: str) -> bool:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def audit(channel: grpc.Channel) -> wire.AuditResponse:
    answer: wire.AuditResponse = services.AdminStub(channel).Audit(wire.AuditRequest(), timeout=PATIENCE_S)
    return answer


async def registered(redis: PrivateRedis) -> list[WorkerRegistration]:
    async with Store(StoreSettings(redis.url, deadline_s=10)) as store:
        return [present.registration for present in (await store.workers.listing()).present]


def prefill(channel: grpc.Channel, worker: wire.Peer, *, handoff: bool, model: str = "") -> Iterator[wire.PrefillEvent]:
    work = wire.EngineRequest(
        model=model or models.path().name,
        prompt=pack(range(5, 45)),
        outputs=[wire.OutputPrefix(output=0)],
        sampling=wire.Sampling(top_p=1, repetition_penalty=1),
        stopping=wire.Stopping(max_tokens=8 if handoff else 1),
    )
    run = wire.Run(request="t/r", epoch=1, attempt=1)
    request = wire.PrefillRequest(run=run, router=ROUTER, worker=worker, engine_request=work, handoff=handoff)
    events: Iterator[wire.PrefillEvent] = services.PrefillStub(channel).Prefill(request, timeout=PATIENCE_S)
    return events


def release(channel: grpc.Channel, ticket: wire.Ticket) -> None:
    abandoned = wire.ReleaseRequest.OUTCOME_ABANDONED
    services.KvSourceStub(channel).Release(
        wire.ReleaseRequest(ticket=ticket.id, run=ticket.run, outcome=abandoned), timeout=PATIENCE_S
    )
