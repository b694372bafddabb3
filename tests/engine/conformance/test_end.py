from __future__ import annotations

from dataclasses import replace

import pytest

from decant.engine.request import FinishReason, StopParams
from tests.engine.conformance.harness import REQUESTS, engine_of, expected
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    make_engine,
    make_request,
    run,
)
from tests.engine.properties import nothing_is_held


def test_a_stop_token_is_the_last_token_and_is_reported(make: MakeDevice) -> None:
    text = expected(make, REQUESTS[0]).text
    stop = StopParams(max_tokens=8, stop_token_ids=frozenset({text[3]}))
    result = run(engine_of(make), replace(REQUESTS[0], stop=stop))["short"]
    assert result.text == text[: text.index(text[3]) + 1]
    assert result.ended is not None
    assert (result.reason, result.ended.stop_token) == (FinishReason.STOP, text[3])


@pytest.mark.parametrize("ignore", [False, True])
def test_an_end_token_ends_an_output_unless_ignored(make: MakeDevice, ignore: bool) -> None:
    text = expected(make, REQUESTS[0]).text
    engine = make_engine(device=make(64, eos={text[3]}))
    result = run(engine, replace(REQUESTS[0], stop=StopParams(max_tokens=8, ignore_eos=ignore)))["short"]
    assert result.reason is (FinishReason.LENGTH if ignore else FinishReason.STOP)
    assert result.text == (text if ignore else text[: text.index(text[3]) + 1])


def test_no_stop_token_is_drawn_before_min_tokens(make: MakeDevice) -> None:
    text = expected(make, REQUESTS[0]).text
    stops = frozenset(text[2:5])
    engine = make_engine(device=make(64, eos={text[1]}))
    result = run(engine, replace(REQUESTS[0], stop=StopParams(max_tokens=8, min_tokens=6, stop_token_ids=stops)))[
        "short"
    ]
    assert result.text[0] == text[0]
    assert not {*stops, text[1]} & set(result.text[:6])
    assert len(result.text) >= 6


def test_the_context_length_ends_an_output(make: MakeDevice) -> None:
    request = replace(REQUESTS[0], stop=StopParams())
    result = run(engine_of(make, context_length=11), request)["short"]
    assert result.reason is FinishReason.CONTEXT_LENGTH
    assert result.text == expected(make, REQUESTS[0]).text


def test_a_prompt_of_the_context_length_gives_one_token(make: MakeDevice) -> None:
    engine = engine_of(make, num_blocks=8)
    result = run(engine, make_request("full", 32, max_tokens=None))["full"]
    assert (len(result.text), result.reason) == (1, FinishReason.CONTEXT_LENGTH)
    nothing_is_held(engine)


@pytest.mark.parametrize("count", [1, 2])
def test_max_tokens_ends_an_output(make: MakeDevice, count: int) -> None:
    result = run(engine_of(make), make_request("short", 3, count))["short"]
    assert (result.text, result.reason) == (expected(make, REQUESTS[0]).text[:count], FinishReason.LENGTH)
