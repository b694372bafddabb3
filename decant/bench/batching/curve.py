from __future__ import annotations

from random import Random
from statistics import median
from typing import Any

from decant.bench.batching.contenders import Setup
from decant.bench.batching.engine_run import make_engine, request, serve

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPT, OUTPUT = 64, 24
"""Tokens of each sequence."""


def kv_tokens(block_size: int) -> int:
    return max(SIZES) * (PROMPT + OUTPUT + block_size)


def measure(size: int, setup: Setup) -> dict[str, Any]:
    rng, device = Random(setup.seed), setup.device
    engine = make_engine(
        device, kv_tokens(device.block_size), max(setup.token_budget, PROMPT), size, separate_prefill=True
    )
    prompts = [[rng.randrange(device.vocab_size) for _ in range(PROMPT)] for _ in range(size)]
    requests = [request(str(index), prompt, OUTPUT) for index, prompt in enumerate(prompts)]
    trace = serve(engine, requests, [OUTPUT] * size, setup.on_tokens)
    step = median(trace.decode_steps)
    return {
        "batch_size": size,
        "tpot_ms": step * 1e3,
        "output_throughput": size / step,
        "e2el_ms": trace.seconds * 1e3,
    }
