from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc as services
from decant.protos import worker_pb2 as wire
from decant.router.admission.wait_prediction import LONG_SECONDS, Wait, WaitPredictor
from decant.router.api.auth import NoAuthentication
from decant.router.api.service import InferenceService, ServerInfoSource
from decant.router.request.token_stream import Finish
from decant.router.text.served_model import Models
from decant.runtime.connections.channel import Deadline, open_channel
from decant.runtime.connections.tls import PeerTls
from decant.runtime.error_details import Reason
from decant.runtime.errors import AlreadyExists, QueueFull, from_call
from decant.runtime.serving.health import Readiness
from decant.runtime.serving.server import Server
from decant.runtime.serving.server_settings import ServerSettings
from decant.runtime.telemetry.metrics import Registry, RequestMetrics
from decant.state.ids import Incarnation, RequestKey
from decant.state.store import Store
from tests.router.factories import model
from tests.router.fake_script import MODEL
from tests.router.fake_worker import fleet
from tests.router.harness import Core, core, make_request, until, until_ended

P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def queue(clock: Clock, each: float, arriving: int, begun: int) -> tuple[WaitPredictor, list[Wait]]:
    waits = WaitPredictor(clock)
    entered = [waits.enter(0) for _ in range(arriving)]
    for wait in entered[:begun]:
        clock.at += each
        wait.mark_scheduled()
        wait.discard()
    return waits, entered[begun:]


def test_a_wait_is_predicted_by_those_of_the_requests_before() -> None:
    clock = Clock()
    waits, left = queue(clock, 0.5, arriving=40, begun=20)
    assert waits.predict(0) == pytest.approx(0.5 + 0.5 * 20, rel=0.01)
    for wait in left[10:]:
        wait.discard()
    assert waits.predict(0) == pytest.approx(0.5 + 0.5 * 10, rel=0.01)


def test_a_prediction_counts_only_requests_ahead() -> None:
    clock = Clock()
    waits, _ = queue(clock, 0.5, arriving=40, begun=20)
    assert waits.predict(1000) == pytest.approx(0.5, rel=0.01)
    assert waits.predict(-1000) == waits.predict(0)


def test_a_prediction_follows_workers_that_became_faster() -> None:
    clock = Clock()
    waits, left = queue(clock, 1.0, arriving=200, begun=20)
    before = waits.predict(0)
    for wait in left[:100]:
        clock.at += 0.01
        wait.mark_scheduled()
    assert waits.predict(0) < before / 2


def test_nothing_is_predicted_at_the_start_of_a_burst() -> None:
    clock = Clock()
    waits, _ = queue(clock, 1.0, arriving=1, begun=1)
    late = [waits.enter(0) for _ in range(1000)]
    assert waits.predict(0) == 0.0
    clock.at += LONG_SECONDS
    assert waits.predict(0) > 0.0
    for wait in late:
        wait.discard()
    assert waits.predict(0) == 0.0
    assert len(waits) == 0


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    clock = Clock()
    waits, _ = queue(clock, 1.0, arriving=50, begun=0)
    clock.at += 100
    assert waits.predict(0) == 0.0


# ---------------------------------------------------------------------------------------- over scripted workers


def predicting(harness: Core, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.router.pool.wait_predictors[MODEL], "predict", lambda priority: seconds)


async def test_a_request_whose_wait_exceeds_its_time_is_refused_with_the_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(P, D) as workers, core(store, workers, max_queue_seconds=30) as harness:
        predicting(harness, 20.0, monkeypatch)
        with pytest.raises(QueueFull) as refused:
            await harness.requests.begin(make_request(seconds=10))
        assert refused.value.retry_after == 20.0
        assert "20.0 s" in str(refused.value)
        assert not workers[0].prefills
        await until_ended(await harness.requests.begin(make_request(seconds=60)))
        workers[1].script.pause_at = 2
        running = await harness.requests.begin(make_request("without a deadline"))
        predicting(harness, 31.0, monkeypatch)
        with pytest.raises(QueueFull, match="at most 30 s") as refused:
            await harness.requests.begin(make_request("another"))
        assert refused.value.retry_after == 31.0
        again = await harness.requests.begin(make_request("without a deadline"))
        assert again is running, "one that was accepted is answered, whatever is predicted now"
        workers[1].go.set()
        await until_ended(running)


async def test_requests_that_wait_for_a_slot_count_against_the_limit(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, queue_limit=2) as harness:
        workers[0].load.takes_prompts = False
        (view,) = [worker.load for worker in harness.router.pool.of(MODEL) if worker.load.role == wire.ROLE_PREFILL]
        await until(lambda: not view.takes_prompts)
        waiting = [await harness.requests.begin(make_request(f"r{place}")) for place in range(2)]
        await until(lambda: len(harness.router.pool.waiting_lines[MODEL]) == 2)
        with pytest.raises(QueueFull, match="2 requests"):
            await harness.requests.begin(make_request("another"))
        workers[0].load.takes_prompts = True
        for stream in waiting:
            await until_ended(stream)
        assert len(harness.router.pool.wait_predictors[MODEL]) == 0


@pytest.mark.slow
async def test_every_call_of_a_burst_ends_with_tokens_or_with_a_named_error(store: Store) -> None:
    calls = 1500
    async with fleet(P, D) as workers, core(store, workers, max_active=8, queue_limit=16) as harness:
        served = Models([model(id=MODEL)])
        about = ServerInfoSource(Incarnation("r", 1), "0", pb.Limits(), lambda: True, lambda: False)
        service = InferenceService(
            served, harness.requests, about, RequestMetrics(Registry(process=False)), NoAuthentication(served)
        )
        settings = ServerSettings(port=0, drain_seconds=1.0)
        server = Server([service.service()], settings, Readiness(), Registry(process=False))
        await server.start()
        running = asyncio.create_task(server.run())
        async with open_channel(server.address, PeerTls()) as channel:
            stub = services.InferenceServiceStub(channel)
            outcomes = await asyncio.gather(*(outcome(stub, place) for place in range(calls)))
        server.shutdown.request("the test ends")
        server.shutdown.request("the test ends")
        await asyncio.wait([running])
    assert set(outcomes) <= {"tokens", Reason.QUEUE_FULL}, {each: outcomes.count(each) for each in set(outcomes)}
    assert outcomes.count("tokens") >= 16


async def outcome(stub: Any, place: int) -> str:
    request = pb.GenerateRequest(
        request_id=f"burst-{place}",
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        stopping=pb.StoppingParams(max_tokens=2),
    )
    try:
        answer = await stub.Generate(request, timeout=120)
    except grpc.aio.AioRpcError as error:
        refusal = from_call(error)
        if refusal.reason is Reason.QUEUE_FULL:
            assert refusal.retry_after
            return Reason.QUEUE_FULL
        return f"{error.code().name} {refusal.reason} {error.details()}"
    assert answer.usage.completion_tokens == 2
    return "tokens"


async def test_a_known_request_is_not_refused_before_it_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 1
        stream = await harness.requests.begin(make_request())
        predicting(harness, 1e6, monkeypatch)
        await harness.requests.check_wait(stream.request.key, MODEL, 0, Deadline())
        with pytest.raises(QueueFull):
            await harness.requests.check_wait(RequestKey("default", "new"), MODEL, 0, Deadline())
        with monkeypatch.context() as patch:
            patch.setattr(harness.router.journal_writer, "is_unavailable", True)
            await harness.requests.check_wait(stream.request.key, MODEL, 0, Deadline())
        workers[1].go.set()
        await until_ended(stream)


@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "open"])
async def test_a_request_that_another_router_accepted_is_not_refused_for_its_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    async with fleet(P, D) as workers, core(store, workers, id="one") as one, core(store, workers, id="two") as two:
        if not is_ended:
            workers[1].script.pause_at = 2
        stream = await one.requests.begin(make_request())
        if is_ended:
            await until_ended(stream)
            await until(lambda: one.store_is_done)
        predicting(two, 1e6, monkeypatch)
        key = stream.request.key
        await two.requests.check_wait(key, MODEL, 0, Deadline())
        again = await two.requests.begin(make_request())
        workers[1].go.set()
        assert isinstance((await until_ended(again)).end, Finish)
        with pytest.raises(AlreadyExists):
            await two.requests.begin(make_request(max_tokens=6))
        with pytest.raises(QueueFull):
            await two.requests.begin(make_request("new"))
