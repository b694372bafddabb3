from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc as services
from decant.protos import worker_pb2 as wire
from decant.router.admission.request_size import RequestSize
from decant.router.api.auth import NoAuthentication
from decant.router.api.generation_calls import GenerationCalls
from decant.router.api.service import InferenceService, ServerInfoSource
from decant.router.placement.capacity import PoolCapacity
from decant.router.request.output import Finish
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
from tests.router.factories import ScriptedRegistry, model
from tests.router.fake_script import MODEL
from tests.router.fake_worker import fleet
from tests.router.harness import Core, core, make_request, until, until_ended

P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)


SIZE = RequestSize(3, 5)


def overload(harness: Core, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each request wait ``seconds`` for the prompts before it."""
    tokens = 1_000_000
    capacity = PoolCapacity(
        decode_workers=1,
        batch_limit=256,
        prompt_tokens_per_s=tokens / seconds,
        queued_prompt_tokens=tokens,
        other_sequences=1,
    )
    admission = harness.router.admission.of(MODEL)
    monkeypatch.setattr(admission, "_measure", lambda: capacity)
    admission._state.at = -1e9


async def test_a_request_whose_wait_exceeds_its_time_is_refused_with_the_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(P, D) as workers, core(store, workers, max_queue_seconds=30) as harness:
        overload(harness, 20.0, monkeypatch)
        with pytest.raises(QueueFull) as refused:
            await harness.requests.begin(make_request(seconds=10))
        assert refused.value.retry_after == pytest.approx(10.0), "the longest"
        assert "20.0 s" in str(refused.value)
        assert not workers[0].prefills
        await until_ended(await harness.requests.begin(make_request(seconds=60)))
        workers[1].script.pause_at = 2
        running = await harness.requests.begin(make_request("without a deadline"))
        overload(harness, 31.0, monkeypatch)
        with pytest.raises(QueueFull, match="at most 30 s") as refused:
            await harness.requests.begin(make_request("another"))
        assert refused.value.retry_after == pytest.approx(1.0, abs=0.1)
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


@pytest.mark.slow
async def test_every_call_of_a_burst_ends_with_tokens_or_with_a_named_error(store: Store) -> None:
    calls = 1500
    async with fleet(P, D) as workers, core(store, workers, max_active=8, queue_limit=16) as harness:
        served = Models([model(id=MODEL)])
        about = ServerInfoSource(Incarnation("r", 1), "0", pb.Limits(), lambda: True, lambda: False)
        calls_ = GenerationCalls(served, harness.requests, RequestMetrics(Registry(process=False)))
        service = InferenceService(calls_, harness.requests, about, NoAuthentication(served), cast(Any, None))
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
        overload(harness, 1e6, monkeypatch)
        await harness.requests.check_load(stream.request.key, MODEL, SIZE, 0, Deadline())
        with pytest.raises(QueueFull):
            await harness.requests.check_load(RequestKey("default", "new"), MODEL, SIZE, 0, Deadline())
        with monkeypatch.context() as patch:
            patch.setattr(harness.router.journal_writer, "is_unavailable", True)
            await harness.requests.check_load(stream.request.key, MODEL, SIZE, 0, Deadline())
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
        overload(two, 1e6, monkeypatch)
        key = stream.request.key
        await two.requests.check_load(key, MODEL, SIZE, 0, Deadline())
        again = await two.requests.begin(make_request())
        workers[1].go.set()
        assert isinstance((await until_ended(again)).end, Finish)
        with pytest.raises(AlreadyExists):
            await two.requests.begin(make_request(max_tokens=6))
        with pytest.raises(QueueFull):
            await two.requests.begin(make_request("new"))


class UnboundedCall:
    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()


async def test_a_text_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenize(*_: object, **__: object) -> None:
        raise AssertionError("a refused text was tokenized")

    served = Models([model(id=MODEL)])
    monkeypatch.setattr(type(served.default), "encode", tokenize)
    sizes: list[RequestSize] = []

    class Refusing(ScriptedRegistry):
        async def check_load(
            self, key: RequestKey, model: str, size: RequestSize, priority: int, deadline: Deadline
        ) -> None:
            sizes.append(size)
            raise QueueFull("full", retry_after=1.0)

    about = ServerInfoSource(Incarnation("r", 1), "0", pb.Limits(), lambda: True, lambda: False)
    metrics = RequestMetrics(Registry(process=False))
    requests: Any = Refusing()
    service = InferenceService(
        GenerationCalls(served, requests, metrics), requests, about, NoAuthentication(served), cast(Any, None)
    )
    text = "word " * 4000
    request = pb.GenerateRequest(prompt=text, stopping=pb.StoppingParams(max_tokens=7, ignore_eos=True))
    with pytest.raises(QueueFull):
        await service.Generate(request, UnboundedCall())
    (size,) = sizes
    assert 1 <= size.prompt_tokens <= len(text), "a lower bound from the text's length"
    assert (size.max_tokens, size.min_tokens) == (7, 7)
