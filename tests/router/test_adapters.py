"""Requests with an adapter go to workers that have it, in the revision that it had when the request was accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.vllm import vllm_engine_pb2 as vllm
from decant.router.execution.registry import AcceptedAdapter
from decant.router.recovery.restore import make_request_restorer
from decant.router.request.valid_request import ValidRequest
from decant.router.text.served_model import Models
from decant.router.timings import RouterTimings, WorkerTimings
from decant.router.vllm.metadata import MODEL
from decant.runtime.error_details import Reason
from decant.runtime.errors import NotFound
from decant.state.store import Store
from tests.router.factories import STOPPED, context_length, tiny, valid, write
from tests.router.fake_script import answer
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import D2, P2, PATIENCE, Core, D, P, core, make_request, read_stored, tokens_of, until
from tests.router.service_harness import all_of, error_of_call, generate_request, harness

PROMPT = [1, 2, 3]
OLD, NEW = (wire.Adapter(name="pirate", digest=digest, rank=8) for digest in ("old", "new"))
POET = wire.Adapter(name="poet", digest="poet's", rank=4)


def adapted(id: str = "r", adapter: wire.Adapter = OLD) -> ValidRequest:
    made = make_request(id)
    made.engine_request.adapter = adapter.digest
    made.payload.lora_name = adapter.name
    return made


def give(worker: FakeWorker, *adapters: wire.Adapter) -> None:
    del worker.registration.adapters[:]
    worker.registration.adapters.extend(adapters)


def listed(harness: Core) -> dict[str, str]:
    return {name: adapter.digest for name, adapter in harness.requests.adapters("m").items()}


async def test_only_workers_with_the_adapter_get_its_requests(store: Store) -> None:
    async with fleet(P, P2, D, D2) as workers:
        give(workers[1], OLD, POET)
        give(workers[2], OLD)
        async with core(store, workers) as harness:
            for number in range(4):
                stream = await harness.answer(adapted(str(number)))
                assert tokens_of(stream) == answer(PROMPT, 5)
                assert (stream.trace.prefill_worker, stream.trace.decode_worker) == ("p2", "d")
                assert {start.engine_request.adapter for start in workers[2].starts} == {"old"}


async def test_without_a_decode_worker_that_has_it_a_prefill_worker_computes_it_all(store: Store) -> None:
    async with fleet(P, D) as workers:
        give(workers[0], OLD)
        async with core(store, workers) as harness:
            stream = await harness.answer(adapted())
            assert tokens_of(stream) == answer(PROMPT, 5)
            assert not workers[1].starts


async def test_a_lost_worker_is_replaced_by_another_one_with_the_adapter(store: Store) -> None:
    async with fleet(D, D2, ("d3", wire.ROLE_DECODE)) as workers:
        for worker in workers[:2]:
            give(worker, OLD)
            worker.script.fails_at = [2]
        give(workers[2], NEW)
        async with core(store, workers) as harness:
            assert tokens_of(await harness.answer(adapted())) == answer(PROMPT, 5)
            assert not workers[2].starts, "it has another revision"


async def test_a_worker_that_has_it_no_more_refuses_and_another_one_is_tried(store: Store) -> None:
    async with fleet(D, D2) as workers:
        for worker in workers:
            give(worker, OLD)
        async with core(store, workers) as harness:
            workers[0].script.refuse = [wire.CAUSE_UNKNOWN_ADAPTER] * 100
            for number in range(3):
                stream = await harness.answer(adapted(str(number)))
                assert (tokens_of(stream), stream.trace.decode_worker) == (answer(PROMPT, 5), "d2")
            assert not any(seen.is_avoided for seen in harness.router.pool.snapshot("m", frozenset()))


async def test_a_request_that_waits_for_its_adapter_keeps_no_other_one_waiting(store: Store) -> None:
    timings = RouterTimings(workers=WorkerTimings(no_worker_timeout_s=10 * PATIENCE))
    async with fleet(D) as workers, core(store, workers, timings=timings) as harness:
        waiting = await harness.requests.begin(adapted("waits"))
        await until(lambda: len(harness.router.pool.waiting_lines["m"]) == 1)
        for number in range(3):
            stream = await asyncio.wait_for(harness.answer(make_request(str(number))), PATIENCE / 2)
            assert stream.trace.decode_worker == "d"
        assert waiting.end is None
        await harness.requests.cancel(waiting.request.key)


async def test_a_request_whose_adapter_was_removed_ends_with_a_typed_error(store: Store) -> None:
    timings = RouterTimings(workers=WorkerTimings(no_worker_timeout_s=0.01))
    async with fleet(D) as workers:
        give(workers[0], POET)
        async with core(store, workers, timings=timings) as harness:
            stream = await harness.answer(adapted())
            assert isinstance(stream.end, NotFound)
            assert str(stream.end) == "adapter: one of poet, got pirate"


@pytest.mark.parametrize("roles", [[D], [P, D], [("d1", wire.ROLE_DECODE), D2, ("d3", wire.ROLE_DECODE), D]])
async def test_a_request_whose_workers_have_all_dropped_its_adapter_is_not_found(
    store: Store, roles: Sequence[tuple[str, wire.Role]]
) -> None:
    timings = RouterTimings(workers=WorkerTimings(no_worker_timeout_s=0.05))
    async with fleet(*roles) as workers:
        for worker in workers:  # the directory does not know yet that they have dropped it
            give(worker, OLD, POET)
            worker.script.refuse = [wire.CAUSE_UNKNOWN_ADAPTER] * 100
        async with core(store, workers, timings=timings) as harness:
            stream = await harness.answer(adapted())
            assert isinstance(stream.end, NotFound)
            assert str(stream.end) == "adapter: one of poet, got pirate"
            for worker in workers:
                worker.script.refuse = []
            other = await harness.answer(adapted("other", POET))
            assert tokens_of(other) == answer(PROMPT, 5), "they still take requests without it"


async def test_a_worker_with_an_adapter_that_it_refused_gets_its_requests_once_it_is_listed_again(store: Store) -> None:
    async with fleet(D, P) as workers:
        give(workers[0], OLD)
        workers[0].script.refuse = [wire.CAUSE_UNKNOWN_ADAPTER]
        async with core(store, workers) as harness:
            stream = await harness.requests.begin(adapted())
            await until(lambda: not listed(harness))
            give(workers[0], POET, OLD)
            await store.workers.register(workers[0].registration)
            await until(lambda: stream.end is not None)
            assert tokens_of(stream) == answer(PROMPT, 5)


async def test_a_request_ends_if_workers_refuse_its_adapter_whenever_they_are_listed(
    store: Store,
) -> None:
    async with fleet(D, D2) as workers, core(store, workers) as harness:
        for worker in workers:
            worker.script.refuse = [wire.CAUSE_UNKNOWN_ADAPTER] * 10_000
        stream = await harness.requests.begin(adapted())

        async def list_again() -> None:
            for number in count():
                for worker in workers:
                    give(worker, OLD, wire.Adapter(name="other", digest=str(number)))
                    await store.workers.register(worker.registration)
                await asyncio.sleep(0.01)

        listing = asyncio.create_task(list_again())
        try:
            await until(lambda: stream.end is not None)
        finally:
            listing.cancel()
        assert isinstance(stream.end, NotFound)


async def test_workers_that_have_the_adapter_in_memory_are_preferred_until_they_have_much_to_do(store: Store) -> None:
    loaded = wire.Adapter(name="pirate", digest="old", in_memory=True)
    async with fleet(P, P2, D, D2) as workers:
        for worker, adapter in zip(workers, (OLD, loaded, OLD, loaded), strict=True):
            give(worker, adapter)
        async with core(store, workers) as harness:
            for number in range(3):
                stream = await harness.answer(adapted(str(number)))
                assert (stream.trace.prefill_worker, stream.trace.decode_worker) == ("p2", "d2")
            pool = harness.router.pool
            (busy,) = [worker for worker in pool.of("m") if worker.incarnation.id == "p2"]
            busy.load.add(0, 4096)
            assert (await harness.answer(adapted("other"))).trace.prefill_worker == "p"
            busy.load.add(0, -4096)


async def test_a_name_stands_for_the_revision_that_most_workers_have(store: Store) -> None:
    async with fleet(P, D, D2) as workers:
        for worker, adapter in zip(workers, (OLD, NEW, NEW), strict=True):
            give(worker, adapter)
        async with core(store, workers) as harness:
            assert listed(harness) == {"pirate": "new"}


async def test_a_router_learns_which_adapters_a_worker_has_now(store: Store) -> None:
    async with fleet(D) as workers:
        give(workers[0], OLD)
        async with core(store, workers) as harness:
            assert listed(harness) == {"pirate": "old"}
            give(workers[0], NEW, POET)
            await store.workers.register(workers[0].registration)
            await until(lambda: listed(harness) == {"pirate": "new", "poet": "poet's"})


async def test_a_restored_request_keeps_the_revision_that_it_was_accepted_with(store: Store) -> None:
    request = await valid(lora_name="pirate", request_id="r", token_ids=pb.TokenIds(ids=PROMPT))
    request.engine_request.model, request.engine_request.adapter = "m", "old"
    async with fleet(D) as workers:
        give(workers[0], OLD)
        async with core(store, workers) as harness:
            await harness.answer(replace(request, prompt_tokens=len(PROMPT)))
            stored = await read_stored(store, harness)
    stored.record.model = tiny().id
    restored = await make_request_restorer(Models([tiny()]), context_length(2048))(stored)
    assert restored.engine_request.adapter == "old"


NAMES: list[tuple[dict[str, str], str]] = [
    ({"lora_name": "pirate"}, "old"),
    ({"model": "pirate"}, "old"),
    ({"model": "poet"}, "poet's"),
    ({}, ""),
]


@pytest.mark.parametrize(("fields", "digest"), NAMES)
async def test_scores_and_embeddings_are_those_of_the_named_adapter(fields: dict[str, Any], digest: str) -> None:
    async with harness() as service:
        service.requests.known_adapters = [OLD, POET]
        ids = pb.TokenIds(ids=PROMPT)
        score = pb.ScoreRequest(token_ids=ids, continuations=[pb.Continuation(token_ids=ids)], **fields)
        embed = pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=ids)], **fields)
        for response in (await service.stub.Score(score), await service.stub.Embed(embed)):
            assert response.model == tiny().id
        if "lora_name" not in fields:
            by_vllm = vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=PROMPT))
            await service.vllm.Embed(by_vllm, metadata=((MODEL, fields.get("model", "")),))
        for batch in service.requests.prompts.batches:
            assert {request.adapter for request in batch.requests} == {digest}
            assert batch.adapter_name == (fields.get("lora_name") or fields.get("model", ""))
        del service.requests.known_adapters[:]
        if digest:
            for call in (service.stub.Score(score), service.stub.Embed(embed)):
                assert isinstance(await error_of_call(call), NotFound)


async def test_what_a_request_was_accepted_with_is_known_here_and_from_the_store(store: Store) -> None:
    accepted = AcceptedAdapter("m", "pirate", "old")
    async with fleet(D) as workers:
        give(workers[0], OLD)
        async with core(store, workers) as harness:
            key = (await harness.answer(adapted())).request.key
            assert await harness.requests.find_accepted(key) == accepted
            await read_stored(store, harness)
        async with core(store, workers) as another:
            assert await another.requests.find_accepted(key) == accepted
            assert await another.requests.find_accepted(key._replace(id="absent")) is None


@pytest.mark.parametrize(("fields", "digest"), NAMES)
async def test_an_adapter_is_named_beside_its_model_or_as_one(fields: dict[str, str], digest: str) -> None:
    async with harness() as service:
        service.requests.known_adapters = [OLD, POET]
        call = service.stub.GenerateStream(generate_request(**fields))
        stream = await service.requests.streams.get()
        assert stream.request.engine_request.adapter == digest
        assert stream.request.engine_request.model == tiny().id
        call.cancel()


async def test_requests_and_tokens_are_counted_by_adapter() -> None:
    async with harness() as service:
        service.requests.known_adapters = [OLD]
        service.requests.plan = lambda stream: write(stream, 5, 6, end=STOPPED)
        for fields in ({"lora_name": "pirate"}, {"model": "pirate"}, {}):
            await all_of(service.stub.GenerateStream(generate_request(**fields)))
        text = service.registry.text().decode()
        assert 'decant_adapter_requests_total{adapter="pirate"} 2.0' in text
        assert 'decant_adapter_generation_tokens_total{adapter="pirate"} 4.0' in text
        assert text.count("decant_adapter_prompt_tokens_total{") == 1


@pytest.mark.parametrize("fields", [{"lora_name": "pirate"}, {"model": "pirate"}])
@pytest.mark.parametrize("now", [[], [NEW], [POET]])
async def test_a_repeated_call_keeps_the_adapter_that_it_was_accepted_with(
    fields: dict[str, str], now: list[wire.Adapter]
) -> None:
    async with harness() as service:
        service.requests.known_adapters = [OLD]
        first = service.stub.GenerateStream(generate_request(request_id="r", **fields))
        accepted = (await service.stream()).request
        service.requests.known_adapters = now
        again = service.stub.GenerateStream(generate_request(request_id="r", **fields))
        repeated = (await service.stream()).request
        assert repeated.payload == accepted.payload, "the registry finds an equal request by it"
        assert repeated.engine_request.adapter == ("new" if now == [NEW] else "old")
        for call in (first, again):
            call.cancel()
        other = generate_request(request_id="other", **fields)
        if now != [NEW]:
            assert isinstance(await error_of_call(all_of(service.stub.GenerateStream(other))), NotFound)


@pytest.mark.parametrize("adapters", [(), (OLD, POET)])
async def test_an_unknown_adapter_is_refused_with_those_that_there_are(adapters: Sequence[wire.Adapter]) -> None:
    async with harness() as service:
        service.requests.known_adapters = list(adapters)
        error = await error_of_call(all_of(service.stub.GenerateStream(generate_request(lora_name="absent"))))
        assert isinstance(error, NotFound)
        assert error.reason is Reason.MODEL_NOT_FOUND
        assert str(error) == f"adapter: {'one of pirate, poet' if adapters else 'not found'}, got absent"


async def test_models_are_listed_with_their_adapters() -> None:
    async with harness() as service:
        service.requests.known_adapters = [OLD, POET]
        (model,) = (await service.stub.ListModels(pb.ListModelsRequest())).models
        assert [(each.name, each.revision, each.rank) for each in model.adapters] == [
            ("pirate", "old", 8),
            ("poet", "poet's", 4),
        ]
