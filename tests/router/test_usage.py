from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import WorkerRegistration
from decant.router.api.usage import RequestMeter
from decant.router.request.attempt_trace import AttemptTrace
from decant.router.request.token_stream import TokenStream
from decant.runtime.telemetry.metrics import Registry, RequestMetrics
from tests.router.factories import AT_LENGTH, valid, write

RECEIPT_TIMES = {field.name for field in pb.Receipt.DESCRIPTOR.fields if field.name.endswith("_ms")}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


@pytest.fixture
async def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def registry():
    return Registry(process=False)


@pytest.fixture
async def stream(clock):
    return TokenStream(await valid(request_id="r", user="ada", prompt="a secret of the prompt"))


def account(stream: TokenStream, registry: Registry) -> RequestMeter:
    return RequestMeter(stream, RequestMetrics(registry).of("tiny-python"))


def value(registry: Registry, name: str, **labels: str) -> float | None:
    return registry.collectors.get_sample_value(f"decant_{name}", {"model": "tiny-python", **labels})


async def test_the_times_of_a_receipt_are_whole_microseconds(clock, stream, registry):
    taken = account(stream, registry)
    clock.now += 0.1234567891
    taken.record_sent(1)
    clock.now += 1 / 3
    taken.record_sent(1)
    stream.trace = AttemptTrace(
        queue_s=0.1 + 0.2, prefill_s=2 / 3, handoff_s=1e-7, decode_wait_s=5e-6, decode_began_at=100.1
    )
    stream.outputs[0].last_token_at = 100 + 1 / 7
    receipt = taken.receipt()
    times = {field.name: value for field, value in receipt.ListFields() if field.name.endswith("_ms")}
    assert times.keys() == RECEIPT_TIMES
    assert receipt.queue_ms == 300
    assert {name: value for name, value in times.items() if value != round(value, 3)} == {}


async def test_a_receipt_has_phases_in_milliseconds(clock, stream, registry):
    taken = account(stream, registry)
    clock.now += 0.5
    taken.record_sent(1)
    clock.now += 0.25
    taken.record_sent(1)
    clock.now += 0.125
    taken.record_sent(1)
    stream.trace = AttemptTrace(
        attempts=2,
        prefill=WorkerRegistration(peer=wire.Peer(id="p")),
        decode=WorkerRegistration(peer=wire.Peer(id="d")),
        queue_s=0.01,
        prefill_s=0.02,
        handoff_s=0.03,
        decode_wait_s=0.04,
        decode_began_at=100.25,
        handoff_bytes=7,
    )
    stream.outputs[0].last_token_at = 100.75
    clock.now += 0.125
    assert taken.receipt() == pb.Receipt(
        queue_ms=10,
        prefill_ms=20,
        handoff_ms=30,
        decode_wait_ms=40,
        decode_ms=500,
        ttft_ms=500,
        second_token_ms=250,
        e2e_ms=1000,
        handoff_bytes=7,
        prefill_worker="p",
        decode_worker="d",
        attempts=2,
    )


async def test_a_phase_that_never_was_is_unset(clock, stream, registry):
    receipt = account(stream, registry).receipt()
    assert {name for name in RECEIPT_TIMES - {"e2e_ms"} if receipt.HasField(name)} == set()
    assert receipt.attempts == 1


async def test_without_a_report_of_the_worker_queueing_ends_at_the_dispatch(clock, stream, registry):
    stream.trace.scheduled_at = 100.5
    assert account(stream, registry).receipt().queue_ms == 500


async def test_two_tokens_in_the_first_message_are_the_first_and_the_second(clock, stream, registry):
    taken = account(stream, registry)
    clock.now += 1
    taken.record_sent(2)
    clock.now += 1
    taken.record_sent(1)
    assert taken.receipt().ttft_ms == 1000
    assert taken.receipt().second_token_ms == 0


async def test_usage_counts_prompt_and_output(stream, registry):
    write(stream, 5, 6, 7)
    stream.cached_tokens = 2
    usage = account(stream, registry).usage()
    prompt = stream.request.prompt_tokens
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 3, prompt + 3)
    assert usage.cached_prompt_tokens == 2
    assert not usage.HasField("reasoning_tokens")


async def test_everything_is_counted_once(clock, stream, registry):
    taken = account(stream, registry)
    stream.cached_tokens = 2
    stream.trace = AttemptTrace(queue_s=0.5, prefill_s=0.25, decode_began_at=101.0)
    for tokens in (1, 2, 1):
        clock.now += 1
        write(stream, *[5] * tokens)
        taken.record_sent(tokens)
    write(stream, end=AT_LENGTH)
    taken.close("FINISH_REASON_LENGTH")
    sums = {
        "time_to_first_token_seconds": 1.0,
        "inter_token_latency_seconds": 1.5,  # 1 s for two tokens, 1 s for one
        "e2e_request_latency_seconds": 3.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 2.0,
    }
    assert {name: value(registry, f"{name}_sum") for name in sums} == sums
    assert value(registry, "inter_token_latency_seconds_count") == 2
    assert value(registry, "generation_tokens_total") == 4
    assert value(registry, "prompt_tokens_total", source="local_cache_hit") == 2
    assert value(registry, "prompt_tokens_total", source="local_compute") == stream.request.prompt_tokens - 2


async def test_a_prompt_that_was_not_computed_is_not_counted(stream, registry):
    account(stream, registry).close("left")
    assert value(registry, "prompt_tokens_total", source="local_compute") == 0
    assert value(registry, "request_prefill_time_seconds_count") == 0


async def test_the_log_line_has_tenant_and_times_but_no_text(clock, stream, registry):
    taken = account(stream, registry)
    write(stream, 5, 6, end=AT_LENGTH)
    clock.now += 1
    taken.record_sent(2)
    stream.trace.attempts = 3
    with capture_logs() as lines:
        taken.close("FINISH_REASON_LENGTH")
    (line,) = lines
    expected = {"event": "request ended", "request_id": "r", "user": "ada", "attempts": 3, "completion_tokens": 2}
    assert expected.items() <= line.items()
    assert (line["ttft_ms"], line["e2e_ms"], line["outcome"]) == (1000, 1000, "FINISH_REASON_LENGTH")
    assert "secret" not in repr(line)
