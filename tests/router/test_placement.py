from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decant.protos import worker_pb2 as wire
from decant.router.placement.policy import (
    Placement,
    PlacementRequest,
    WorkerSnapshot,
    choose_decode_worker,
    choose_first_worker,
)
from decant.state.ids import Incarnation

P, D = wire.ROLE_PREFILL, wire.ROLE_DECODE
NO_SENDER = Incarnation("", 0)


def snapshot(name: str, role: wire.Role = D, **more: object) -> WorkerSnapshot:
    worker = WorkerSnapshot(
        Incarnation(name, 1), role, layout_hash=1, block_size=16, free_blocks=100, sequences=0, queued_tokens=0
    )
    return replace(worker, **more)  # type: ignore[arg-type]


def place(*workers: WorkerSnapshot, tokens: int = 10, from_tokens: bool = False) -> Placement | None:
    return choose_first_worker(workers, PlacementRequest(tokens, from_tokens))


def test_a_prompt_goes_where_the_fewest_tokens_are_queued() -> None:
    long, short = snapshot("long", P, queued_tokens=900), snapshot("short", P, queued_tokens=100, sequences=9)
    assert place(long, short, snapshot("d")) == Placement(short.incarnation, is_split=True)


def test_a_cached_prefix_outweighs_as_many_queued_tokens() -> None:
    holder, idle = snapshot("holder", P, queued_tokens=500, cached_tokens=800), snapshot("idle", P)
    assert place(holder, idle, snapshot("d"), tokens=1000) == Placement(holder.incarnation, is_split=True)
    crowded = replace(holder, queued_tokens=900)
    assert place(crowded, idle, snapshot("d"), tokens=1000) == Placement(idle.incarnation, is_split=True)


def test_a_kv_cache_goes_to_the_least_loaded_worker_then_to_the_one_with_most_cached() -> None:
    calm, holder = snapshot("calm", sequences=3), snapshot("holder", sequences=4, cached_tokens=16)
    assert choose_decode_worker([calm, holder], PlacementRequest(20), 1, Incarnation("p", 1)) == calm.incarnation
    assert (
        choose_decode_worker([replace(calm, sequences=4), holder], PlacementRequest(20), 1, Incarnation("p", 1))
        == holder.incarnation
    )


def test_a_worker_needs_free_blocks_for_uncached_tokens() -> None:
    tight, other = snapshot("tight", free_blocks=2, cached_tokens=64), snapshot("other", sequences=1)
    assert choose_decode_worker([tight, other], PlacementRequest(90), 1, Incarnation("p", 1)) == tight.incarnation
    assert (
        choose_decode_worker([replace(tight, cached_tokens=48), other], PlacementRequest(90), 1, Incarnation("p", 1))
        == other.incarnation
    )


def test_a_full_prefill_pool_is_waited_for_and_a_missing_one_is_not() -> None:
    full = snapshot("p", P, takes_prompts=False)
    busy = snapshot("q", P, has_capacity=False)
    decode = snapshot("d")
    assert place(full, busy, decode) is None
    assert place(decode) == Placement(decode.incarnation, is_split=False)


def test_without_decode_workers_a_prefill_worker_does_both() -> None:
    only = snapshot("p", P)
    assert place(only) == Placement(only.incarnation, is_split=False)


def test_tokens_that_are_written_go_to_a_decode_worker() -> None:
    decode = snapshot("d", sequences=50)
    assert place(snapshot("p", P), decode, from_tokens=True) == Placement(decode.incarnation, is_split=False)


def test_a_prefill_worker_without_a_decode_worker_of_its_layout_is_not_used() -> None:
    decode = snapshot("d")
    assert place(snapshot("p", P, layout_hash=2), decode) == Placement(decode.incarnation, is_split=False)


def test_a_cache_goes_where_it_fits_then_where_the_fewest_sequences_run() -> None:
    tight = snapshot("tight", free_blocks=1)
    calm, crowded = snapshot("calm", sequences=3), snapshot("crowded", sequences=8, free_blocks=1000)
    assert (
        choose_decode_worker([tight, crowded, calm], PlacementRequest(20), 1, Incarnation("p", 1)) == calm.incarnation
    )
    assert choose_decode_worker([tight], PlacementRequest(20), 1, Incarnation("p", 1)) == tight.incarnation, (
        "its queue is the backpressure"
    )


@pytest.mark.parametrize(
    ("group_blocks", "tokens", "blocks"),
    [((0,), 31, 2), ((0,), 32, 3), ((5,), 4000, 5), ((0, 5, 5), 31, 6), ((0, 5, 5), 1600, 111)],
)
def test_a_worker_needs_free_blocks_for_each_cache_group_of_a_sequence(
    group_blocks: tuple[int, ...], tokens: int, blocks: int
) -> None:
    """A group with a window needs at most its `group_blocks`."""
    crowded = snapshot("crowded", sequences=50, free_blocks=100_000)
    for free, chosen in ((blocks, "calm"), (blocks - 1, "crowded")):
        calm = snapshot("calm", free_blocks=free, group_blocks=group_blocks)
        choice = choose_decode_worker([crowded, calm], PlacementRequest(tokens), 1, NO_SENDER)
        assert choice is not None
        assert choice.id == chosen


def test_a_kv_cache_goes_to_another_worker_of_the_same_layout() -> None:
    sender = snapshot("p", P)
    assert (
        choose_decode_worker([snapshot("d", layout_hash=2), sender], PlacementRequest(20), 1, sender.incarnation)
        is None
    )


def test_a_cache_goes_to_another_prefill_worker_when_no_decode_worker_is_left() -> None:
    sender, other = snapshot("p", P), snapshot("q", P)
    assert choose_decode_worker([sender, other], PlacementRequest(20), 1, sender.incarnation) == other.incarnation


def test_a_worker_that_failed_is_chosen_last() -> None:
    failed, idle = snapshot("a", is_avoided=True), snapshot("b", sequences=99)
    assert place(failed, idle) == Placement(idle.incarnation, is_split=False)
    assert place(failed) == Placement(failed.incarnation, is_split=False)


def test_a_short_prompt_is_prefilled_by_its_decode_worker() -> None:
    prefill, decode = snapshot("p", P), snapshot("d")
    short = PlacementRequest(99, handoff_min_tokens=100)
    assert choose_first_worker([prefill, decode], short) == Placement(decode.incarnation, is_split=False)
    assert choose_first_worker([prefill, decode], replace(short, tokens=100)) == Placement(
        prefill.incarnation, is_split=True
    )
    assert choose_first_worker([prefill, replace(decode, queued_tokens=1)], short) == Placement(
        prefill.incarnation, is_split=True
    )
    assert choose_first_worker([prefill, replace(decode, is_avoided=True)], short) == Placement(
        prefill.incarnation, is_split=True
    )
    assert choose_first_worker([prefill, replace(decode, free_blocks=6)], short) == Placement(
        prefill.incarnation, is_split=True
    )


def test_a_long_prompt_is_prefilled_by_its_decode_worker_when_most_of_it_is_cached_there() -> None:
    holder, calm, prefill = snapshot("holder", sequences=9, cached_tokens=960), snapshot("calm"), snapshot("p", P)
    need = PlacementRequest(1000, handoff_min_tokens=100)
    assert choose_first_worker([calm, holder, prefill], need) == Placement(holder.incarnation, is_split=False)


def affinity_worker_of(session: str, *names: str, role: wire.Role = P) -> str:
    present = [snapshot(name, role) for name in names]
    found = choose_first_worker([*present, snapshot("d")], PlacementRequest(100, session=session))
    assert found is not None
    return found.incarnation.id


SESSIONS = [f"session {n}" for n in range(200)]


def test_requests_of_a_session_have_one_affinity_worker_in_any_order_of_workers() -> None:
    affinity_workers = {session: affinity_worker_of(session, "a", "b", "c", "e") for session in SESSIONS}
    assert affinity_workers == {session: affinity_worker_of(session, "e", "c", "b", "a") for session in SESSIONS}
    assert all(20 < list(affinity_workers.values()).count(name) < 80 for name in "abce")


def test_a_removed_worker_changes_only_its_own_sessions() -> None:
    affinity_workers = {session: affinity_worker_of(session, "a", "b", "c", "e") for session in SESSIONS}
    left = {session: affinity_worker_of(session, "a", "b", "c") for session in SESSIONS}
    assert all(
        left[session] == affinity_worker
        for session, affinity_worker in affinity_workers.items()
        if affinity_worker != "e"
    )


def test_a_cached_prefix_and_a_long_queue_outweigh_the_affinity_worker() -> None:
    affinity_worker, other = snapshot("a", P), snapshot("b", P)
    session = next(session for session in SESSIONS if affinity_worker_of(session, "a", "b") == "a")
    need = PlacementRequest(100, session=session)
    assert choose_first_worker([affinity_worker, other, snapshot("d")], need) == Placement(
        affinity_worker.incarnation, is_split=True
    )
    busy = replace(affinity_worker, queued_tokens=100)
    assert choose_first_worker([busy, other, snapshot("d")], need) == Placement(other.incarnation, is_split=True)
    holder = replace(other, cached_tokens=16)
    assert choose_first_worker([affinity_worker, holder, snapshot("d")], need) == Placement(
        other.incarnation, is_split=True
    )


def test_a_full_affinity_worker_gets_no_more_requests() -> None:
    pair = [snapshot("a"), snapshot("b")]
    session = next(
        each
        for each in SESSIONS
        if choose_decode_worker(pair, PlacementRequest(1, session=each), 1, NO_SENDER) == Incarnation("a", 1)
    )
    need = PlacementRequest(200, session=session)
    assert choose_decode_worker(
        [snapshot("a", free_blocks=2), snapshot("b", sequences=9)], need, 1, NO_SENDER
    ) == Incarnation("b", 1)


workers = st.builds(
    snapshot,
    st.sampled_from("abcdef"),
    st.sampled_from([P, D]),
    layout_hash=st.integers(1, 2),
    free_blocks=st.integers(0, 5),
    sequences=st.integers(0, 5),
    takes_prompts=st.booleans(),
    has_capacity=st.booleans(),
    is_avoided=st.booleans(),
    cached_tokens=st.sampled_from([0, 0, 4, 9]),
)


@pytest.mark.slow
@given(
    st.lists(workers, max_size=6, unique_by=lambda worker: worker.incarnation),
    st.booleans(),
    st.sampled_from(["", "s"]),
    st.sampled_from([0, 7, 1000]),
)
def test_the_chosen_worker_always_has_capacity(
    present: list[WorkerSnapshot], from_tokens: bool, session: str, handoff_min: int
) -> None:
    chosen = choose_first_worker(present, PlacementRequest(10, from_tokens, session, handoff_min))
    by_incarnation = {worker.incarnation: worker for worker in present}
    if chosen is not None:
        worker = by_incarnation[chosen.incarnation]
        assert worker.has_capacity
        assert worker.takes_prompts
        if chosen.is_split:
            assert worker.role == P
            assert any(other.role == D and other.layout_hash == worker.layout_hash for other in present)
    elif from_tokens or not any(worker.role == P for worker in present):
        decode = [worker for worker in present if worker.role == D] or present
        assert not any(worker.has_capacity and worker.takes_prompts for worker in decode)
