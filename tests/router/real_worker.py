"""A worker's process over the engine's fake device: ``python -m tests.router.real_worker prefill|decode ...``. Its
steps take STEP_SECONDS.
"""

from __future__ import annotations

import sys

from decant.decode_worker.main import ROLE as DECODE
from decant.engine.fake import FakeDevice
from decant.engine.plan import StepPlan
from decant.prefill_worker.main import ROLE as PREFILL
from decant.runtime.model_files import ModelFiles
from decant.worker.main import main
from decant.worker.settings import WorkerSettings

STEP_SECONDS = 0.02


def _device(_: WorkerSettings, __: ModelFiles) -> FakeDevice:
    def cost(_: StepPlan) -> float:
        return STEP_SECONDS

    return FakeDevice(num_blocks=512, block_size=16, vocab_size=512, context_length=512, cost=cost)


if __name__ == "__main__":
    kind = {"prefill": PREFILL, "decode": DECODE}[sys.argv[1]]
    raise SystemExit(main(kind, sys.argv[2:], _device))
