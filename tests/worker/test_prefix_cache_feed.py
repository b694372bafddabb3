from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from decant.engine.block_hashes import hash_blocks, root_hash
from decant.engine.blocks import BlockPool, BlockTable
from decant.protos import worker_pb2 as wire
from decant.worker.prefix_cache_feed import PrefixCacheFeed
from tests.engine.factories import evict_all
from tests.worker.decode_harness import BLOCK, Node, make_run, make_work, routed
from tests.worker.session_client import Router
from tests.worker.waiting import eventually


def block_hash(number: int) -> bytes:
    return hash_blocks(root_hash(b""), [number], 1)[0]


class Listener:
    def __init__(self, feed: PrefixCacheFeed) -> None:
        self.known: set[bytes] = set()
        self._feed = feed
        feed.add_session(self)

    def take(self) -> bool:
        update = self._feed.next_update(self)
        if update is not None:
            listen(self.known, update)
        return update is not None


def listen(known: set[bytes], update: wire.PrefixCacheUpdate) -> None:
    published, dropped = split(update.published), split(update.dropped)
    assert not known.intersection(published), "published twice"
    assert known.issuperset(dropped), "dropped, and never published"
    known.update(published)
    known.difference_update(dropped)


def split(names: bytes) -> list[bytes]:
    return [names[start : start + 8] for start in range(0, len(names), 8)]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 12)),
        st.tuples(st.sampled_from(["release", "evict", "look", "begin", "take"]), st.integers(0, 5)),
    ),
    max_size=60,
)


@given(steps)
def test_every_session_gets_exactly_the_cached_blocks(actions: Sequence[tuple[str, int]]) -> None:
    pool, feed = BlockPool(6, 4), PrefixCacheFeed()
    holdings: list[BlockTable] = []
    listeners: list[Listener] = []
    for what, number in actions:
        if what == "publish" and pool.available_blocks:
            holdings.append(pool.allocate("o", 1))
            pool.publish(0, holdings[-1].blocks[0], [block_hash(number)])
        elif what == "release" and holdings:
            holdings.pop(number % len(holdings)).release()
        elif what == "evict":
            evict_all(pool)
        elif what == "look":
            feed.record(pool.index.changed())
            feed.collect()
        elif what == "begin":
            listeners.append(Listener(feed))
        elif what == "take" and listeners:
            listeners[number % len(listeners)].take()
        assert len(pool.index._changed) <= 2 * pool.num_blocks
    feed.record(pool.index.changed())
    feed.collect()
    cached = {block_hash[:8] for _, block_hash in pool.index.published.values()}
    for listener in [*listeners, Listener(feed)]:
        listener.take()
        assert listener.known == cached
        assert not listener.take(), "nothing is published twice"


def test_many_changes_take_several_heartbeats_and_a_prefix_precedes_its_continuations() -> None:
    feed, hashes = PrefixCacheFeed(blocks_per_heartbeat=3), [block_hash(number) for number in range(8)]
    feed.record(hashes)
    feed.collect()
    feed.add_session("s")
    published = []
    while (part := feed.next_update("s")) is not None:
        assert len(part.published) <= 3 * 8
        published += split(part.published)
    assert published == [each[:8] for each in hashes]


def test_nothing_is_kept_for_a_session_that_ended() -> None:
    feed = PrefixCacheFeed()
    feed.add_session("s")
    feed.remove_session("s")
    feed.remove_session("s")
    feed.record([block_hash(1)])
    feed.collect()
    assert feed.next_update("s") is None
    assert not feed._unsent


def known_to(router: Router) -> set[bytes]:
    known = set[bytes]()
    for heartbeat in router.heartbeats:
        listen(known, heartbeat.cache)
    return known


async def cached_at(node: Node) -> set[bytes]:
    hashes = await node.host.loop.call(
        lambda engine: [block_hash for _, block_hash in engine.pool.index.published.values()]
    )
    return {each[:8] for each in hashes}


async def test_a_session_gets_published_and_evicted_blocks() -> None:
    async with routed(blocks=16) as (node, router):
        work = make_work(10 * BLOCK, 1)
        await router.start(make_run(), work)
        await eventually(lambda: len(known_to(router)) == 10)
        assert known_to(router) == await cached_at(node)
        await router.start(make_run("t/other"), make_work(14 * BLOCK, 1, seed=1))

        async def agreed() -> bool:
            return len(known_to(router)) >= 14 and known_to(router) == await cached_at(node)

        await eventually(agreed)
        assert any(heartbeat.cache.dropped for heartbeat in router.heartbeats)


async def test_a_new_session_gets_all_blocks_again() -> None:
    async with routed() as (node, first):
        await first.start(make_run(), make_work(10 * BLOCK, 1))
        await eventually(lambda: len(known_to(first)) == 10)
        async with Router(node, "second") as second:
            await eventually(lambda: known_to(second) == known_to(first))
        await eventually(lambda: node.decode.sessions == 1)
        await asyncio.sleep(0)
        assert len(node.host.cache._unsent) == 1
