from __future__ import annotations

from dataclasses import replace

import pytest

from decant.engine.request import FinishReason, StopParams
from tests.engine.conformance.harness import REQUESTS, engine_of, expected
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    run,
)
from tests.engine.properties import nothing_is_held, same_output_as_alone


@pytest.mark.parametrize(("budget", "max_running"), [(1, 1), (7, 4), (64, 8), (4096, 8)])
def test_output_depends_on_neither_batch_nor_chunks(make: MakeDevice, budget: int, max_running: int) -> None:
    engine = engine_of(make, budget=budget, max_running=max_running)
    log = run(engine, *REQUESTS)
    for request in REQUESTS:
        same_output_as_alone(log[request.id], expected(make, request))
    nothing_is_held(engine)


def test_output_does_not_depend_on_prefix_hits(make: MakeDevice) -> None:
    engine = engine_of(make)
    for round in range(2):
        for request in REQUESTS:
            engine.add(request)
            first = engine.step().num_tokens
            engine.cancel(request.id)
            engine.step()
            log = run(engine, request)
            same_output_as_alone(log[request.id], expected(make, request))
            hit = round and request.prompt_logprobs is None and request.prompt_len > engine.pool.block_size
            assert first < request.prompt_len if hit else first <= request.prompt_len


def test_output_does_not_depend_on_preemption(make: MakeDevice) -> None:
    requests = [replace(request, stop=StopParams(max_tokens=16)) for request in REQUESTS if request.prompt_len < 29]
    engine = engine_of(make, num_blocks=12, budget=16)
    log = run(engine, *requests)
    assert engine.load().preemptions
    for request in requests:
        same_output_as_alone(log[request.id], expected(make, request))
    nothing_is_held(engine)


def test_output_does_not_depend_on_cancelled_sequences(make: MakeDevice) -> None:
    engine = engine_of(make, budget=16)
    log = run(engine, *REQUESTS, steps=3)
    for id in ("seeded", "scored"):
        assert engine.cancel(id)
    run(engine, log=log)
    for request in REQUESTS:
        same_output_as_alone(log[request.id], expected(make, request))
    assert {log[id].reason for id in ("seeded", "scored")} == {FinishReason.CANCELLED}
    nothing_is_held(engine)


def test_a_request_restarts_from_its_output(make: MakeDevice) -> None:
    for request in REQUESTS:
        whole = expected(make, request)
        tokens = (*request.token_ids, *whole.text[:5])
        again = replace(request, token_ids=tokens, prompt_tokens=request.prompt_len)
        result = run(engine_of(make, budget=16), again)[request.id]
        assert result.text == whole.text[5:]
        assert result.tokens[0].position == 5
        assert result.prompt_logprobs == whole.prompt_logprobs
        assert result.logprobs == whole.logprobs[5:]
