"""A decode worker: receives KV caches and decodes.

It can also compute prompts, when that is faster than a handoff or there is no prefill worker. Only the defaults of its
settings differ from a prefill worker's.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from decant.protos import worker_pb2 as wire
from decant.worker.main import WorkerRole
from decant.worker.main import main as run_worker
from decant.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """How a decode worker runs."""

    port: int = Field(default=50071, ge=0, le=65535, description="port to listen on; 0 takes a free one")


KIND = WorkerRole(wire.ROLE_DECODE, "decode_worker", DecodeSettings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker; returns the exit status. ``arguments``: by default those of the command line."""
    return run_worker(KIND, arguments)
