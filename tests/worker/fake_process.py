"""A worker's process over a torch-free engine: ``python -m tests.worker.fake_process decode --model ...``.

It exits with 3 if torch or transformers were imported, unless it is the fork of a process that has
them. With CRASH set its engine raises in the second step after the warm-up, with LOST set its load.
SLOW_LOAD and SLOW_STEP are seconds that the load and each step take, in a call that cannot be interrupted. With
GREEDY_LOAD set the load never ends, and holds the interpreter's lock for 50 ms or more at a time, as imports do.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

from decant.decode_worker.main import ROLE as DECODE
from decant.engine.errors import DeviceFailed
from decant.engine.fake import FakeDevice
from decant.engine.kv_layout import BLOCK_SIZE
from decant.engine.plan import StepPlan, StepResult
from decant.prefill_worker.main import ROLE as PREFILL
from decant.runtime.model_files import ModelFiles
from decant.runtime.telemetry import logs
from decant.worker.main import main
from decant.worker.settings import WorkerSettings


class Device(FakeDevice):
    def run(self, plan: StepPlan) -> StepResult:
        if os.environ.get("CRASH") and any(row.request.id != "warm-up" for row in plan.rows):
            raise DeviceFailed("the device is lost: simulated")
        time.sleep(float(os.environ.get("SLOW_STEP", "0")))
        return super().run(plan)


def load(settings: WorkerSettings, files: ModelFiles) -> Device:
    if slow := os.environ.get("SLOW_LOAD"):
        logs.get(__name__).info("loading slowly")
        time.sleep(float(slow))
    if lost := os.environ.get("LOST"):
        raise DeviceFailed(lost)
    while os.environ.get("GREEDY_LOAD"):
        logs.get(__name__).info("loading greedily")
        sum(range(4_000_000))
    block_size = settings.block_size or BLOCK_SIZE
    blocks = (settings.kv_bytes or 1 << 20) // (block_size * 8)
    return Device(num_blocks=blocks, block_size=block_size, vocab_size=4096, context_length=settings.context_length)


if __name__ == "__main__":
    kind = {"decode": DECODE, "prefill": PREFILL}[sys.argv[1]]
    status = main(kind, sys.argv[2:], load)
    is_forked = multiprocessing.parent_process() is not None
    sys.exit(3 if not is_forked and {"torch", "transformers"} & set(sys.modules) else status)
