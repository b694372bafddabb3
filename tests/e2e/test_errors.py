from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis as sync_redis
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status

from decant.protos import inference_pb2 as pb
from decant.state import keys
from decant.state.ids import Incarnation, RequestKey
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.e2e.scripted import BOTH, PROMPT, Harness, generate_request, read, scripted
from tests.router.conftest import bare, server, store
from tests.router.fake_script import answer
from tests.router.fake_worker import fleet
from tests.router.harness import PATIENCE, pass_on, until
from tests.router.test_auth import OTHER, SECRET, bearer, digest
from tests.router.test_router_process import MODEL

__all__ = ["bare", "server", "store"]

pytestmark = pytest.mark.slow

Code = grpc.StatusCode
KINDS: tuple[type[Message], ...] = (ErrorInfo, BadRequest, QuotaFailure, ResourceInfo, RetryInfo, pb.ResumePoint)

UNTESTED = {
    "UNSPECIFIED": "no error has it",
    "INTERNAL": "a bug, and none is known; tests/runtime/test_interceptor.py brings it about",
    "SLOW_READER": "wants a client that takes nothing for a minute; tests/router/test_resume_stream.py has one",
    "TAIL_UNCERTAIN": "workers that compute other bits; tests/router/test_uncertain_tail.py has them",
}
_tested: set[str] = set()


def reason(name: str) -> Callable[[Any], Any]:
    _tested.add(name)
    return lambda test: test


def test_every_reason_is_provoked_or_excused() -> None:
    named = {name.removeprefix("ERROR_REASON_") for name, _ in pb.ErrorReason.items()}
    assert _tested | UNTESTED.keys() == named
    assert not _tested & UNTESTED.keys()


@dataclass
class ReceivedError:
    code: grpc.StatusCode
    details: dict[type[Message], Any] = field(default_factory=dict)
    pushback_ms: int | None = None

    @property
    def reason(self) -> str:
        info = self.details[ErrorInfo]
        assert info.domain == "decant"
        return str(info.reason)

    @property
    def violation(self) -> tuple[str, str, str]:
        (bad,) = self.details[BadRequest].field_violations
        about = self.details[ErrorInfo].metadata
        assert (bad.field, bad.reason) == (about["field"], self.reason)
        assert about["limit"] in bad.description
        assert about["value"] in bad.description
        return bad.field, about["limit"], about["value"]

    @property
    def retry_ms(self) -> int:
        delay = self.details[RetryInfo].retry_delay.ToMilliseconds()
        assert delay == self.pushback_ms
        return int(delay)


async def error_of(call: Any) -> ReceivedError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailers = dict(caught.value.trailing_metadata() or ())
    status = Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == caught.value.code().value[0]
    assert status.message == caught.value.details()
    pushback = trailers.get("grpc-retry-pushback-ms")
    return ReceivedError(caught.value.code(), _details(status), None if pushback is None else int(pushback))


def _details(status: Status) -> dict[type[Message], Any]:
    found: dict[type[Message], Any] = {}
    for detail in status.details:
        (kind,) = (kind for kind in KINDS if detail.Is(kind.DESCRIPTOR))
        found[kind] = kind()
        detail.Unpack(found[kind])
    return found


@pytest.fixture
async def harness(server: PrivateRedis, store: Store) -> AsyncIterator[Harness]:
    async with scripted(server, store, "--max-active", "1", "--queue-limit", "1") as made:
        yield made


def paused(harness: Harness, at: int) -> None:
    harness.workers[1].script.pause_at = at


def go_on(harness: Harness) -> None:
    harness.workers[1].script.pause_at = None
    harness.workers[1].go.set()


UNKNOWN_FIELD = b"\xf8\x7f\x01"
"""Number 2047, with the value 1."""


@reason("INVALID_FIELD")
@reason("EMPTY_PROMPT")
@reason("PROMPT_TOO_LONG")
@reason("FIELD_NOT_SUPPORTED")
@reason("MODEL_NOT_FOUND")
async def test_invalid_requests_are_refused_by_reason(harness: Harness) -> None:
    hot = await error_of(harness.stub.Generate(generate_request(5, sampling=pb.SamplingParams(temperature=101))))
    assert (hot.code, hot.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert hot.violation == ("sampling.temperature", "0 to 100", "101.0")
    for empty in (pb.GenerateRequest(prompt=""), pb.GenerateRequest(), pb.GenerateRequest(token_ids=pb.TokenIds())):
        nothing = await error_of(harness.stub.GenerateStream(empty).read())
        assert (nothing.code, nothing.reason) == (Code.INVALID_ARGUMENT, "EMPTY_PROMPT")
        assert nothing.violation[0] in ("prompt", "token_ids.ids")
    long = await error_of(harness.stub.Generate(generate_request(5, token_ids=pb.TokenIds(ids=[5] * 2048))))
    assert (long.code, long.reason) == (Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    field, limit, value = long.violation
    assert (field, value) == ("token_ids.ids", str(2048 + len(PROMPT)))
    assert "2048" in limit
    newer = pb.GenerateRequest.FromString(generate_request(5).SerializeToString() + UNKNOWN_FIELD)
    unsupported = await error_of(harness.stub.Generate(newer))
    assert (unsupported.code, unsupported.reason) == (Code.UNIMPLEMENTED, "FIELD_NOT_SUPPORTED")
    assert unsupported.violation[0] == "GenerateRequest.2047"
    adapter = await error_of(harness.stub.Generate(generate_request(5, lora_name="pirate")))
    assert (adapter.code, adapter.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
    assert adapter.details[ResourceInfo].resource_type == "adapter"
    unknown = await error_of(harness.stub.Generate(generate_request(5, model="absent")))
    assert (unknown.code, unknown.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
    about = unknown.details[ResourceInfo]
    assert (about.resource_type, about.resource_name) == ("model", "absent")


@reason("STATE_STORE_UNAVAILABLE")
@reason("REQUEST_NOT_FOUND")
async def test_an_unknown_id_is_not_found(harness: Harness) -> None:
    """A new store may have lost it: the error says when to retry."""
    asking = pb.GetGenerationRequest(request_id="absent")
    unsure = await error_of(harness.stub.GetGeneration(asking))
    assert (unsure.code, unsure.reason) == (Code.UNAVAILABLE, "STATE_STORE_UNAVAILABLE")
    assert 0 < unsure.retry_ms <= 10_000
    await asyncio.sleep(unsure.retry_ms / 1000)
    for call in (
        harness.stub.GetGeneration(asking),
        harness.stub.ResumeStream(pb.ResumeStreamRequest(request_id="absent")).read(),
    ):
        unknown = await error_of(call)
        assert (unknown.code, unknown.reason) == (Code.NOT_FOUND, "REQUEST_NOT_FOUND")
        about = unknown.details[ResourceInfo]
        assert (about.resource_type, about.resource_name) == ("request", "absent")
    cancelled = await harness.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="absent"))
    assert cancelled.status == pb.CancelGenerationResponse.STATUS_UNKNOWN_REQUEST


@reason("REQUEST_ID_REUSED")
@reason("SEQ_NOT_KEPT")
async def test_an_id_of_another_payload_is_refused(harness: Harness) -> None:
    await harness.stub.Generate(generate_request(5, request_id="mine"))
    other = await error_of(harness.stub.Generate(generate_request(6, request_id="mine")))
    assert (other.code, other.reason) == (Code.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    wait_beyond = await error_of(
        harness.stub.ResumeStream(pb.ResumeStreamRequest(request_id="mine", after_seq=6)).read()
    )
    assert (wait_beyond.code, wait_beyond.reason) == (Code.OUT_OF_RANGE, "SEQ_NOT_KEPT")
    assert wait_beyond.details[pb.ResumePoint] == pb.ResumePoint(first_seq=0, last_seq=5)
    again = harness.stub.ResumeStream(pb.ResumeStreamRequest(request_id="mine", after_seq=5))
    assert await read(again) == []


@reason("QUEUE_FULL")
@reason("SUPERSEDED")
@reason("CANCELLED")
async def test_overload_deadline_and_unavailable_have_their_reasons(harness: Harness) -> None:
    paused(harness, 2)
    first = harness.stream(5, request_id="one")
    await first.read()
    others = [asyncio.ensure_future(read(harness.stream(5))) for _ in range(3)]
    ended = iter(asyncio.as_completed(others))
    for _ in range(2):  # the third waits
        full = await error_of(next(ended))
        assert (full.code, full.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert full.retry_ms > 0
    newer = harness.stub.ResumeStream(pb.ResumeStreamRequest(request_id="one"))
    assert (await newer.read()).HasField("started")
    older = await error_of(read(first))
    assert (older.code, older.reason) == (Code.ABORTED, "SUPERSEDED")
    assert pb.ResumePoint not in older.details, "there is nothing to resume"
    await harness.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="one"))
    gone = await error_of(read(newer))
    assert (gone.code, gone.reason) == (Code.CANCELLED, "CANCELLED")
    go_on(harness)
    assert await next(ended) == answer(PROMPT, 5)


@reason("OWNER_CHANGED")
async def test_a_stream_whose_router_lost_the_request_says_where_to_resume(harness: Harness, store: Store) -> None:
    paused(harness, 2)
    stream = harness.stream(5, request_id="taken")
    while (await stream.read()).seq < 2:
        pass
    key = RequestKey("default", "taken")
    await store.requests.adopt(key, Incarnation("other", 1), (await store.requests.read(key)).epoch)
    pass_on(harness.workers[1], 3)
    changed = await error_of(read(stream))
    assert (changed.code, changed.reason) == (Code.ABORTED, "OWNER_CHANGED")
    assert changed.details[pb.ResumePoint].last_seq >= 2
    go_on(harness)


@reason("NO_WORKER")
async def test_a_model_without_workers_is_unavailable(server: PrivateRedis, store: Store) -> None:
    async with scripted(server, store, pools=()) as harness:
        refused = await error_of(harness.stub.Generate(generate_request(5)))
    assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "NO_WORKER")
    assert refused.retry_ms > 0


@reason("TOKENIZER_MISMATCH")
async def test_a_worker_with_another_tokenizer_is_named(server: PrivateRedis, store: Store) -> None:
    async with scripted(server, store, pools=()) as harness, fleet(BOTH[1]) as (worker,):
        worker.registration.token_ids = 0xABC
        await store.workers.register(worker.registration)
        refused = await error_of(harness.stub.Generate(generate_request(5)))
        while refused.reason == "NO_WORKER":  # the router has not read the registration yet
            await asyncio.sleep(0.01)
            refused = await error_of(harness.stub.Generate(generate_request(5)))
    assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "TOKENIZER_MISMATCH")
    assert refused.retry_ms > 0


@reason("WORKERS_LOST")
async def test_a_request_fails_when_all_workers_do(harness: Harness) -> None:
    script = harness.workers[1].script
    harness.workers[0].script.prefill_fails_before_ticket = 99
    script.fails_at = [0] * 99
    before = await error_of(harness.stub.GenerateStream(generate_request(5)).read())
    assert (before.code, before.reason) == (Code.UNAVAILABLE, "WORKERS_LOST")
    assert before.retry_ms > 0
    harness.workers[0].script.prefill_fails_before_ticket = 0
    script.fails_at = [2] * 99
    call = harness.stream(5, request_id="lost")
    after = await error_of(read(call))
    assert (after.code, after.reason) == (Code.ABORTED, "WORKERS_LOST")
    assert after.details[pb.ResumePoint] == pb.ResumePoint(first_seq=0, last_seq=2)
    stored = await harness.stub.GetGeneration(pb.GetGenerationRequest(request_id="lost"))
    assert stored.state == pb.Generation.STATE_FAILED
    assert _details(stored.error)[ErrorInfo].reason == "WORKERS_LOST"
    assert list(stored.result.outputs[0].token_ids) == answer(PROMPT, 2)


@reason("DEADLINE_EXCEEDED")
async def test_a_deadline_that_passes_leaves_what_was_written(harness: Harness) -> None:
    paused(harness, 3)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await read(harness.stub.GenerateStream(generate_request(5, request_id="late"), timeout=3.0))
    assert late.value.code() is Code.DEADLINE_EXCEEDED, "perhaps gRPC's own, which brings no details"
    async with asyncio.timeout(PATIENCE):
        while True:
            stored = await harness.stub.GetGeneration(pb.GetGenerationRequest(request_id="late"))
            if stored.state == pb.Generation.STATE_FAILED:
                break
            await asyncio.sleep(0.02)
    assert stored.error.code == Code.DEADLINE_EXCEEDED.value[0]
    assert _details(stored.error)[ErrorInfo].reason == "DEADLINE_EXCEEDED"
    assert stored.result.outputs[0].finished.finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert list(stored.result.outputs[0].token_ids) == answer(PROMPT, 3)
    again = await error_of(read(harness.stream(5, request_id="late")))
    assert (again.code, again.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    go_on(harness)


@reason("DRAINING")
async def test_a_draining_router_refuses_with_its_reason(harness: Harness) -> None:
    paused(harness, 2)
    call = harness.stream(5)
    await call.read()
    harness.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE):
        while not (await harness.stub.GetServerInfo(pb.GetServerInfoRequest())).draining:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    refused = await error_of(harness.stub.Generate(generate_request(5)))
    assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "DRAINING")
    assert refused.retry_ms > 0
    go_on(harness)
    assert await read(call) == answer(PROMPT, 5)


TENANTS = f"""
[tenants.acme]
tokens = ["{digest(SECRET)}"]
models = ["m"]
max_in_flight = 1

[tenants.umbrella]
tokens = ["{digest(OTHER)}"]
tokens_per_minute = 10
"""


@reason("NO_CREDENTIALS")
@reason("NOT_ALLOWED")
@reason("QUOTA_EXCEEDED")
async def test_unauthenticated_and_over_quota_calls_are_refused_by_reason(
    server: PrivateRedis, store: Store, bare: sync_redis.Redis, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(TENANTS)
    mine, others = bearer(SECRET), bearer(OTHER)
    settings = ("--credentials", str(file), "--models", f"m={MODEL},n={MODEL}", "--resume-grace-ms", "0")
    async with scripted(server, store, *settings) as harness:
        for metadata in (None, bearer("guessed")):
            unknown = await error_of(harness.stub.Generate(generate_request(5), metadata=metadata))
            assert (unknown.code, unknown.reason) == (Code.UNAUTHENTICATED, "NO_CREDENTIALS")
            assert list(unknown.details) == [ErrorInfo], "the reason is not given"
        denied = await error_of(harness.stub.Generate(generate_request(5, model="n"), metadata=mine))
        assert (denied.code, denied.reason) == (Code.PERMISSION_DENIED, "NOT_ALLOWED")

        paused(harness, 2)
        first = harness.stub.GenerateStream(generate_request(5, request_id="r"), timeout=PATIENCE, metadata=mine)
        await first.read()
        full = await error_of(harness.stub.Generate(generate_request(5), metadata=mine))
        assert (full.code, full.reason) == (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
        (used,) = full.details[QuotaFailure].violations
        assert (used.subject, used.description) == ("acme", "in_flight: at most 1, got 2")
        assert dict(full.details[ErrorInfo].metadata) == {"field": "in_flight", "limit": "at most 1", "value": "2"}
        assert full.retry_ms > 0
        first.cancel()
        await until(lambda: not bare.exists(keys.quota("acme")[0]))
        go_on(harness)
        assert await read(harness.stub.GenerateStream(generate_request(5), metadata=mine)) == answer(PROMPT, 5)

        await harness.stub.Generate(generate_request(5, request_id="r"), metadata=others)
        spent = await error_of(harness.stub.Generate(generate_request(5), metadata=others))
        assert (spent.code, spent.reason) == (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
        assert spent.details[ErrorInfo].metadata["field"] == "tokens_per_minute"
        assert 0 < spent.retry_ms <= 60_000
        await until(lambda: not bare.exists(keys.quota("acme")[0], keys.quota("umbrella")[0]))
