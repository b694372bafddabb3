"""A real worker process with an engine that only takes time, as much as its tokens and sequences need.

python -m bench.deployment.sized_worker ROLE [the worker's own command line]
"""

from __future__ import annotations

import sys

from bench.deployment.fake_worker import KINDS, VOCABULARY
from decant.engine.fake import FakeDevice
from decant.engine.kv_layout import BLOCK_SIZE
from decant.engine.plan import StepPlan
from decant.runtime.model_files import ModelFiles
from decant.worker import main as process
from decant.worker.settings import WorkerSettings

STEP_S = 0.02
STEP_S_PER_SEQUENCE = 0.001
PROMPT_TOKEN_S = 0.0005


def cost(plan: StepPlan) -> float:
    """Seconds of a step: a fixed part, and one for each prompt token and each sequence that decodes."""
    prompts = sum(min(row.end, row.request.prompt_len) - min(row.start, row.request.prompt_len) for row in plan.rows)
    decodes = sum(row.start >= row.request.prompt_len for row in plan.rows)
    return (STEP_S if decodes else 0.0) + STEP_S_PER_SEQUENCE * decodes + PROMPT_TOKEN_S * prompts


def load(settings: WorkerSettings, files: ModelFiles) -> FakeDevice:
    block_size = settings.block_size or BLOCK_SIZE
    return FakeDevice(num_blocks=1 << 13, block_size=block_size, vocab_size=VOCABULARY, context_length=2048, cost=cost)


if __name__ == "__main__":
    raise SystemExit(process.main(KINDS[sys.argv[1]], sys.argv[2:], load))
