"""A router's core over fake workers and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.admission.control import AdmissionControl
from decant.router.admission.quota import QuotaLeases
from decant.router.execution.journal_writer import JournalWriter
from decant.router.execution.registry import RequestRegistry
from decant.router.execution.services import RouterServices
from decant.router.kv_events.publisher import make_kv_events
from decant.router.request.output import Finish
from decant.router.request.stored import RestoreRequest
from decant.router.request.token_stream import TokenStream
from decant.router.request.valid_request import ValidRequest
from decant.router.settings import RouterSettings
from decant.router.text.output_text import OutputOptions
from decant.router.timings import RouterTimings
from decant.router.workers.pool import WorkerPool
from decant.runtime.background import BackgroundTask
from decant.runtime.connections.channel import Deadline
from decant.runtime.connections.peer import new_peer
from decant.runtime.connections.tls import PeerTls
from decant.runtime.errors import ServiceError
from decant.runtime.packed import pack
from decant.runtime.telemetry.metrics import Registry, RequestMetrics
from decant.state.ids import Incarnation, RequestKey
from decant.state.owned import OwnedRequest, StoredRequest
from decant.state.quota import TenantLimits
from decant.state.store import Store
from tests.router.fake_script import MODEL, TOKENIZER
from tests.router.fake_worker import FakeWorker

P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
P2, D2 = ("p2", wire.ROLE_PREFILL), ("d2", wire.ROLE_DECODE)
"""Workers of a fleet: id and role."""

QUEUED, PREFILLING = Generation.STATE_QUEUED, Generation.STATE_PREFILLING
HANDING_OFF, DECODING = Generation.STATE_HANDING_OFF, Generation.STATE_DECODING
SUCCEEDED, FAILED, CANCELLED = Generation.STATE_SUCCEEDED, Generation.STATE_FAILED, Generation.STATE_CANCELLED

PATIENCE = 60.0
"""Seconds until a test gives up."""


def make_request(
    id: str = "r",
    prompt: tuple[int, ...] = (1, 2, 3),
    max_tokens: int = 5,
    *,
    seconds: float | None = None,
    **more: Any,
) -> ValidRequest:
    work = wire.EngineRequest(
        model=MODEL,
        prompt=pack(list(prompt)),
        outputs=[wire.OutputPrefix(output=0)],
        stopping=wire.Stopping(max_tokens=max_tokens, stop_token_ids=more.pop("stop_token_ids", ())),
        sampling=wire.Sampling(seed=4),
    )
    if more.pop("capped_by_context_length", False):
        work.stopping.capped_by_context_length = True
    shown: pb.ResponseOptions = more.pop("shown", pb.ResponseOptions())
    output_options = OutputOptions()
    if shown.HasField("logprobs"):
        work.logprobs = shown.logprobs
        output_options = replace(output_options, logprobs=shown.logprobs)
    if shown.HasField("prompt_logprobs"):
        work.prompt_logprobs = shown.prompt_logprobs
        output_options = replace(output_options, prompt_logprobs=shown.prompt_logprobs)
    values: dict[str, Any] = {
        "key": RequestKey("default", id),
        "payload": pb.GenerateRequest(
            request_id=id,
            token_ids=pb.TokenIds(ids=prompt),
            stopping=pb.StoppingParams(max_tokens=max_tokens),
            response=shown,
        ),
        "engine_request": work,
        "prompt_tokens": len(prompt),
        "output_options": output_options,
        "deadline": Deadline.after(seconds),
        "id_generated": False,
        "accepted_at": asyncio.get_running_loop().time(),
    }
    return ValidRequest(**values | more)


async def restore_request(found: StoredRequest) -> ValidRequest:
    payload, record = found.payload, found.record
    left = record.deadline.ToDatetime(UTC) - datetime.now(UTC) if record.HasField("deadline") else None
    made = make_request(
        found.key.id,
        tuple(payload.token_ids.ids),
        payload.stopping.max_tokens,
        seconds=None if left is None else left.total_seconds(),
        shown=payload.response,
    )
    return replace(made, payload=payload)


@dataclass
class Core:
    router: RouterServices
    requests: RequestRegistry

    async def answer(self, request: ValidRequest) -> TokenStream:
        return await until_ended(await self.requests.begin(request))

    def owned(self, id: str) -> OwnedRequest:
        return self.requests.executions.open[RequestKey("default", id)].owned

    @property
    def store_is_done(self) -> bool:
        return not self.router.journal_writer._running and not self.router.journal_writer._ended


async def until_ended(stream: TokenStream) -> TokenStream:
    async with asyncio.timeout(PATIENCE):
        while stream.end is None:
            await stream.wait_beyond(stream.num_tokens)
    return stream


async def until_written(stream: TokenStream, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        await stream.wait_beyond(count - 1)


async def begin_paused(
    harness: Core, worker: FakeWorker, tokens: int, *, request: ValidRequest | None = None, is_stored: bool = False
) -> TokenStream:
    worker.script.pause_at = tokens
    request = request or make_request()
    stream = await harness.requests.begin(request)
    await until_written(stream, tokens)
    if is_stored:
        await until(lambda: harness.owned(request.key.id).synced_entries == tokens)
    return stream


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - what tests look at has no event of its own
            await asyncio.sleep(0.005)


def jump(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Advance the event loop's clock: a deadline passes, however long it took to get there."""
    loop = asyncio.get_running_loop()
    before = loop.time
    patch.setattr(loop, "time", lambda: before() + seconds)


@asynccontextmanager
async def core(
    store: Store,
    workers: Sequence[FakeWorker],
    *,
    id: str = "router",
    restore: RestoreRequest = restore_request,
    quotas: Mapping[str, TenantLimits] = MappingProxyType({}),
    timings: RouterTimings = RouterTimings(),
    **settings: Any,
) -> AsyncIterator[Core]:
    """Run a router that has found the registered workers; at its end nothing may be left anywhere."""
    registrations = [await store.workers.register(worker.registration) for worker in workers]
    options = {"models": (MODEL,), "flush_ms": 10, "handoff_min_tokens": 0, **settings}
    peer = new_peer(id)
    tokenizers, handoff_min_tokens = {MODEL: {TOKENIZER}}, options["handoff_min_tokens"]
    pool = WorkerPool(peer, store.workers, tokenizers, PeerTls(), handoff_min_tokens, timings.workers)
    journal_writer = JournalWriter(store.requests, options["flush_ms"])
    checked = RouterSettings(**options)
    admission = AdmissionControl(checked, tokenizers, pool.capacity)
    pool.on_capacity_changed = admission.grant
    quota_leases = QuotaLeases(store.quotas, quotas)
    metrics = RequestMetrics(Registry(process=False))
    kv_events = make_kv_events(checked.kv_event_bytes, pool.membership.prefix_indexes)
    parts = (peer, checked, admission, pool, store.requests, journal_writer, quota_leases, restore, metrics)
    router = RouterServices(*parts, ended_s=3600.0, timings=timings, kv_events=kv_events)
    requests = RequestRegistry(router)
    async with AsyncExitStack() as stack:
        for close, task in (
            (journal_writer.close, BackgroundTask("journal writer", journal_writer.run)),
            (pool.membership.close, BackgroundTask("pool", pool.membership.run)),
            (quota_leases.close, BackgroundTask("quota_leases", quota_leases.run)),
        ):
            stack.push_async_callback(close)
            await stack.enter_async_context(task)
        stack.push_async_callback(requests.close)
        async with asyncio.timeout(PATIENCE):
            await pool.membership.wait_settled()
        yield Core(router, requests)
        async with asyncio.timeout(PATIENCE):
            await requests.drain()
        assert admission.active == 0
        assert not quota_leases._held
        assert not pool.tickets
        assert not any(pool.waiting_lines.values())
        for worker in list(pool.membership):
            assert not worker.session.is_busy
            assert not worker.session._runs.table.by_slot
            assert worker.load.queued_tokens.own == worker.load.sequences.own == 0
    del registrations


def tokens_of(stream: TokenStream) -> list[int]:
    assert isinstance(stream.end, Finish), stream.end
    return stream.outputs[0].tokens


def ended_run() -> Finish:
    return Finish(pb.FINISH_REASON_LENGTH)


async def read_stored(store: Store, harness: Core, id: str = "r") -> StoredRequest:
    async with asyncio.timeout(PATIENCE):
        await harness.requests.drain()
    return await store.requests.read(RequestKey("default", id))


def states(found: StoredRequest) -> list[int]:
    return [each.state for each in found.record.transitions]


def incarnation_of(worker: FakeWorker) -> Incarnation:
    return Incarnation.of(worker.registration.peer)


def pass_on(worker: FakeWorker, until: int) -> None:
    worker.script.pause_at = until
    worker.go.set()
    worker.go = asyncio.Event()


def error_of(stream: TokenStream) -> ServiceError:
    assert isinstance(stream.end, ServiceError)
    return stream.end


async def nothing_is_left_at(workers: list[FakeWorker]) -> None:
    prefill, decode = workers
    await until(lambda: not prefill.prefilling and not decode.runs)


def raising(error: Exception) -> Any:
    async def raises(*_: object, **__: object) -> None:
        raise error

    return raises
