from __future__ import annotations

import pytest
from google.protobuf.message import Message

from decant.engine.errors import InvalidRequest
from decant.engine.plan import TokenLogprobs
from decant.engine.reasoning import ReasoningLimit, ReasoningMarkers
from decant.engine.request import FinishReason, SamplingParams, StopParams
from decant.engine.scheduler import STEPS_PER_PRIORITY
from decant.protos import worker_pb2 as wire
from decant.runtime.packed import pack, unpack
from decant.runtime.priority import SECONDS_PER_PRIORITY
from decant.worker.wire_codec import RequestRejected, end_reason, logprobs_to_wire, queue_key, to_requests
from tests.engine.guides.tiny_tokenizer import compiler
from tests.worker.requests import to_request


def whole_work() -> wire.EngineRequest:
    """Work with every field that this build honours, none at its neutral value."""
    return wire.EngineRequest(
        model="m",
        prompt=pack([5, 6, 7]),
        outputs=[wire.OutputPrefix(output=3, tokens=pack([8, 9]))],
        sampling=wire.Sampling(
            temperature=0.5, top_p=0.25, top_k=40, min_p=0.125, frequency_penalty=1, presence_penalty=-1,
            repetition_penalty=1.5, seed=2**64 - 1, logit_bias={4: -2.0},
        ),
        stopping=wire.Stopping(max_tokens=20, min_tokens=4, stop_token_ids=[1, 2], ignore_eos=True),
        logprobs=2, prompt_logprobs=0, priority=-7, salt=b"tenant", bypass_prefix_cache=True, traceparent="00-1-2-03",
    )  # fmt: skip


def refused(**changed: object) -> wire.Failure:
    work = whole_work()
    for field, value in changed.items():
        name, _, inner = field.partition("__")
        if isinstance(value, Message):
            getattr(work, name).CopyFrom(value)
        elif inner:
            setattr(getattr(work, name), inner, value)
        else:
            setattr(work, name, value)
    with pytest.raises(RequestRejected) as caught:
        to_request("r", work, model="m")
    return caught.value.failure


def test_every_field_reaches_the_engine() -> None:
    request = to_request("r", whole_work(), model="m")
    assert (request.id, request.token_ids, request.prompt_len) == ("r", (5, 6, 7, 8, 9), 3)
    assert request.sampling == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=40, min_p=0.125, frequency_penalty=1, presence_penalty=-1,
        repetition_penalty=1.5, seed=2**64 - 1, logit_bias={4: -2.0}, output_index=3,
    )  # fmt: skip
    assert request.stop == StopParams(20, 4, frozenset({1, 2}), True)
    assert (request.logprobs, request.prompt_logprobs, request.priority) == (2, 0, -7)
    assert (request.salt, request.use_prefix_cache, request.park_after) == (b"tenant", False, None)


def test_unset_is_not_zero() -> None:
    work = whole_work()
    work.ClearField("logprobs")
    work.ClearField("prompt_logprobs")
    work.bypass_prefix_cache = False
    request = to_request("r", work, model="m")
    assert (request.logprobs, request.prompt_logprobs, request.use_prefix_cache) == (None, None, True)


def test_a_sender_parks_after_its_first_token() -> None:
    assert to_request("r", whole_work(), model="m", park_after=True).park_after == 3


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"prompt": b""}, "prompt"),
        ({"prompt": b"12345"}, "prompt"),
        ({"sampling__top_p": 0.0}, "sampling.top_p"),
        ({"sampling__temperature": float("nan")}, "sampling.temperature"),
        ({"sampling__repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"sampling": wire.Sampling(top_p=1, repetition_penalty=1, logit_bias={3: 101})}, "sampling.logit_bias[3]"),
        ({"stopping__max_tokens": 0}, "stopping.max_tokens"),
        ({"stopping__min_tokens": 21}, "stopping.min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"priority": 1001}, "priority"),
    ],
)
def test_a_value_out_of_range_is_invalid_and_named(changed: dict[str, object], field: str) -> None:
    failure = refused(**changed)
    assert failure.cause == wire.CAUSE_INVALID
    assert failure.violation.field == field
    assert failure.violation.limit


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"guide": wire.Guide(regex="a*")}, "guide"),
        ({"guide": wire.Guide(json_object=False)}, "guide"),
    ],
)
def test_an_unsupported_field_is_named(changed: dict[str, object], field: str) -> None:
    failure = refused(**changed)
    assert (failure.cause, failure.violation.field) == (wire.CAUSE_UNSUPPORTED, field)


def test_an_adapter_that_the_worker_does_not_have_has_its_own_cause() -> None:
    failure = refused(adapter="a1")
    assert (failure.cause, failure.violation.field) == (wire.CAUSE_UNKNOWN_ADAPTER, "adapter")


def test_only_requests_of_one_adapter_and_one_salt_share_blocks() -> None:
    work = whole_work()
    work.ClearField("guide")
    salts = set()
    for salt, adapter in ((b"one", ""), (b"one", "a1"), (b"one", "b2"), (b"two", "a1")):
        work.salt, work.adapter = salt, adapter
        made = to_requests("r", work, model="m", adapters={"a1", "b2"})
        assert {request.adapter for request in made} == {adapter}
        salts |= {request.cache_salt for request in made}
    assert len(salts) == 4


def test_a_guide_becomes_the_grammar_of_the_workers_tokenizer() -> None:
    work = whole_work()
    work.stopping.CopyFrom(wire.Stopping(max_tokens=9))
    for guide in (wire.Guide(regex="[a-c]{3}"), wire.Guide(choice=wire.Guide.Choices(choices=["a", "b"]))):
        work.guide.CopyFrom(guide)
        grammar = to_request("r", work, model="m", guides=compiler()).grammar
        assert grammar is not None
        assert grammar is to_request("q", work, model="m", guides=compiler()).grammar, "it is compiled once"
        grammar.prepare()


@pytest.mark.parametrize(("field", "named"), [("guided.regex", "guided.regex"), ("", "messages.tools")])
def test_an_error_of_an_answers_grammar_names_the_clients_field(field: str, named: str) -> None:
    work = whole_work()
    work.stopping.CopyFrom(wire.Stopping(max_tokens=9))
    work.guide.CopyFrom(wire.Guide(answer='{"grammars": [{"lark_grammar": "start: nothing"}]}', answer_field=field))
    grammar = to_request("r", work, model="m", guides=compiler()).grammar
    assert grammar is not None
    with pytest.raises(InvalidRequest) as refused:
        grammar.prepare()
    assert refused.value.field == named


def test_a_limit_of_reasoning_is_the_engines() -> None:
    work = whole_work()
    assert to_request("r", work, model="m").reasoning is None
    work.reasoning.CopyFrom(wire.ReasoningLimit(begin=pack([5, 6]), end=7, is_open=True, max_tokens=0))
    assert to_request("r", work, model="m").reasoning == ReasoningLimit(ReasoningMarkers((5, 6), 7, is_open=True), 0)
    work.reasoning.begin = b""
    with pytest.raises(RequestRejected) as caught:
        to_request("r", work, model="m")
    assert caught.value.failure.violation.field == "reasoning.begin"


def test_a_guide_that_contradicts_the_stopping_is_refused_by_the_field_of_the_wire() -> None:
    work = whole_work()
    work.guide.regex = "a"
    with pytest.raises(RequestRejected) as caught:
        to_request("r", work, model="m", guides=compiler())
    assert caught.value.failure.violation.field == "stopping.min_tokens"
    assert caught.value.failure.cause == wire.CAUSE_INVALID


@pytest.mark.parametrize("indexes", [(), (1, 1), (0, 2, 0)])
def test_outputs_without_one_or_with_one_twice_are_refused(indexes: tuple[int, ...]) -> None:
    work = whole_work()
    del work.outputs[:]
    work.outputs.extend(wire.OutputPrefix(output=index) for index in indexes)
    with pytest.raises(RequestRejected) as caught:
        to_requests("r", work, model="m")
    failure = caught.value.failure
    assert (failure.cause, failure.violation.field) == (wire.CAUSE_INVALID, "outputs")


def test_each_output_becomes_a_request_of_its_own() -> None:
    work = whole_work()
    work.prompt_logprobs = 1
    del work.outputs[:]
    work.outputs.extend(wire.OutputPrefix(output=index, tokens=pack(range(index))) for index in (2, 0, 5))
    requests = to_requests("r", work, model="m", park_after=True)
    prompt = tuple(unpack(work.prompt))
    assert [request.sampling.output_index for request in requests] == [2, 0, 5]
    assert [request.token_ids for request in requests] == [(*prompt, *range(index)) for index in (2, 0, 5)]
    assert {request.prompt_len for request in requests} == {len(prompt)}
    assert [request.park_after for request in requests] == [3, 1, 6]
    assert [request.prompt_logprobs for request in requests] == [1, None, None]
    assert len({request.id for request in requests}) == 3


def test_another_model_is_unknown() -> None:
    assert refused(model="other").cause == wire.CAUSE_UNKNOWN_MODEL


def test_an_engine_error_has_the_field_name_of_the_wire() -> None:
    names = {"token_ids": "prompt", "stop_token_ids": "stopping.stop_token_ids", "logit_bias": "sampling.logit_bias"}
    for engines, wires in names.items():
        assert RequestRejected.of(InvalidRequest(engines, "token ids below 8", 9)).failure.violation.field == wires


def test_tokens_survive_the_wire() -> None:
    ids = (0, 1, 255, 2**32 - 1)
    assert pack(ids)[:8] == b"\0\0\0\0\1\0\0\0"
    assert tuple(unpack(pack(ids))) == ids


def test_logprobs_go_over_in_order() -> None:
    message = logprobs_to_wire(4, TokenLogprobs(9, -0.5, 2, ((7, -0.25), (9, -0.5))))
    assert (message.entry, message.logprob, message.rank) == (4, -0.5, 2)
    assert (list(message.top_ids), list(message.top_logprobs)) == ([7, 9], [-0.25, -0.5])
    assert not logprobs_to_wire(0, TokenLogprobs(9, -0.5, 1)).top_ids


def test_max_tokens_capped_by_the_context_length_end_with_context_length() -> None:
    assert end_reason(FinishReason.LENGTH, wire.Stopping()) == wire.OutputEnd.REASON_LENGTH
    assert (
        end_reason(FinishReason.LENGTH, wire.Stopping(capped_by_context_length=True))
        == wire.OutputEnd.REASON_CONTEXT_LENGTH
    )
    assert end_reason(FinishReason.STOP, wire.Stopping(capped_by_context_length=True)) == wire.OutputEnd.REASON_STOP


def test_priority_and_age_go_first() -> None:
    plain = queue_key(wire.EngineRequest(), 100.0)
    assert queue_key(wire.EngineRequest(), 101.0) > plain
    assert queue_key(wire.EngineRequest(priority=1), 100.0) < plain
    assert queue_key(wire.EngineRequest(age_ms=5000), 101.0) < plain


def test_a_level_of_priority_is_worth_as_much_before_an_engine_as_in_one() -> None:
    """Queues count seconds and an engine counts steps, of about 10 ms."""
    assert pytest.approx(0.010 * STEPS_PER_PRIORITY, rel=0.05) == SECONDS_PER_PRIORITY
