"""A prefill worker: reads prompts, tells the first token, and gives the cache away.

It is a worker like any other, and writes whole answers where no decode worker is left. What differs is what
it is given: where nobody waits for an answer's next token, steps are longer, and fewer steps read a prompt sooner.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from decant.protos import worker_pb2 as wire
from decant.worker.main import WorkerRole
from decant.worker.main import main as run_worker
from decant.worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """How a prefill worker runs."""

    port: int = Field(default=50061, ge=0, le=65535, description="port to listen on; 0 takes a free one")


KIND = WorkerRole(wire.ROLE_PREFILL, "prefill_worker", PrefillSettings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one to its end; the process's exit status. ``arguments``: the command line's unless given."""
    return run_worker(KIND, arguments)
