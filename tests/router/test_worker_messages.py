from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.handoff.errors import HandoffFailed
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import WorkerRegistration
from decant.router.attempt.failures import AttemptFailed, error_for
from decant.router.placement.worker_load import WorkerLoad
from decant.router.request.output import Finish
from decant.router.request.token_stream import TokenStream
from decant.router.workers.session import WorkerSession
from decant.router.workers.subscription import RunSubscription
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, ServiceError, Unavailable
from decant.runtime.packed import pack
from decant.state.ids import Incarnation
from decant.state.store import Store
from tests.router import fake_prefill, fake_script, fake_session
from tests.router.factories import begin_writing
from tests.router.fake_script import logprobs_from_wire
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import Core, core, make_request, until, until_ended, until_written
from tests.router.run_recorder import RunRecorder

P, D, D2 = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE), ("d2", wire.ROLE_DECODE)
SHOWN = pb.ResponseOptions(logprobs=1)
LAST = (1 << 32) - 1


class Views:
    def __init__(self) -> None:
        self.load = WorkerLoad(WorkerRegistration())

    def on_opened(self, session: WorkerSession) -> None:
        self.load.reset()

    def on_heartbeat(self, session: WorkerSession, heartbeat: wire.Heartbeat) -> None:
        self.load.apply_heartbeat(heartbeat)


@asynccontextmanager
async def unconnected_session() -> AsyncIterator[WorkerSession]:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        yield WorkerSession(wire.Peer(id="r"), wire.Peer(id="w"), channel, Views())


@pytest.fixture
async def session() -> AsyncIterator[WorkerSession]:
    async with unconnected_session() as session:
        yield session


def follow(
    session: WorkerSession, request: str, slot: int, *, logprobs: int | None = None
) -> tuple[TokenStream, list[Any]]:
    shown = pb.ResponseOptions() if logprobs is None else pb.ResponseOptions(logprobs=logprobs)
    stream, recorder = TokenStream(make_request(request, max_tokens=1000, shown=shown)), RunRecorder()
    run = wire.Run(request=request, epoch=1, attempt=1)
    following = RunSubscription(wire.Start(run=run), [begin_writing(stream)], recorder)
    session.start(following)
    session.on_message(wire.WorkerMessage(decode_started=wire.DecodeStarted(run=run, slots=[wire.Slot(slot=slot)])))
    recorder.events.clear()
    return stream, recorder.events


def more_ids_than_logprobs(found: wire.TokenLogprobs) -> None:
    found.top_ids.append(9)


def fewer_ids_than_logprobs(found: wire.TokenLogprobs) -> None:
    del found.top_ids[:]


def an_id_that_no_token_has(found: wire.TokenLogprobs) -> None:
    found.top_ids[0] = LAST


FAULTS = [more_ids_than_logprobs, fewer_ids_than_logprobs, an_id_that_no_token_has]


def spoil(patch: pytest.MonkeyPatch, fault: Callable[[wire.TokenLogprobs], None], times: int) -> None:
    real, left = fake_script.output_logprobs, iter(range(times))

    def odd(work: wire.EngineRequest, entry: int, token: int) -> wire.TokenLogprobs | None:
        found = real(work, entry, token)
        if found is not None and next(left, None) is not None:
            fault(found)
        return found

    for module in (fake_prefill, fake_session):
        patch.setattr(module, "output_logprobs", odd)


async def all_goes_on(harness: Core) -> None:
    stream = await harness.answer(make_request("another"))
    assert isinstance(stream.end, Finish)
    assert stream.resumable


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("pools", [(P, D), (D,)])
async def test_a_worker_whose_logprobs_are_malformed_ends_that_request_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch, fault: Callable[[wire.TokenLogprobs], None], pools: Any
) -> None:
    spoil(monkeypatch, fault, times=1000)
    async with fleet(*pools) as workers, core(store, workers) as harness:
        with suppress(ServiceError):
            stream = await harness.answer(make_request(shown=SHOWN))
            assert isinstance(stream.end, Aborted | Unavailable)
            assert stream.end.reason is Reason.WORKERS_LOST
            assert len(stream.outputs[0].logprobs) == len(stream.outputs[0].tokens)
        await all_goes_on(harness)


@pytest.mark.parametrize("fault", FAULTS)
async def test_one_malformed_message_costs_an_attempt_and_not_the_request(
    store: Store, monkeypatch: pytest.MonkeyPatch, fault: Callable[[wire.TokenLogprobs], None]
) -> None:
    spoil(monkeypatch, fault, times=1)
    async with fleet(D, D2) as workers, core(store, workers) as harness:
        stream = await harness.answer(make_request(shown=SHOWN))
        assert isinstance(stream.end, Finish)
        assert stream.trace.attempts == 2
        assert stream.outputs[0].logprobs.entries() == [
            logprobs_from_wire(token, 1) for token in stream.outputs[0].tokens
        ]


async def test_a_token_without_requested_logprobs_is_never_sent(session: WorkerSession) -> None:
    stream, events = follow(session, "r", 0, logprobs=1)
    session.on_message(wire.WorkerMessage(frame=wire.Frame(slots=pack([0]), positions=pack([3]), tokens=pack([7]))))
    assert not stream.outputs[0].tokens
    (failed,) = events
    assert failed.failure.cause == wire.CAUSE_CORRUPT


@pytest.mark.parametrize(("position", "token"), [(3, 1 << 24), (3, LAST), (3 + 1000, 7)])
async def test_a_token_that_the_request_cannot_have_fails_its_run_alone(
    session: WorkerSession, position: int, token: int
) -> None:
    stream, events = follow(session, "r", 0)
    other, others = follow(session, "other", 1)
    stream.outputs[0].tokens += [5] * (position - 3)
    frame = wire.Frame(slots=pack([0, 1]), positions=pack([position, 3]), tokens=pack([token, 8]))
    session.on_message(wire.WorkerMessage(frame=frame))
    assert len(stream.outputs[0].tokens) == position - 3
    assert [event.failure.cause for event in events] == [wire.CAUSE_CORRUPT]
    assert (other.outputs[0].tokens, others) == ([8], [])


async def test_an_end_after_the_last_possible_token_fails_the_run_instead_of_waiting_for_more(
    session: WorkerSession,
) -> None:
    _, events = follow(session, "r", 0)
    end = wire.OutputEnd(reason=wire.OutputEnd.REASON_LENGTH, end_position=LAST)
    session.on_message(wire.WorkerMessage(ended=wire.Ended(run=wire.Run(request="r", epoch=1, attempt=1), end=end)))
    assert [event.failure.cause for event in events] == [wire.CAUSE_CORRUPT]
    assert not session.is_busy


@pytest.mark.slow
async def test_logprobs_keep_no_frame_in_memory(session: WorkerSession) -> None:
    stream, _ = follow(session, "r", 0, logprobs=1)
    others = [
        wire.TokenLogprobs(entry=entry, logprob=-1, rank=1, top_ids=range(20), top_logprobs=[-1.0] * 20)
        for entry in range(1, 500)
    ]
    mine = wire.TokenLogprobs(entry=0, logprob=-1, rank=1, top_ids=[1], top_logprobs=[-1])

    def step(k: int) -> None:
        frame = wire.Frame(slots=pack([0]), positions=pack([3 + k]), tokens=pack([7]), logprobs=[mine, *others])
        frame.slots += pack([1] * len(others))
        frame.positions += pack([3] * len(others))
        frame.tokens += pack([7] * len(others))
        session.on_message(wire.WorkerMessage.FromString(wire.WorkerMessage(frame=frame).SerializeToString()))

    for k in range(50):
        step(k)
    before = psutil.Process().memory_info().rss
    for k in range(50, 450):
        step(k)
    grown = psutil.Process().memory_info().rss - before
    assert len(stream.outputs[0].logprobs) == 450
    assert grown < 20 << 20, "400 frames of about 150 KiB"


# -------------------------------------------------------------------------------------------- any message


RUNS = [wire.Run(request=request, epoch=1, attempt=1) for request in ("a", "b", "unknown")]


class Maker:
    def __init__(self, seed: int, runs: list[wire.Run]) -> None:
        self._random = random.Random(seed)
        self._runs = runs

    def fill(self, message: Message, depth: int = 0) -> None:
        if isinstance(message, wire.Run) and self._random.random() < 0.8:
            message.CopyFrom(self._random.choice(self._runs))
            return
        fields: list[Any] = list(message.DESCRIPTOR.fields)
        oneofs: dict[str, str] = {}
        for field in self._random.sample(fields, len(fields)):
            if field.containing_oneof is not None:
                oneofs[field.containing_oneof.name] = field.name
        for field in fields:
            oneof = field.containing_oneof
            if oneof is not None and len(oneof.fields) > 1 and oneofs[oneof.name] != field.name:
                continue
            if self._random.random() < (0.9 if depth < 2 else 0.6):
                self._set(message, field, depth)
        if isinstance(message, wire.Frame) and self._random.random() < 0.7:
            self._pair(message)

    def _pair(self, frame: wire.Frame) -> None:
        count = self._random.randrange(4)
        frame.slots = pack([self._random.choice([0, 1, 2]) for _ in range(count)])
        frame.positions = pack([self._random.choice([0, 3, 3, 4, 5, LAST]) for _ in range(count)])
        frame.tokens = pack([self._random.choice([7, 8, 1 << 24, LAST]) for _ in range(count)])

    def _set(self, message: Message, field: Any, depth: int) -> None:
        count = self._random.choice([0, 1, 1, 2, 5]) if field.is_repeated else 1
        if field.message_type is None:
            values = [self._value(field) for _ in range(count)]
            if field.is_repeated:
                getattr(message, field.name).extend(values)
            else:
                setattr(message, field.name, values[0])
            return
        for _ in range(count if depth < 4 else 0):
            part = getattr(message, field.name)
            self.fill(part.add() if field.is_repeated else part, depth + 1)

    def _value(self, field: Any) -> Any:
        pick = self._random.choice
        if field.enum_type is not None:
            return pick([*(value.number for value in field.enum_type.values), 99])
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                arrays = [pack([pick([0, 1, 3, 4, LAST]) for _ in range(size)]) for size in (1, 2, 2, 3)]
                return pick([b"", b"x", self._random.randbytes(7), bytes(8), *arrays])
            case FieldDescriptor.CPPTYPE_STRING:
                return pick(["", "x", "é" * 50])
            case FieldDescriptor.CPPTYPE_BOOL:
                return pick([False, True])
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return pick([0.0, -1.5, float("nan"), float("-inf")])
            case FieldDescriptor.CPPTYPE_UINT64:
                return pick([0, 1, LAST, (1 << 64) - 1])
            case FieldDescriptor.CPPTYPE_UINT32:
                return pick([0, 1, 2, 3, 4, 5, 1 << 24, LAST])
            case _:
                return pick([0, 1, 2, 3, 4, 5, 1 << 24])


def messages(seed: int, runs: list[wire.Run], count: int) -> Iterator[wire.WorkerMessage]:
    maker = Maker(seed, runs)
    for _ in range(count):
        message = wire.WorkerMessage()
        maker.fill(message)
        yield message


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_session_handles_any_message_or_breaks_cleanly(seed: int) -> None:
    async def main() -> None:
        async with unconnected_session() as session:
            streams = [follow(session, request, slot, logprobs=1)[0] for slot, request in enumerate("ab")]
            for message in messages(seed, RUNS, 40):
                with suppress(ValueError):
                    session.on_message(message)
            for stream in streams:
                assert len(stream.outputs[0].logprobs) == len(stream.outputs[0].tokens) <= 1000

    asyncio.run(main())


@pytest.mark.rule(
    "malformed-message",
    "router/request/output.py:Output.write",
    "router/workers/session_runs.py:SessionRuns._reject",
    "router/workers/session.py:WorkerSession._run_connection",
)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_the_router_survives_any_message_of_a_worker(store: Store, seed: int) -> None:
    async with (
        fleet(D, D2) as workers,
        core(store, workers, resume_grace_ms=0, max_queue_seconds=1e9) as harness,  # forecasts believe reported loads
    ):
        for worker in workers:
            worker.script.pause_at = 2
        stream = await harness.requests.begin(make_request(max_tokens=50, shown=SHOWN))
        await until_written(stream, 2)
        for number, message in enumerate(messages(seed, [*_runs(workers), *RUNS], 60)):
            if stream.end is not None:
                stream = await _again(harness, number)
            for worker in workers:
                worker._send(message)
            await asyncio.sleep(0.005)
        for worker in workers:
            worker.script.pause_at = None
            worker.go.set()
        await until_ended(stream)
        await until(lambda: any(worker.is_usable for worker in harness.router.pool.of(fake_script.MODEL)))
        await all_goes_on(harness)


def _runs(workers: list[FakeWorker]) -> list[wire.Run]:
    return [run.run for worker in workers for run in worker.runs.values()]


async def _again(harness: Core, number: int) -> TokenStream:
    while True:
        with suppress(ServiceError):
            return await harness.requests.begin(make_request(f"r{number}", max_tokens=50, shown=SHOWN))
        await asyncio.sleep(0.05)


async def test_a_role_that_only_a_newer_build_knows_ends_no_router(store: Store) -> None:
    async with fleet(P, D, D2) as workers:
        workers[2].registration.role = 99  # type: ignore[assignment]
        async with core(store, workers) as harness:
            assert isinstance((await harness.answer(make_request())).end, Finish)


def test_a_cause_that_only_a_newer_build_knows_fails_an_attempt() -> None:
    failure = wire.Failure(cause=99, detail="why")  # type: ignore[arg-type]
    error = error_for(failure, Incarnation("w", 1))
    assert isinstance(error, AttemptFailed)
    assert str(error) == "99: why"
    assert str(HandoffFailed.of(failure)) == "99: why"
