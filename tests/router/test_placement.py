"""Placement is a function: a snapshot in, a choice out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from protos import worker_pb2 as wire
from router.placement import Place, Seen, first_place, taker
from state.names import Life

P, D = wire.ROLE_PREFILL, wire.ROLE_DECODE


def seen(name: str, role: wire.Role = D, **more: object) -> Seen:
    worker = Seen(Life(name, 1), role, layout=1, block_tokens=16, free_blocks=100, sequences=0, queued_tokens=0)
    return replace(worker, **more)  # type: ignore[arg-type]


def place(*workers: Seen, tokens: int = 10, from_tokens: bool = False) -> Place | None:
    return first_place(workers, tokens, from_tokens=from_tokens)


def test_a_prompt_goes_where_the_fewest_tokens_are_queued() -> None:
    long, short = seen("long", P, queued_tokens=900), seen("short", P, queued_tokens=100, sequences=9)
    assert place(long, short, seen("d")) == Place(short.life, prefill=True)


def test_a_cached_prefix_outweighs_as_many_queued_tokens() -> None:
    holder, idle = seen("holder", P, queued_tokens=500, cached_tokens=800), seen("idle", P)
    assert place(holder, idle, seen("d"), tokens=1000) == Place(holder.life, prefill=True)
    crowded = replace(holder, queued_tokens=900)
    assert place(crowded, idle, seen("d"), tokens=1000) == Place(idle.life, prefill=True)


def test_a_cache_goes_to_the_calm_and_among_equals_to_who_has_most_of_it() -> None:
    calm, holder = seen("calm", sequences=3), seen("holder", sequences=4, cached_tokens=16)
    assert taker([calm, holder], 20, 1, Life("p", 1)) == calm.life
    assert taker([replace(calm, sequences=4), holder], 20, 1, Life("p", 1)) == holder.life


def test_room_is_needed_for_what_is_not_cached() -> None:
    tight, other = seen("tight", free_blocks=2, cached_tokens=64), seen("other", sequences=1)
    assert taker([tight, other], 90, 1, Life("p", 1)) == tight.life
    assert taker([replace(tight, cached_tokens=48), other], 90, 1, Life("p", 1)) == other.life


def test_a_full_prefill_pool_is_waited_for_and_a_missing_one_is_not() -> None:
    full = seen("p", P, takes_prompts=False)
    busy = seen("q", P, has_room=False)
    decode = seen("d")
    assert place(full, busy, decode) is None
    assert place(decode) == Place(decode.life, prefill=False)


def test_without_decode_workers_a_prefill_worker_does_both() -> None:
    only = seen("p", P)
    assert place(only) == Place(only.life, prefill=False)


def test_tokens_that_are_written_go_to_a_decode_worker() -> None:
    decode = seen("d", sequences=50)
    assert place(seen("p", P), decode, from_tokens=True) == Place(decode.life, prefill=False)


def test_a_prefill_worker_without_a_partner_is_not_asked() -> None:
    decode = seen("d")
    assert place(seen("p", P, layout=2), decode) == Place(decode.life, prefill=False)


def test_a_cache_goes_where_it_fits_then_where_the_fewest_sequences_run() -> None:
    tight = seen("tight", free_blocks=1)
    calm, crowded = seen("calm", sequences=3), seen("crowded", sequences=8, free_blocks=1000)
    assert taker([tight, crowded, calm], 20, 1, Life("p", 1)) == calm.life
    assert taker([tight], 20, 1, Life("p", 1)) == tight.life, "its queue is the backpressure"


def test_a_cache_goes_to_no_other_layout_and_never_back_to_its_giver() -> None:
    giver = seen("p", P)
    assert taker([seen("d", layout=2), giver], 20, 1, giver.life) is None


def test_a_cache_goes_to_another_prefill_worker_when_no_decode_worker_is_left() -> None:
    giver, other = seen("p", P), seen("q", P)
    assert taker([giver, other], 20, 1, giver.life) == other.life


def test_who_failed_is_asked_last_but_asked() -> None:
    failed, idle = seen("a", avoided=True), seen("b", sequences=99)
    assert place(failed, idle) == Place(idle.life, prefill=False)
    assert place(failed) == Place(failed.life, prefill=False)


workers = st.builds(
    seen,
    st.sampled_from("abcdef"),
    st.sampled_from([P, D]),
    layout=st.integers(1, 2),
    free_blocks=st.integers(0, 5),
    sequences=st.integers(0, 5),
    takes_prompts=st.booleans(),
    has_room=st.booleans(),
    avoided=st.booleans(),
)


@given(st.lists(workers, max_size=6, unique_by=lambda worker: worker.life), st.booleans())
def test_a_choice_is_always_somebody_who_takes_it(present: list[Seen], from_tokens: bool) -> None:
    chosen = first_place(present, 10, from_tokens=from_tokens)
    by_life = {worker.life: worker for worker in present}
    if chosen is not None:
        worker = by_life[chosen.life]
        assert worker.has_room
        assert worker.takes_prompts
        if chosen.prefill:
            assert worker.role == P
            assert any(other.role == D and other.layout == worker.layout for other in present)
    elif from_tokens or not any(worker.role == P for worker in present):
        decode = [worker for worker in present if worker.role == D] or present
        assert not any(worker.has_room and worker.takes_prompts for worker in decode)
