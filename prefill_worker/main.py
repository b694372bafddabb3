"""A prefill worker, which can also decode."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from decant.protos import worker_pb2 as wire
from decant.worker.main import WorkerRole
from decant.worker.main import main as run_worker
from decant.worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    port: int = Field(default=50061, ge=0, le=65535, description="port to listen on; 0 takes a free one")


ROLE = WorkerRole(wire.ROLE_PREFILL, "prefill_worker", PrefillSettings)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_worker(ROLE, arguments)
