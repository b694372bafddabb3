from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.request.valid_request import ValidRequest
from decant.runtime.errors import AlreadyExists
from decant.state.errors import StoreUnavailable
from decant.state.store import Store
from tests.e2e.fault_injection import RECEIVER, SENDER, FaultInjection, fault_injection
from tests.router.fake_script import answer
from tests.router.fake_worker import fleet
from tests.router.harness import core, make_request, tokens_of, until, until_ended


@pytest.fixture
async def harness(store: Store) -> AsyncIterator[FaultInjection]:
    async with fault_injection(store) as made:
        yield made


def fail_with_outage(patch: pytest.MonkeyPatch, store: Store) -> None:
    async def fails(*_: object, **__: object) -> Any:
        raise StoreUnavailable("away")

    for name in ("accept", "flush", "read", "adopt"):
        patch.setattr(store.requests, name, fails)


def pair(harness: FaultInjection, *, same_payload: bool = False) -> tuple[ValidRequest, list[list[int]], ValidRequest]:
    first, expected = harness.request()
    other = first if same_payload else harness.request()[0]
    return first, expected, replace(other, key=first.key)


@pytest.mark.rule(
    "one-payload-of-an-id",
    "worker/epochs.py:Epochs.is_other_request",
    "worker/decode/service.py:DecodeService._refusal",
)
@pytest.mark.parametrize("where", [SENDER, RECEIVER])
async def test_another_payload_under_a_live_id_is_refused_while_the_store_is_unavailable(
    store: Store, harness: FaultInjection, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    first, expected, other = pair(harness)
    worker_harness = harness.workers[where]
    with monkeypatch.context() as patch:
        fail_with_outage(patch, store)
        worker_harness.device.hold()
        stream = await harness.one.requests.begin(first)
        await until(
            lambda: list(worker_harness.prefill.runs()) if where == SENDER else list(worker_harness.decode.runs())
        )
        refused = await until_ended(await harness.other.requests.begin(other))
        assert isinstance(refused.end, AlreadyExists)
        assert not refused.outputs[0].tokens
        worker_harness.device.go_on()
        assert [each.tokens for each in (await until_ended(stream)).outputs] == expected
        await harness.quiet()
    await until(lambda: harness.one.store_is_done and harness.other.store_is_done)
    found = await store.requests.read(first.key)
    assert (found.payload, found.state) == (first.payload, Generation.STATE_SUCCEEDED)


async def test_the_same_payload_is_answered_once_while_the_store_is_unavailable(
    store: Store, harness: FaultInjection, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, expected, again = pair(harness, same_payload=True)
    worker_harness = harness.workers[RECEIVER]
    with monkeypatch.context() as patch:
        fail_with_outage(patch, store)
        worker_harness.device.hold()
        await harness.one.requests.begin(first)
        await until(lambda: list(worker_harness.decode.runs()))
        stream = await harness.other.requests.begin(again)
        worker_harness.device.go_on()
        assert [each.tokens for each in (await until_ended(stream)).outputs] == expected
        await harness.quiet()


@pytest.mark.rule(
    "one-payload-of-an-id", "state/lua/request_write.lua", "router/execution/execution.py:Execution.on_superseded"
)
@pytest.mark.slow
async def test_of_two_payloads_the_unstored_one_ends_when_the_store_is_back(
    store: Store, harness: FaultInjection, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, expected, other = pair(harness)
    stream = await harness.one.answer(first)
    assert [output.tokens for output in stream.outputs] == expected
    await until(lambda: harness.one.store_is_done)
    await harness.quiet()
    worker_harness = harness.workers[RECEIVER]
    with monkeypatch.context() as patch:
        fail_with_outage(patch, store)
        worker_harness.device.hold()
        late = await harness.other.requests.begin(other)
        await until(lambda: late.outputs[0].tokens)
    assert isinstance((await until_ended(late)).end, AlreadyExists)
    worker_harness.device.go_on()
    assert (await store.requests.read(first.key)).payload == first.payload


async def test_a_stored_request_moves_on_from_a_worker_with_another_request_of_its_id(store: Store) -> None:
    async with fleet(("d", wire.ROLE_DECODE)) as workers, core(store, workers) as made:
        workers[0].script.refuse = [wire.CAUSE_ID_REUSED]
        stream = await made.answer(make_request())
        assert tokens_of(stream) == answer([1, 2, 3], 5)
        assert stream.trace.attempts == 2
