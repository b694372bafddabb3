"""A real worker process with an engine that only takes time.

    python -m bench.deployment.fake_worker ROLE TIMES FIRST_MS STEP_MS [the worker's own command line]

Appends to the file TIMES for every computed prompt: `{"id": ..., "engine_ms": ...}`, the engine's part of the time to
first token.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from decant.decode_worker.main import ROLE as DECODE
from decant.engine.fake import FakeDevice
from decant.engine.kv_layout import BLOCK_SIZE
from decant.engine.plan import StepPlan
from decant.prefill_worker.main import ROLE as PREFILL
from decant.protos import worker_pb2 as wire
from decant.runtime.model_files import ModelFiles
from decant.worker import main as process
from decant.worker.prefill.service import PrefillService
from decant.worker.settings import WorkerSettings

KINDS = {"prefill": PREFILL, "decode": DECODE}
VOCABULARY = 4096


def main(role: str, times: str, first_ms: float, step_ms: float, arguments: list[str]) -> int:
    def cost(plan: StepPlan) -> float:
        reads = any(row.start < row.request.prompt_len for row in plan.rows)
        return (first_ms if reads else step_ms) / 1000

    def load(settings: WorkerSettings, files: ModelFiles) -> FakeDevice:
        return FakeDevice(
            num_blocks=1 << 14,
            block_size=settings.block_size or BLOCK_SIZE,
            vocab_size=VOCABULARY,
            context_length=2048,
            cost=cost,
        )

    class TimedPrefillService(PrefillService):
        async def Prefill(self, request: wire.PrefillRequest, context: Any) -> AsyncIterator[wire.PrefillEvent]:  # noqa: N802
            async for event in super().Prefill(request, context):
                if event.HasField("first"):
                    took = (event.first.queued_us + event.first.prefill_us) / 1000
                    file.write(json.dumps({"id": request.run.request, "engine_ms": took}) + "\n")
                yield event

    vars(process)["PrefillService"] = TimedPrefillService
    with open(times, "a", buffering=1, encoding="utf-8") as file:
        return process.main(KINDS[role], arguments, load)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]))
