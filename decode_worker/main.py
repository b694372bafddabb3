"""A decode worker, which can also compute prompts."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from decant.protos import worker_pb2 as wire
from decant.worker.main import WorkerRole
from decant.worker.main import main as run_worker
from decant.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    port: int = Field(default=50071, ge=0, le=65535, description="port to listen on; 0 takes a free one")


ROLE = WorkerRole(wire.ROLE_DECODE, "decode_worker", DecodeSettings)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_worker(ROLE, arguments)
