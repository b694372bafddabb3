from __future__ import annotations

import asyncio
import tracemalloc
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.protos import worker_pb2 as wire
from decant.protos.vllm import common_pb2 as common
from decant.router.kv_events import feed
from decant.router.kv_events.known_blocks import Namespace
from decant.router.kv_events.publisher import HISTORY_SHARE, MAX_SALT, KvEventPublisher
from decant.router.placement.prefix_index import PrefixIndex, PromptBlocks, WorkerPrefixCache, reported_hashes
from decant.router.settings import RouterSettings
from decant.router.vllm.kv_events import event_batch
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, OutOfRange
from decant.runtime.packed import pack
from decant.runtime.settings import InvalidSettings
from decant.runtime.settings_sources import load
from decant.state.store import Store
from tests.engine.factories import evict_all
from tests.router.harness import core, tokens_of, until
from tests.router.kv_event_subscriber import ReceivedBlocks
from tests.router.test_prefix_cache_updates import SHARED, nodes, valid_request
from tests.worker.decode_harness import BLOCK as ENGINE_BLOCK

BLOCK = 2
LIMIT = 10_000
"""Bytes for ten blocks and twelve changes: fewer than the sequences have."""
TENANTS = ("acme", "other")
WORKERS = 2


def hashes_of(tenant: str, tokens: Sequence[int]) -> array[int]:
    return reported_hashes(pack(tokens), tenant.encode(), BLOCK)


def signed(block_hash: int) -> int:
    return block_hash - (1 << 64) if block_hash >= 1 << 63 else block_hash


@dataclass
class Reader:
    """A subscriber that reads as many messages as a test wants, and may leave and come back."""

    publisher: KvEventPublisher
    tenant: str
    received: ReceivedBlocks = field(default_factory=ReceivedBlocks)
    resyncs: int = 0

    def __post_init__(self) -> None:
        self._open(0)

    def _open(self, after: int) -> None:
        self._subscription = self.publisher.subscribe("m", self.tenant, after)
        self._subscription.__enter__()

    def close(self) -> None:
        self._subscription.__exit__(None, None, None)

    def reconnect(self) -> None:
        self.close()
        try:
            self._open(0 if self.received.is_in_snapshot else self.received.sequence)
        except OutOfRange:
            self._start_over()

    def _start_over(self) -> None:
        self.resyncs += 1
        self.received = ReceivedBlocks()
        self._open(0)

    async def read(self) -> bool:
        """Read one message, if there is one."""
        reading = asyncio.ensure_future(self._subscription.next())
        await asyncio.sleep(0)
        if not reading.done():
            reading.cancel()
            return False
        error = reading.exception()
        if error is None:
            sent = event_batch(reading.result())
            self.received.apply(common.KvEventBatch.FromString(sent.SerializeToString()))
        else:
            assert isinstance(error, Aborted), error
            assert error.reason is Reason.SLOW_READER
            self.close()
            self._start_over()
        return True

    async def read_all(self) -> None:
        while await self.read():
            pass


class Deployment:
    """Workers of one model, and what is true about them."""

    def __init__(self) -> None:
        self.publisher = KvEventPublisher(LIMIT)
        self.index = PrefixIndex()
        self.publisher.follow({"m": self.index})
        self.caches = [WorkerPrefixCache(self.index, self.index.add_worker(BLOCK)) for _ in range(WORKERS)]
        self.held: list[set[int]] = [set() for _ in range(WORKERS)]
        self.sequences: dict[str, dict[int, tuple[int, ...]]] = {tenant: {} for tenant in TENANTS}

    def record(self, tenant: str, tokens: Sequence[int]) -> None:
        """A prompt of half of the tokens, and two outputs: the other half, and a part of it."""
        prompt, output = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
        whole = hashes_of(tenant, prompt)
        outputs = [
            (hashes_of(tenant, [*prompt, *one])[len(whole) :], pack(one))
            for one in (output, output[: len(output) // 2])
        ]
        self.publisher.record(Namespace("m", tenant, "", "", BLOCK), whole, pack(prompt), outputs)
        self.remember(tenant, tokens)

    def remember(self, tenant: str, tokens: Sequence[int]) -> Sequence[int]:
        hashes = hashes_of(tenant, tokens)
        for number, block_hash in enumerate(hashes, 1):
            self.sequences[tenant][block_hash] = tuple(tokens[: number * BLOCK])
        return hashes

    def report(self, worker: int, published: Sequence[int], dropped: Sequence[int]) -> None:
        update = wire.PrefixCacheUpdate(
            published=array("Q", published).tobytes(), dropped=array("Q", dropped).tobytes()
        )
        self.caches[worker].apply_heartbeat(wire.Heartbeat(cache=update))
        self.held[worker] = (self.held[worker] | set(published)) - set(dropped)

    def lose(self, worker: int) -> None:
        self.caches[worker].close()
        self.index.remove_worker(worker, BLOCK)
        self.caches[worker] = WorkerPrefixCache(self.index, self.index.add_worker(BLOCK))
        self.held[worker] = set()

    def expected(self, tenant: str) -> dict[int, tuple[int, ...]]:
        """Blocks that are known and that a worker holds, each with all blocks before it."""
        held = set().union(*self.held)

        def is_published(tokens: tuple[int, ...]) -> bool:
            return all(
                block_hash in held and self.publisher.known.get("m", block_hash) is not None
                for block_hash in hashes_of(tenant, tokens)
            )

        return {signed(key): tokens for key, tokens in self.sequences[tenant].items() if is_published(tokens)}


STEPS = {"record": 4, "report": 8, "expect": 1, "lose": 0.3, "read": 5, "reconnect": 1}


def some_tokens(random: Random) -> list[int]:
    """One to four blocks, of which the third and the fourth differ between sequences."""
    blocks = (0, 0, random.randrange(2), random.randrange(2))
    return [token for block in blocks[: random.randint(1, 4)] for token in (block, 7)]


async def play(random: Random) -> None:
    deployment = Deployment()
    readers = [Reader(deployment.publisher, tenant) for tenant in ("acme", "acme", "other")]
    for step in random.choices(list(STEPS), list(STEPS.values()), k=150):
        tenant, worker = random.choice(("acme", "acme", "other")), random.randrange(WORKERS)
        tokens, reader = some_tokens(random), random.choice(readers)
        match step:
            case "record":
                deployment.record(tenant, tokens)
            case "report":
                hashes = deployment.remember(tenant, tokens)
                published, dropped = ([each for each in hashes if random.random() < part] for part in (0.6, 0.2))
                deployment.report(worker, published, dropped)
            case "expect":
                deployment.caches[worker].expect(hashes_of(tenant, tokens)).release()
            case "lose":
                deployment.lose(worker)
            case "read":
                await reader.read()
            case "reconnect":
                reader.reconnect()
        assert deployment.publisher.num_bytes <= LIMIT
    for reader in (*readers, *(Reader(deployment.publisher, tenant) for tenant in TENANTS)):
        await reader.read_all()
        assert reader.received.tokens == deployment.expected(reader.tenant)
        reader.close()
    assert not deployment.publisher.num_subscribers


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=0))
def test_a_subscriber_has_the_known_blocks_of_its_tenant_that_a_worker_holds(seed: int) -> None:
    asyncio.run(play(Random(seed)))


async def test_a_slow_subscriber_ends_and_starts_over_with_a_snapshot() -> None:
    deployment = Deployment()
    slow, fast = (Reader(deployment.publisher, "acme") for _ in range(2))
    await slow.read_all()
    for number in range(100):
        tokens = [number, 7, number]
        deployment.record("acme", tokens)
        deployment.report(0, hashes_of("acme", tokens), [])
        await fast.read_all()
    assert deployment.publisher.history.num_bytes <= LIMIT * HISTORY_SHARE
    await slow.read_all()
    assert (slow.resyncs, fast.resyncs) == (1, 0)
    assert slow.received == fast.received
    assert slow.received.tokens == deployment.expected("acme")


async def test_a_snapshot_in_parts_continues_with_live_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "BATCH_BYTES", 3 * feed.CHANGE_BYTES)
    deployment = Deployment()
    tokens = list(range(12))
    deployment.record("acme", tokens)
    deployment.report(0, hashes_of("acme", tokens), [])
    reader = Reader(deployment.publisher, "acme")
    await reader.read()
    assert reader.received.is_in_snapshot
    deployment.report(0, [], hashes_of("acme", tokens)[4:])
    await reader.read_all()
    assert reader.received.tokens == deployment.expected("acme") != {}


async def test_a_block_is_stored_once_and_removed_with_its_last_holder() -> None:
    deployment = Deployment()
    reader = Reader(deployment.publisher, "acme")
    await reader.read_all()
    hashes = hashes_of("acme", [1, 2, 3, 4])
    deployment.record("acme", [1, 2, 3, 4, 5])
    assert not await reader.read(), "no worker has it"
    counts = []
    for worker, published, dropped in ((0, hashes, ()), (1, hashes, ()), (0, (), hashes), (1, (), hashes)):
        deployment.report(worker, published, dropped)
        counts.append(await reader.read())
        assert len(reader.received.tokens) == (0 if worker and dropped else 2)
    assert counts == [True, False, False, True]


def test_events_name_the_adapter_the_salt_and_the_parent() -> None:
    publisher = KvEventPublisher(LIMIT)
    hashes = hashes_of("acme", [1, 2, 3, 4])
    publisher.record(Namespace("m", "acme", "sql", "room", BLOCK), hashes, pack([1, 2, 3, 4]))
    publisher.on_reported("m", 0, hashes, ())
    publisher.on_reported("m", 0, (), hashes[1:])
    with publisher.subscribe("m", "acme", 0) as subscription:
        cleared, stored = event_batch(next(subscription._feed.snapshot())).events
        publisher.on_reported("m", 0, hashes[1:], ())
        more = event_batch(subscription._feed.batches[-1]).events[0].stored
    assert cleared.HasField("cleared")
    assert (stored.stored.lora_name, stored.stored.cache_salt) == ("sql", "room")
    assert not stored.stored.HasField("parent_block_hash")
    assert more.parent_block_hash == signed(hashes[0])
    assert [list(block.token_ids) for block in more.blocks] == [[3, 4]]


@pytest.mark.slow
def test_memory_is_what_is_counted() -> None:
    """Known blocks of real sizes take at most the memory that the setting allows."""
    limit, block_size = 4 << 20, 16
    publisher = KvEventPublisher(limit)
    namespace = Namespace("m", "acme", "", "", block_size)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(100):
            tokens = array("I", range(number, number + 128 * block_size))
            hashes = reported_hashes(pack(tokens), bytes(number), block_size)
            publisher.record(namespace, hashes, pack(tokens))
            publisher.on_reported("m", 0, hashes, ())
            publisher.on_reported("m", 0, (), hashes)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(publisher.known) > 1000
    assert 0.5 * publisher.num_bytes < after - before < publisher.num_bytes <= limit


async def test_prompts_and_answers_of_a_router_are_published_while_its_worker_has_them(store: Store) -> None:
    async with nodes("a", blocks=32) as pair, core(store, [pair[0][1]], kv_event_memory="16M") as harness:  # type: ignore[list-item]
        publisher = harness.router.kv_events
        assert isinstance(publisher, KvEventPublisher)
        request = valid_request("r", *range(ENGINE_BLOCK - 1))
        stream = await harness.answer(request)
        whole = (*SHARED, *range(ENGINE_BLOCK - 1), *tokens_of(stream))
        reader = Reader(publisher, "default")
        reader.close()
        with publisher.subscribe(request.engine_request.model, "default", 0) as subscription:

            async def until_published(blocks: int) -> None:
                while len(reader.received.tokens) != blocks:
                    reader.received.apply(event_batch(await subscription.next()))

            async with asyncio.timeout(60):
                await until_published(len(SHARED) // ENGINE_BLOCK + 1)
                assert max(reader.received.tokens.values(), key=len) == whole[: len(SHARED) + ENGINE_BLOCK]
                await pair[0][0].host.loop.call(lambda engine: evict_all(engine.pool))
                await until_published(0)
    await until(lambda: not publisher.num_subscribers)


def test_an_answer_continues_the_hashes_of_its_prompt() -> None:
    for length in range(7):
        tokens = list(range(length))
        request = wire.EngineRequest(prompt=pack(tokens), salt=b"s")
        blocks = PromptBlocks(request)
        together = [*blocks.hashes(BLOCK), *blocks.hashes_after(BLOCK, [9, 8, 7])]
        assert together == list(reported_hashes(pack([*tokens, 9, 8, 7]), b"s", BLOCK))


async def test_blocks_with_a_salt_that_takes_more_memory_than_they_do_are_not_kept(store: Store) -> None:
    async with nodes("a") as pair, core(store, [pair[0][1]], kv_event_memory="16M") as harness:  # type: ignore[list-item]
        for length, is_kept in ((MAX_SALT + 1, False), (MAX_SALT, True)):
            request = valid_request(f"{length}", *range(ENGINE_BLOCK))
            request.payload.cache.cache_salt = "s" * length
            await harness.answer(request)
            assert bool(harness.router.kv_events.num_bytes) == is_kept


def test_hashes_of_another_size_may_come_while_an_answer_is_recorded() -> None:
    blocks = PromptBlocks(wire.EngineRequest(prompt=pack([1, 2, 3, 4]), salt=b"s"))
    blocks.hashes(1)
    for size in blocks.block_sizes:
        blocks.hashes(size + 1)
    assert list(blocks.block_sizes) == [1, 2]


@pytest.mark.parametrize("text", ["15M", "much", ""])
def test_a_size_that_is_too_small_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(InvalidSettings, match="--kv-event-memory: a size from 16M, such as 256M or 2G"):
        load(RouterSettings, ("--models", "m", f"--kv-event-memory={text}"), {})
