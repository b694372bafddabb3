"""A decode worker: takes caches over and writes answers.

It is a worker like any other, and reads prompts itself where that is shorter than moving a cache, or where no prefill
worker is left. What differs is what it is given: beside answers steps are short, so that a prompt that is read here
never keeps them waiting for long.
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
    """Runs one to its end; the process's exit status. ``arguments``: the command line's unless given."""
    return run_worker(KIND, arguments)
