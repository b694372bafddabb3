"""A worker's process over a torch-free engine: ``python -m tests.worker.fake_process decode --model ...``.

It ends with 3 when torch or transformers were imported all the same. With CRASH set its engine breaks in the step
after the first that somebody else than the warm-up asks for.
"""

from __future__ import annotations

import os
import sys

from decode_worker.main import KIND as DECODE
from engine.fake import FakeDevice
from engine.plan import StepPlan, StepResult
from prefill_worker.main import KIND as PREFILL
from worker.process import main
from worker.settings import WorkerSettings


class Device(FakeDevice):
    def run(self, plan: StepPlan) -> StepResult:
        if os.environ.get("CRASH") and any(row.request.id != "warm-up" for row in plan.rows):
            raise ZeroDivisionError("the device is broken")
        return super().run(plan)


def load(settings: WorkerSettings) -> Device:
    """As much of the settings as a fake device can honour."""
    blocks = settings.kv_bytes // (settings.block_size * 8)
    return Device(num_blocks=blocks, block_size=settings.block_size, vocab_size=4096, window=settings.window)


if __name__ == "__main__":
    kind = {"decode": DECODE, "prefill": PREFILL}[sys.argv[1]]
    status = main(kind, sys.argv[2:], load)
    sys.exit(3 if {"torch", "transformers"} & set(sys.modules) else status)
