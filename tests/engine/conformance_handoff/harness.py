from __future__ import annotations

from decant.engine.engine import Engine
from decant.engine.request import Request, SamplingParams
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    OutputLog,
    SequenceOutput,
    make_engine,
    make_request,
    recompute_each_step,
    run,
)

MOVED = make_request("moved", 22, 12, sampling=SamplingParams(temperature=1.0, seed=3), park_after=2, logprobs=1)
_EXPECTED: dict[str, SequenceOutput] = {}


def expected(make: MakeDevice, request: Request = MOVED) -> SequenceOutput:
    device = make()
    key = f"{device.layout_hash} {request}"
    if key not in _EXPECTED:
        _EXPECTED[key] = recompute_each_step(device, request)
    return _EXPECTED[key]


def engine_of(make: MakeDevice, num_blocks: int = 32, **limits: int) -> Engine:
    return make_engine(device=make(num_blocks), **limits)


def parked_sender(make: MakeDevice) -> tuple[Engine, OutputLog]:
    sender = engine_of(make, budget=8)
    return sender, run(sender, MOVED)


def flip_a_bit(data: bytes) -> bytes:
    return data[:7] + bytes([data[7] ^ 16]) + data[8:]
