from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from decant.engine.engine import Engine
from decant.engine.errors import InvalidConfig, InvalidRequest
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from decant.engine.scheduler import Limits
from tests.engine.conformance.harness import REQUESTS, engine_of, expected
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    CONTEXT_LENGTH,
    VOCABULARY,
    make_device,
    make_request,
    prompt,
    run,
)
from tests.engine.properties import same_output_as_alone

OUT_OF_RANGE: list[tuple[str, dict[str, Any]]] = [
    ("token_ids", {"token_ids": (1, VOCABULARY)}),
    ("token_ids", {"token_ids": (1, -1)}),
    ("token_ids", {"token_ids": (1, 2.5)}),
    ("token_ids", {"token_ids": (1, None)}),
    ("token_ids", {"token_ids": (1, "2")}),
    ("token_ids", {"token_ids": (1, 2**70)}),
    ("token_ids", {"token_ids": prompt(CONTEXT_LENGTH + 1)}),
    ("token_ids", {"token_ids": prompt(CONTEXT_LENGTH), "prompt_tokens": 5, "stop": StopParams()}),
    ("stop_token_ids", {"stop": StopParams(stop_token_ids=frozenset({VOCABULARY}))}),
    ("stop_token_ids", {"stop": StopParams(min_tokens=2, stop_token_ids=frozenset(range(VOCABULARY)))}),
    ("logit_bias", {"sampling": SamplingParams(logit_bias={VOCABULARY: 1.0})}),
    ("logit_bias", {"sampling": SamplingParams(logit_bias={-1: 1.0})}),
    ("max_tokens", {"token_ids": prompt(9), "prompt_tokens": 1, "stop": StopParams(max_tokens=8)}),
]


def test_an_invalid_request_is_refused_by_field_and_others_continue(make: MakeDevice) -> None:
    engine = engine_of(make, budget=8)
    log = run(engine, *REQUESTS, steps=3)
    for field, change in OUT_OF_RANGE:
        with pytest.raises(InvalidRequest) as refused:
            engine.add(replace(make_request("bad"), **change))
        assert refused.value.field == field
        assert refused.value.limit
        assert field in str(refused.value)
        log.record(engine.step())
    run(engine, log=log)
    assert "bad" not in log.by_id
    for request in REQUESTS:
        same_output_as_alone(log[request.id], expected(make, request))


def test_an_id_is_free_again_after_its_end_is_emitted(make: MakeDevice) -> None:
    engine = engine_of(make)
    log = run(engine, make_request("a"), steps=2)
    with pytest.raises(InvalidRequest, match="not in use by a live sequence") as refused:
        engine.add(make_request("a"))
    assert (refused.value.field, refused.value.value) == ("id", "a")
    engine.cancel("a")
    with pytest.raises(InvalidRequest, match="not in use by a live sequence"):
        engine.add(make_request("a"))
    run(engine, log=log)
    assert log["a"].reason is FinishReason.CANCELLED
    assert run(engine, make_request("a"))["a"].reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("field", "kind", "values"),
    [
        ("temperature", SamplingParams, [-0.1, math.nan, math.inf, 101.0, "hot"]),
        ("top_k", SamplingParams, [-1, 1.5, True]),
        ("top_p", SamplingParams, [0.0, 1.1, -1.0, math.nan, None, "1"]),
        ("min_p", SamplingParams, [-0.1, 1.1, math.nan]),
        ("repetition_penalty", SamplingParams, [0.0, -1.0, 11.0, math.nan, None]),
        ("presence_penalty", SamplingParams, [-2.1, 2.1, math.nan]),
        ("frequency_penalty", SamplingParams, [-2.1, 2.1, math.nan]),
        ("logit_bias", SamplingParams, [None, [(1, 2.0)]]),
        ("seed", SamplingParams, [-1, 2**64, 0.5]),
        ("output_index", SamplingParams, [-1, 2**32]),
        ("max_tokens", StopParams, [0, -1, 1.5, 2**31]),
        ("min_tokens", StopParams, [-1, 1.5]),
        ("stop_token_ids", StopParams, [None, 5, [5]]),
        ("prompt_tokens", make_request, [0, 7]),
        ("priority", make_request, [1001, -1001, 0.5]),
        ("logprobs", make_request, [-1, 21]),
        ("prompt_logprobs", make_request, [-1, 21]),
        ("park_after", make_request, [0, -1]),
    ],
)
def test_a_value_out_of_range_is_refused(field: str, kind: Any, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as refused:
            kind(**{field: value})
        assert (refused.value.field, refused.value.limit != "") == (field, True)
        assert refused.value.value is value


def test_other_invalid_values_are_refused() -> None:
    for field, make_bad in (
        ("token_ids", lambda: Request("a", ())),
        ("id", lambda: Request("", (1,))),
        ("min_tokens", lambda: StopParams(max_tokens=2, min_tokens=3)),
        ("logit_bias[3]", lambda: SamplingParams(logit_bias={3: math.nan})),
    ):
        with pytest.raises(InvalidRequest) as refused:
            make_bad()
        assert refused.value.field == field


def test_invalid_limits_are_refused() -> None:
    for field, make_bad in (
        ("token_budget", lambda: Limits(token_budget=0)),
        ("token_budget", lambda: Limits(token_budget=math.nan)),  # type: ignore[arg-type]
        ("step_seconds", lambda: Limits(step_seconds=math.nan)),
        ("max_running", lambda: Limits(token_budget=4, max_running=5)),
        ("context_length", lambda: Engine(make_device(64), Limits(context_length=CONTEXT_LENGTH + 1))),
        ("context_length", lambda: Engine(make_device(8), Limits(context_length=33))),
    ):
        with pytest.raises(InvalidConfig) as refused:
            make_bad()
        assert refused.value.field == field
