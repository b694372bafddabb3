from __future__ import annotations

from dataclasses import replace

from decant.engine.engine import Engine
from decant.engine.request import Request, SamplingParams
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    SequenceOutput,
    make_engine,
    make_request,
    prompt,
    recompute_each_step,
)

SAMPLED = SamplingParams(temperature=1.0, seed=7)
REQUESTS = (
    make_request("short", 3),
    make_request("seeded", 30, sampling=SAMPLED),
    make_request("sibling", (*prompt(29), 5), sampling=replace(SAMPLED, top_k=20, top_p=0.9), logprobs=2),
    make_request("scored", prompt(13, 2), prompt_logprobs=2, logprobs=0),
    make_request("penalised", prompt(20, 3), sampling=SamplingParams(frequency_penalty=1.0, repetition_penalty=1.3)),
)


_EXPECTED: dict[str, SequenceOutput] = {}


def expected(make: MakeDevice, request: Request) -> SequenceOutput:
    device = make()
    key = f"{device.layout_hash} {request}"
    if key not in _EXPECTED:
        _EXPECTED[key] = recompute_each_step(device, request)
    return _EXPECTED[key]


def engine_of(make: MakeDevice, num_blocks: int = 64, **limits: int) -> Engine:
    return make_engine(device=make(num_blocks), **limits)
