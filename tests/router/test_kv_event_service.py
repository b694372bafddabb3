from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from decant.protos.vllm import common_pb2 as common
from decant.router.api.auth import load
from decant.router.kv_events.feed import MAX_SUBSCRIBERS
from decant.router.kv_events.known_blocks import Namespace
from decant.router.kv_events.publisher import KvEventPublisher
from decant.router.placement.prefix_index import reported_hashes
from decant.router.text.served_model import Models
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, OutOfRange, QuotaExceeded, Unimplemented, from_call
from decant.runtime.grpc_options import ACCEPTED
from decant.runtime.packed import pack
from tests.router.factories import tiny
from tests.router.harness import until
from tests.router.kv_event_subscriber import ReceivedBlocks
from tests.router.service_harness import PATIENCE, harness
from tests.router.test_auth import bearer, digest

MODEL = "tiny-python"
BLOCK = 4
Request = common.SubscribeKvEventsRequest


def publisher_with(*tenants: str) -> KvEventPublisher:
    """A publisher with two blocks of each tenant, which begin with the tenant's place."""
    publisher = KvEventPublisher(16 << 20)
    for place, tenant in enumerate(tenants):
        report(publisher, tenant, place)
    return publisher


def report(publisher: KvEventPublisher, tenant: str, first: int) -> None:
    tokens = pack([first, *range(1, 2 * BLOCK)])
    hashes = reported_hashes(tokens, tenant.encode(), BLOCK)
    publisher.record(Namespace(MODEL, tenant, "", "", BLOCK), hashes, tokens)
    publisher.on_reported(MODEL, 0, hashes, ())


async def read(call: Any, received: ReceivedBlocks) -> None:
    async with asyncio.timeout(PATIENCE):
        received.apply(await call.read())


async def error_of(call: Any) -> Any:
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_to_end(call)
    return from_call(error.value)


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def until_left(publisher: KvEventPublisher) -> None:
    await until(lambda: not publisher.num_subscribers)


async def test_a_subscriber_gets_a_snapshot_then_events_and_can_resume() -> None:
    publisher, received = publisher_with("default"), ReceivedBlocks()
    async with harness(kv_events=publisher) as s:
        call = s.vllm.SubscribeKvEvents(Request(load_records_before_first_batch=True))
        await read(call, received)
        assert len(received.tokens) == 2
        report(publisher, "default", 100)
        await read(call, received)
        call.cancel()
        await until_left(publisher)
        report(publisher, "default", 200)
        call = s.vllm.SubscribeKvEvents(Request(start_sequence_number=received.sequence))
        await read(call, received)
        assert sorted(tokens[0] for tokens in received.tokens.values()) == [0, 0, 100, 100, 200, 200]
        call = s.vllm.SubscribeKvEvents(Request(start_sequence_number=received.sequence))
        async with asyncio.timeout(PATIENCE):
            assert (ACCEPTED, "true") in tuple(await call.initial_metadata()), "also while there is nothing new"


@pytest.mark.parametrize("offset", [-100_000, 1])
async def test_a_number_of_another_router_is_refused_before_any_header(offset: int) -> None:
    publisher, received = publisher_with("default"), ReceivedBlocks()
    async with harness(kv_events=publisher) as s:
        await read(s.vllm.SubscribeKvEvents(Request()), received)
        call = s.vllm.SubscribeKvEvents(Request(start_sequence_number=received.sequence + offset))
        error = await error_of(call)
        assert isinstance(error, OutOfRange)
        assert "start_sequence_number: 0, or from" in str(error)
        assert not tuple(await call.initial_metadata()), "gateways clear what they have only at a refusal"


async def test_a_tenant_gets_its_own_blocks_alone(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("".join(f'[tenants.{name}]\ntokens = ["{digest(name)}"]\n' for name in ("acme", "other")))
    publisher = publisher_with("acme", "other")
    async with harness(callers=load(file, Models([tiny()])), kv_events=publisher) as s:
        for place, tenant in enumerate(("acme", "other")):
            call, received = s.vllm.SubscribeKvEvents(Request(), metadata=bearer(tenant)), ReceivedBlocks()
            await read(call, received)
            assert [tokens[0] for tokens in received.tokens.values()] == [place, place]
        assert (await error_of(s.vllm.SubscribeKvEvents(Request()))).reason is Reason.NO_CREDENTIALS


async def test_the_number_of_subscribers_is_bounded() -> None:
    publisher = publisher_with("default")
    async with harness(kv_events=publisher) as s:
        calls = [s.vllm.SubscribeKvEvents(Request()) for _ in range(MAX_SUBSCRIBERS)]
        for call in calls:
            await read(call, ReceivedBlocks())
        error = await error_of(s.vllm.SubscribeKvEvents(Request()))
        assert isinstance(error, QuotaExceeded)
        assert (error.field, error.value) == ("kv_event_subscribers", str(MAX_SUBSCRIBERS + 1))
        for call in calls:
            call.cancel()
        await until_left(publisher)
        await read(s.vllm.SubscribeKvEvents(Request()), ReceivedBlocks())


async def test_a_drain_ends_subscribers_and_refuses_new_ones() -> None:
    publisher = publisher_with("default")
    async with harness(kv_events=publisher) as s:
        call = s.vllm.SubscribeKvEvents(Request())
        await read(call, ReceivedBlocks())
        publisher.close()
        assert (await error_of(call)).reason is Reason.DRAINING
        assert (await error_of(s.vllm.SubscribeKvEvents(Request()))).reason is Reason.DRAINING
        await until_left(publisher)


async def test_a_client_that_reads_nothing_is_cut() -> None:
    publisher = publisher_with("default")
    async with harness(kv_events=publisher, unread_s=0.05) as s:
        call = s.vllm.SubscribeKvEvents(Request())
        await until(lambda: publisher.num_subscribers)
        first = 0
        async with asyncio.timeout(PATIENCE):
            while publisher.num_subscribers:
                tokens = pack(range(first, first + 40_000))
                first += 1
                hashes = reported_hashes(tokens, b"s", BLOCK)
                publisher.record(Namespace(MODEL, "default", "", "", BLOCK), hashes, tokens)
                publisher.on_reported(MODEL, 0, hashes, ())
                await asyncio.sleep(0.01)
        error = await error_of(call)
        assert isinstance(error, Aborted)
        assert error.reason is Reason.SLOW_READER


async def test_without_the_setting_the_refusal_names_it() -> None:
    async with harness() as s:
        error = await error_of(s.vllm.SubscribeKvEvents(Request()))
        assert isinstance(error, Unimplemented)
        assert "--kv-event-memory" in str(error)
