"""What an engine promises, on a device of plain bytes and on a real model alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from decant.engine.engine import Engine
from decant.engine.errors import InvalidConfig, InvalidRequest
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from decant.engine.scheduler import Limits
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    CONTEXT_LENGTH,
    VOCABULARY,
    SequenceOutput,
    make_device,
    make_engine,
    make_request,
    prompt,
    recompute_each_step,
    run,
    step_until,
)
from tests.engine.properties import instants_are_in_order, nothing_is_held, same_output_as_alone

SAMPLED = SamplingParams(temperature=1.0, seed=7)
SCENE = (
    make_request("short", 3),
    make_request("seeded", 30, sampling=SAMPLED),
    make_request("sibling", (*prompt(29), 5), sampling=replace(SAMPLED, top_k=20, top_p=0.9), logprobs=2),
    make_request("explained", prompt(13, 2), prompt_logprobs=2, logprobs=0),
    make_request("penalised", prompt(20, 3), sampling=SamplingParams(frequency_penalty=1.0, repetition_penalty=1.3)),
)
_EXPECTED: dict[str, SequenceOutput] = {}


def expected(make: MakeDevice, request: Request) -> SequenceOutput:
    """What the device gives without any engine."""
    device = make()
    key = f"{device.layout} {request}"
    if key not in _EXPECTED:
        _EXPECTED[key] = recompute_each_step(device, request)
    return _EXPECTED[key]


def engine_of(make: MakeDevice, num_blocks: int = 64, **limits: int) -> Engine:
    return make_engine(device=make(num_blocks), **limits)


# -- the text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "max_running"), [(1, 1), (7, 4), (64, 8), (4096, 8)])
def test_output_depends_on_neither_batch_nor_chunks(make: MakeDevice, budget: int, max_running: int) -> None:
    engine = engine_of(make, budget=budget, max_running=max_running)
    log = run(engine, *SCENE)
    for request in SCENE:
        same_output_as_alone(log[request.id], expected(make, request))
    nothing_is_held(engine)


def test_output_does_not_depend_on_prefix_hits(make: MakeDevice) -> None:
    engine = engine_of(make)
    for round in range(2):
        for request in SCENE:
            engine.add(request)
            first = engine.step().num_tokens
            engine.cancel(request.id)
            engine.step()
            log = run(engine, request)
            same_output_as_alone(log[request.id], expected(make, request))
            hit = round and request.prompt_logprobs is None and request.prompt_len > engine.pool.block_size
            assert first < request.prompt_len if hit else first <= request.prompt_len


def test_output_does_not_depend_on_preemption(make: MakeDevice) -> None:
    requests = [replace(request, stop=StopParams(max_tokens=16)) for request in SCENE if request.prompt_len < 29]
    engine = engine_of(make, num_blocks=12, budget=16)
    log = run(engine, *requests)
    assert engine.load().preemptions
    for request in requests:
        same_output_as_alone(log[request.id], expected(make, request))
    nothing_is_held(engine)


def test_output_does_not_depend_on_others_that_are_cancelled(make: MakeDevice) -> None:
    engine = engine_of(make, budget=16)
    log = run(engine, *SCENE, steps=3)
    for id in ("seeded", "explained"):
        assert engine.cancel(id)
    run(engine, log=log)
    for request in SCENE:
        same_output_as_alone(log[request.id], expected(make, request))
    assert {log[id].reason for id in ("seeded", "explained")} == {FinishReason.CANCELLED}
    nothing_is_held(engine)


def test_a_request_restarts_from_its_output(make: MakeDevice) -> None:
    for request in SCENE:
        whole = expected(make, request)
        tokens = (*request.token_ids, *whole.text[:5])
        again = replace(request, token_ids=tokens, prompt_tokens=request.prompt_len)
        result = run(engine_of(make, budget=16), again)[request.id]
        assert result.text == whole.text[5:]
        assert result.tokens[0].position == 5
        assert result.prompt_logprobs == whole.prompt_logprobs
        assert result.logprobs == whole.logprobs[5:]


# -- the end ----------------------------------------------------------------------------------------------------


def test_a_stop_token_is_the_last_one_and_is_named(make: MakeDevice) -> None:
    text = expected(make, SCENE[0]).text
    stop = StopParams(max_tokens=8, stop_token_ids=frozenset({text[3]}))
    result = run(engine_of(make), replace(SCENE[0], stop=stop))["short"]
    assert result.text == text[: text.index(text[3]) + 1]
    assert result.ended is not None
    assert (result.reason, result.ended.stop_token) == (FinishReason.STOP, text[3])


@pytest.mark.parametrize("ignore", [False, True])
def test_the_models_end_token_ends_unless_it_is_ignored(make: MakeDevice, ignore: bool) -> None:
    text = expected(make, SCENE[0]).text
    engine = make_engine(device=make(64, eos={text[3]}))
    result = run(engine, replace(SCENE[0], stop=StopParams(max_tokens=8, ignore_eos=ignore)))["short"]
    assert result.reason is (FinishReason.LENGTH if ignore else FinishReason.STOP)
    assert result.text == (text if ignore else text[: text.index(text[3]) + 1])


def test_no_stop_token_is_drawn_before_min_tokens(make: MakeDevice) -> None:
    text = expected(make, SCENE[0]).text
    stops = frozenset(text[2:5])
    engine = make_engine(device=make(64, eos={text[1]}))
    result = run(engine, replace(SCENE[0], stop=StopParams(max_tokens=8, min_tokens=6, stop_token_ids=stops)))["short"]
    assert result.text[0] == text[0]
    assert not {*stops, text[1]} & set(result.text[:6])
    assert len(result.text) >= 6


def test_the_context_length_ends_an_output(make: MakeDevice) -> None:
    request = replace(SCENE[0], stop=StopParams())
    result = run(engine_of(make, context_length=11), request)["short"]
    assert result.reason is FinishReason.CONTEXT_LENGTH
    assert result.text == expected(make, SCENE[0]).text


def test_a_prompt_of_the_context_length_gives_one_token(make: MakeDevice) -> None:
    engine = engine_of(make, num_blocks=8)
    result = run(engine, make_request("full", 32, max_tokens=None))["full"]
    assert (len(result.text), result.reason) == (1, FinishReason.CONTEXT_LENGTH)
    nothing_is_held(engine)


@pytest.mark.parametrize("count", [1, 2])
def test_max_tokens_ends_an_output(make: MakeDevice, count: int) -> None:
    result = run(engine_of(make), make_request("short", 3, count))["short"]
    assert (result.text, result.reason) == (expected(make, SCENE[0]).text[:count], FinishReason.LENGTH)


def test_a_sequence_starts_with_its_cached_tokens(make: MakeDevice) -> None:
    engine, request = engine_of(make, budget=8), make_request("a", 30)
    first = run(engine, request)["a"].begun
    again = run(engine, request)["a"].begun
    assert first is not None
    assert again is not None
    assert (first.cached, first.tokens) == (0, 30)
    assert (again.cached, again.tokens) == (28, 30)  # whole blocks of 4, never all tokens
    for begun in (first, again):
        assert begun.timeline.scheduled is not None
        assert begun.timeline.first_token is not None
        assert begun.timeline.scheduled < begun.timeline.first_token


def test_the_instants_of_a_sequence_are_in_order(make: MakeDevice) -> None:
    engine = engine_of(make, num_blocks=12, budget=16)
    log = run(engine, *(replace(request, stop=StopParams(max_tokens=16)) for request in SCENE))
    engine.add(make_request("never"))
    engine.cancel("never")
    run(engine, log=log)
    ends = {id: result.ended.timeline for id, result in log.by_id.items() if result.ended}
    assert ends.keys() == log.by_id.keys()
    for id, timeline in ends.items():
        instants_are_in_order(timeline, len(log[id].tokens))
    last = ends.pop("never")
    assert all(timeline.finished and timeline.finished < last.added for timeline in ends.values())


def test_a_sequence_begins_once_however_often_it_is_preempted(make: MakeDevice) -> None:
    engine = engine_of(make, num_blocks=12, budget=16)
    for request in SCENE:
        engine.add(replace(request, stop=StopParams(max_tokens=16)))
    begun, ended = list[tuple[str, float | None]](), list[tuple[str, float | None]]()
    while engine.has_work:
        output = engine.step()
        begun += [(events.id, events.timeline.scheduled) for events in output.begun]
        ended += [(events.id, events.timeline.scheduled) for events in output.ended]
    assert engine.load().preemptions
    assert sorted(begun) == sorted(ended)
    assert len(begun) == len(SCENE)


# -- log-probabilities ------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_generated_tokens(make: MakeDevice) -> None:
    request = make_request("a", 9, logprobs=3, prompt_logprobs=2)
    result = run(engine_of(make), request)["a"]
    assert [entry.token for entry in result.logprobs if entry] == result.text
    assert [entry.token for entry in result.prompt_logprobs] == list(request.token_ids[1:])
    for entry in filter(None, result.logprobs):
        assert entry.rank == 1, "greedy draws the likeliest"
        assert entry.top[0] == (entry.token, entry.logprob)
    for entry, count in [*((e, 3) for e in result.logprobs if e), *((e, 2) for e in result.prompt_logprobs)]:
        assert len(entry.top) == count
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in (entry.logprob, *values))
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert entry.rank == 1 or entry.logprob <= values[0]


def test_log_probabilities_are_emitted_only_on_request(make: MakeDevice) -> None:
    result = run(engine_of(make), SCENE[0])["short"]
    assert set(result.logprobs) == {None}
    assert not result.prompt_logprobs
    assert all(entry and not entry.top for entry in expected(make, SCENE[3]).logprobs)


# -- sampling ---------------------------------------------------------------------------------------------------


def written(make: MakeDevice, length: int = 12, **sampling: Any) -> list[int]:
    request = make_request("a", prompt(40, 5), length, sampling=SamplingParams(**sampling))
    return run(engine_of(make), request)["a"].text


def test_a_bias_forces_a_token_and_forbids_one(make: MakeDevice) -> None:
    assert written(make, logit_bias={7: 100.0}) == [7] * 12
    assert written(make, logit_bias={7: 100.0}, temperature=1.0) == [7] * 12
    first = written(make, 1)[0]
    assert first not in written(make, logit_bias={first: -100.0})


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 10.0}]
)
def test_a_penalty_ends_a_repetition(make: MakeDevice, penalty: dict[str, Any]) -> None:
    """The least bias that makes a token come again and again: the penalty takes more than it wins by."""
    biases: Iterator[Any] = ({7: step * 1.5} for step in range(40))
    bias, text = next((bias, text) for bias in biases if (text := written(make, logit_bias=bias)).count(7) > 2)
    changed = written(make, logit_bias=bias, **penalty)
    assert 1 <= changed.count(7) < text.count(7)


def test_a_draw_is_a_function_of_seed_output_and_position(make: MakeDevice) -> None:
    hot: dict[str, Any] = {"temperature": 2.0}
    texts = {tuple(written(make, seed=seed, output_index=index, **hot)) for seed in range(4) for index in range(2)}
    assert len(texts) == 8, "other seeds and other outputs give other texts"
    assert written(make, seed=3, output_index=1, **hot) == written(make, seed=3, output_index=1, **hot)
    assert written(make, 4, seed=3, **hot) == written(make, seed=3, **hot)[:4]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_a_narrow_draw_is_the_likeliest_token(make: MakeDevice, narrow: Mapping[str, Any]) -> None:
    assert written(make, seed=5, **{"temperature": 1.0, **narrow}) == written(make)


# -- bad input --------------------------------------------------------------------------------------------------

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


def test_a_bad_request_is_refused_by_name_and_the_others_go_on(make: MakeDevice) -> None:
    engine = engine_of(make, budget=8)
    log = run(engine, *SCENE, steps=3)
    for field, change in OUT_OF_RANGE:
        with pytest.raises(InvalidRequest) as refused:
            engine.add(replace(make_request("bad"), **change))
        assert refused.value.field == field
        assert refused.value.limit
        assert field in str(refused.value)
        log.record(engine.step())
    run(engine, log=log)
    assert "bad" not in log.by_id
    for request in SCENE:
        same_output_as_alone(log[request.id], expected(make, request))


def test_an_id_is_used_once_and_free_again_after_its_end_is_emitted(make: MakeDevice) -> None:
    engine = engine_of(make)
    log = run(engine, make_request("a"), steps=2)
    with pytest.raises(InvalidRequest, match="alive") as refused:
        engine.add(make_request("a"))
    assert (refused.value.field, refused.value.value) == ("id", "a")
    engine.cancel("a")
    with pytest.raises(InvalidRequest, match="alive"):
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
def test_a_value_out_of_range_can_not_be_asked_for(field: str, kind: Any, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as refused:
            kind(**{field: value})
        assert (refused.value.field, refused.value.limit != "") == (field, True)
        assert refused.value.value is value


def test_other_values_that_can_not_be_asked_for() -> None:
    for field, make_bad in (
        ("token_ids", lambda: Request("a", ())),
        ("id", lambda: Request("", (1,))),
        ("min_tokens", lambda: StopParams(max_tokens=2, min_tokens=3)),
        ("logit_bias[3]", lambda: SamplingParams(logit_bias={3: math.nan})),
    ):
        with pytest.raises(InvalidRequest) as refused:
            make_bad()
        assert refused.value.field == field


def test_limits_that_can_not_be_kept_are_refused() -> None:
    for field, make_bad in (
        ("token_budget", lambda: Limits(token_budget=0)),
        ("token_budget", lambda: Limits(token_budget=math.nan)),  # type: ignore[arg-type]
        ("step_seconds", lambda: Limits(step_seconds=math.nan)),
        ("max_running", lambda: Limits(token_budget=4, max_running=5)),
        ("window", lambda: Engine(make_device(64), Limits(context_length=CONTEXT_LENGTH + 1))),
        ("window", lambda: Engine(make_device(8), Limits(context_length=33))),
    ):
        with pytest.raises(InvalidConfig) as refused:
            make_bad()
        assert refused.value.field == field


# -- cancel -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "in its prompt", "writing", "preempted", "parked"])
def test_a_cancel_frees_everything_in_any_state(make: MakeDevice, state: str) -> None:
    engine = engine_of(make, num_blocks=12, budget=4, max_running=4)
    log = run(engine, make_request("a", 10, 20), make_request("b", prompt(10, 2), 24), steps=0)
    if state == "in its prompt":
        log.record(engine.step())
    elif state in ("writing", "parked"):
        step_until(engine, lambda: len(log["a"].text) == 2, log)
    elif state == "preempted":
        step_until(engine, lambda: engine.load().preemptions > 0, log)
    if state == "parked":
        engine.park("a")
    victim = "b" if state == "preempted" else "a"
    assert engine.cancel(victim)
    assert not engine.cancel(victim)
    engine.check_integrity()
    run(engine, log=log)
    assert log[victim].reason is FinishReason.CANCELLED
    assert {log[id].reason for id in "ab" if id != victim} == {FinishReason.LENGTH}
    nothing_is_held(engine)


def test_nothing_of_that_name_is_no_error_to_cancel(make: MakeDevice) -> None:
    assert not engine_of(make).cancel("nobody")
