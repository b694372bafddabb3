"""KV memory lost in partly filled blocks, over random sequences in a real engine whose device computes nothing."""

from __future__ import annotations

from random import Random
from typing import Any

from bench.comparison.subprocess_runner import Job, OnProgress
from bench.scheduler_overhead import VOCABULARY, NullDevice
from decant.engine.engine import Engine
from decant.engine.kv_layout import BLOCK_SIZE
from decant.engine.request import Request, StopParams
from decant.engine.scheduler import Limits

RUNNING = 64
PROMPT = (100, 700)
OUTPUT = 100
"""Mean; one found running is halfway through an output of twice that."""

CONTEXT_LENGTH = 4096
ROUNDS = 2000


def measure(job: Job, on_progress: OnProgress) -> dict[str, Any]:
    block_size = BLOCK_SIZE
    device = NullDevice(RUNNING * CONTEXT_LENGTH // block_size, block_size)
    engine = Engine(device, Limits(RUNNING * PROMPT[1], RUNNING, CONTEXT_LENGTH))
    rng, added = Random(0), 0
    held = lost = context = sequences = 0
    for round_ in range(ROUNDS):
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < RUNNING:
            engine.add(_request(rng, added))
            added += 1
        engine.step()
        if round_ < ROUNDS // 4:
            continue
        for sequence in engine.scheduler.running:
            assert sequence.block_table is not None
            slots, used = (
                sequence.block_table.num_blocks * block_size,
                max(sequence.num_computed, sequence.request.prompt_len),
            )
            held, lost, context, sequences = held + slots, lost + slots - used, context + used, sequences + 1
        if round_ % 100 == 0:
            on_progress(round_ / ROUNDS)
    return {"lost": lost / held, "context": context / sequences, "block_size": block_size, "sequences": added}


def _request(rng: Random, number: int) -> Request:
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(*PROMPT))]
    written = min(CONTEXT_LENGTH - len(prompt), 1 + int(rng.expovariate(1 / OUTPUT)))
    return Request(f"s{number}", tuple(prompt), stop=StopParams(max_tokens=written, ignore_eos=True))
