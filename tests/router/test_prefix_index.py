from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decant.engine.block_hashes import hash_blocks, root_hash
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.router.placement.prefix_index import (
    MAX_INLINE_TOKENS,
    PrefixIndex,
    PromptBlocks,
    WorkerPrefixCache,
    reported_hashes,
)
from decant.router.placement.worker_load import WorkerLoad
from decant.runtime.packed import pack

BLOCK = 4


def work(tokens: int = 20, salt: bytes = b"s", first: int = 0, **more: object) -> wire.EngineRequest:
    return wire.EngineRequest(prompt=pack(list(range(first, first + tokens))), salt=salt, **more)  # type: ignore[arg-type]


def heartbeat(published: object = (), dropped: object = ()) -> wire.Heartbeat:
    news = wire.PrefixCacheUpdate(published=_packed(published), dropped=_packed(dropped))
    return wire.Heartbeat(cache=news)


def _packed(names: object) -> bytes:
    return array("Q", names).tobytes()  # type: ignore[call-overload,no-any-return]


def view() -> WorkerLoad:
    return WorkerLoad(WorkerRegistration(capacity=Capacity(total_blocks=100, block_size=BLOCK)))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.binary(max_size=20), st.integers(1, 7))
def test_a_router_knows_a_block_by_the_hash_that_workers_report(tokens: list[int], salt: bytes, size: int) -> None:
    expected = [int.from_bytes(block_hash[:8], "little") for block_hash in hash_blocks(root_hash(salt), tokens, size)]
    assert list(reported_hashes(pack(tokens), salt, size)) == expected


def test_the_hash_of_a_block_is_that_of_the_protocol() -> None:
    assert list(reported_hashes(pack([1, 2, 3, 4]), b"s", 2)) == [0xBDA8A3AA5B7C1DF9, 0xF56AE48234592E45]


def test_reported_blocks_match_up_to_the_first_missing_one() -> None:
    prefix = PromptBlocks(work())
    names = prefix.hashes(BLOCK)
    cache = WorkerPrefixCache()
    cache.apply_heartbeat(heartbeat([names[0], names[1], names[3]]))
    assert prefix.cached_tokens(cache, BLOCK) == 2 * BLOCK
    cache.apply_heartbeat(heartbeat([names[2]], dropped=[names[1]]))
    assert prefix.cached_tokens(cache, BLOCK) == BLOCK
    assert PromptBlocks(work(salt=b"another")).cached_tokens(cache, BLOCK) == 0
    assert PromptBlocks(work(first=1)).cached_tokens(cache, BLOCK) == 0


def test_one_token_is_always_computed() -> None:
    prefix, cache = PromptBlocks(work(5 * BLOCK)), WorkerPrefixCache()
    cache.apply_heartbeat(heartbeat(prefix.hashes(BLOCK)))
    assert prefix.cached_tokens(cache, BLOCK) == 4 * BLOCK


def test_requests_with_prompt_logprobs_or_bypass_get_no_cache_hits() -> None:
    with_logprobs, bypassing = PromptBlocks(work(prompt_logprobs=0)), PromptBlocks(work(bypass_prefix_cache=True))
    cache = WorkerPrefixCache()
    cache.apply_heartbeat(heartbeat(PromptBlocks(work()).hashes(BLOCK)))
    assert with_logprobs.cached_tokens(cache, BLOCK) == bypassing.cached_tokens(cache, BLOCK) == 0
    assert len(with_logprobs.hashes(BLOCK)) == 5, "others will find what it computes"
    assert not bypassing.hashes(BLOCK)


async def test_a_long_prompt_is_hashed_aside_to_the_same_names() -> None:
    long = work(MAX_INLINE_TOKENS + 100)
    prefix = PromptBlocks(long)
    await prefix.prepare(16)
    assert list(prefix.hashes(16)) == list(reported_hashes(long.prompt, long.salt, 16))


def test_expected_blocks_count_at_once_and_are_forgotten_unless_reported() -> None:
    known, prefix = view(), PromptBlocks(work())
    sent = known.reserve(prefix, 20, computes_prompt=True)
    assert known.cached_tokens(prefix) == 16
    for _ in range(5):
        known.apply_heartbeat(wire.Heartbeat())
    assert known.cached_tokens(prefix) == 16, "it may be computed late"
    known.apply_heartbeat(heartbeat(prefix.hashes(BLOCK)[:2]))
    sent.release()
    known.apply_heartbeat(wire.Heartbeat())
    assert known.cached_tokens(prefix) == 16, "this heartbeat may be older"
    known.apply_heartbeat(wire.Heartbeat())
    assert known.cached_tokens(prefix) == 8


def test_of_two_equal_prompts_the_last_placement_decides() -> None:
    known, prefix = view(), PromptBlocks(work())
    first = known.reserve(prefix, 20, computes_prompt=True)
    second = known.reserve(prefix, 20, computes_prompt=True)
    first.release()
    for _ in range(3):
        known.apply_heartbeat(wire.Heartbeat())
    assert known.cached_tokens(prefix) == 16
    second.release()
    for _ in range(2):
        known.apply_heartbeat(wire.Heartbeat())
    assert known.cached_tokens(prefix) == 0


def test_cached_tokens_count_neither_as_work_nor_as_used_blocks() -> None:
    known, prefix = view(), PromptBlocks(work(100))
    known.apply_heartbeat(heartbeat(prefix.hashes(BLOCK)[:20]))
    known.reserve(prefix, 100, computes_prompt=True)
    seen = known.snapshot(prefix)
    assert (seen.queued_tokens, seen.free_blocks, seen.cached_tokens) == (20, 95, 96)


def test_a_new_session_begins_with_nothing() -> None:
    known, prefix = view(), PromptBlocks(work())
    known.apply_heartbeat(heartbeat(prefix.hashes(BLOCK)))
    sent = known.reserve(prefix, 20, computes_prompt=True)
    known.reset()
    assert known.cached_tokens(prefix) == 0
    sent.release()
    known.apply_heartbeat(heartbeat(prefix.hashes(BLOCK)))
    assert known.cached_tokens(prefix) == 16


names = st.lists(st.integers(0, 7), max_size=5, unique=True)
events = st.one_of(
    st.tuples(st.just("heartbeat"), names, names),
    st.tuples(st.just("sent"), names, names),
    st.tuples(st.just("over"), names, names),
)


@pytest.mark.slow
@given(st.lists(events, max_size=30))
def test_only_reported_blocks_remain_after_all_requests_ended(
    actions: list[tuple[str, list[int], list[int]]],
) -> None:
    cache, held, here = WorkerPrefixCache(), set[int](), []
    for kind, some, others in actions:
        if kind == "heartbeat":
            dropped = [name for name in others if name not in some]
            cache.apply_heartbeat(heartbeat(some, dropped))
            held = (held | set(some)) - set(dropped)
        elif kind == "sent":
            here.append(cache.expect(some))
        elif here:
            here.pop(0).release()
        assert all(cache.count_leading([name]) for name in held)
    for sent in here:
        sent.release()
    cache.apply_heartbeat(wire.Heartbeat())
    cache.apply_heartbeat(wire.Heartbeat())
    assert {name for name in range(8) if cache.count_leading([name])} == held
    assert not cache._expected
    assert not cache.expiring


changes = st.tuples(st.sampled_from(["heartbeat", "sent", "over", "reset"]), st.integers(0, 2), names, names)


@pytest.mark.slow
@given(st.lists(changes, max_size=40), names)
def test_an_index_has_the_same_as_the_caches_of_its_workers(
    actions: list[tuple[str, int, list[int], list[int]]], prompt: list[int]
) -> None:
    index = PrefixIndex()
    numbers = [index.add_worker(BLOCK) for _ in range(3)]
    caches, here = [WorkerPrefixCache(index, number) for number in numbers], []

    def check() -> None:
        for hashes in (prompt, *([name] for name in range(8))):
            leading = {number: cache.count_leading(hashes) for number, cache in zip(numbers, caches, strict=True)}
            assert index.count_leading(hashes) == {number: blocks for number, blocks in leading.items() if blocks}

    for kind, place, some, others in actions:
        if kind == "heartbeat":
            caches[place].apply_heartbeat(heartbeat(some, [name for name in others if name not in some]))
        elif kind == "sent":
            here.append(caches[place].expect(some))
        elif kind == "over" and here:
            here.pop(0).release()
        elif kind == "reset":
            caches[place].close()
            caches[place] = WorkerPrefixCache(index, numbers[place])
        check()
    for sent in here:
        sent.release()
    for _ in range(2):
        for cache in caches:
            cache.apply_heartbeat(wire.Heartbeat())
        check()
    for cache in caches:
        cache.close()
    assert not index._holders, "closed caches leave nothing"


def test_cached_tokens_of_all_workers_are_those_of_each() -> None:
    index, prefix = PrefixIndex(), PromptBlocks(work(5 * BLOCK))
    small, large, empty = (
        WorkerLoad(WorkerRegistration(capacity=Capacity(total_blocks=100, block_size=size)), index)
        for size in (BLOCK, 2 * BLOCK, BLOCK)
    )
    for load in (small, large):
        load.apply_heartbeat(heartbeat(prefix.hashes(load.block_size)))
    assert prefix.cached_by_worker(index) == {small.number: 4 * BLOCK, large.number: 4 * BLOCK}
    assert prefix.cached_by_worker(index) == {each.number: each.cached_tokens(prefix) for each in (small, large)}
    assert empty.cached_tokens(prefix) == 0
    assert not PromptBlocks(work(5 * BLOCK, bypass_prefix_cache=True)).cached_by_worker(index)
    small.close()
    assert prefix.cached_by_worker(index) == {large.number: 4 * BLOCK}
    again = WorkerLoad(WorkerRegistration(capacity=Capacity(total_blocks=100, block_size=BLOCK)), index)
    assert again.number == small.number
    assert prefix.cached_by_worker(index) == {large.number: 4 * BLOCK}, "the number is new, its blocks are not"
