from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.router.placement.prefix_index import PromptBlocks
from decant.router.placement.worker_load import CorrectedCounter, LoadReservation, WorkerLoad

ANY = PromptBlocks(wire.EngineRequest(prompt=bytes(4)))


def view() -> WorkerLoad:
    return WorkerLoad(WorkerRegistration(capacity=Capacity(total_blocks=1000, block_size=16)))


def figures(known: WorkerLoad) -> tuple[int, int, int]:
    seen = known.snapshot()
    return seen.sequences, seen.queued_tokens, seen.free_blocks


def load(**fields: int) -> wire.Heartbeat:
    return wire.Heartbeat(load=wire.Load(free_blocks=1000, **fields))  # type: ignore[arg-type]


def test_requests_just_sent_count_until_they_end() -> None:
    known = view()
    sent = known.reserve(ANY, 160, computes_prompt=True)
    assert figures(known) == (1, 160, 990)
    fetched = known.reserve(ANY, 160, computes_prompt=False)
    assert figures(known) == (2, 160, 980), "what is fetched is not computed"
    sent.mark_prefilled()
    assert figures(known) == (2, 0, 980)
    sent.release()
    sent.release()
    fetched.release()
    assert figures(known) == (0, 0, 980), "its blocks may be free: that is for the worker to say"


def test_no_block_is_in_use_before_a_worker_reports_some() -> None:
    known = view()
    assert (known.used_blocks, known.total_blocks) == (0, 1000)
    known.apply_heartbeat(wire.Heartbeat(load=wire.Load(total_blocks=1000, free_blocks=700, cached_blocks=100)))
    assert (known.used_blocks, known.total_blocks) == (200, 1000)


def test_a_load_of_before_does_not_hide_what_is_there() -> None:
    known = view()
    sent = known.reserve(ANY, 160, computes_prompt=True)
    known.apply_heartbeat(load())
    assert figures(known)[:2] == (1, 160)
    known.apply_heartbeat(load(waiting=3, queued_tokens=500))
    assert figures(known)[:2] == (3, 500), "ours is in it"
    sent.release()
    assert figures(known)[:2] == (2, 340), "and no longer"
    known.apply_heartbeat(load())
    assert figures(known)[:2] == (0, 0)


@given(st.lists(st.tuples(st.sampled_from(["come", "go", "report"]), st.integers(0, 9)), max_size=30))
def test_a_count_is_never_less_than_what_is_ours(actions: list[tuple[str, int]]) -> None:
    count, ours = CorrectedCounter(), list[int]()
    for kind, amount in actions:
        if kind == "come":
            count.add(amount)
            ours.append(amount)
        elif kind == "go" and ours:
            count.add(-ours.pop())
        elif kind == "report":
            count.set_reported(amount)
            assert count.value == max(amount, sum(ours))
        assert count.own == sum(ours) <= count.value


def test_load_that_this_router_added_is_removed_when_its_requests_end() -> None:
    known = view()
    sent: list[LoadReservation] = [known.reserve(ANY, n, computes_prompt=n % 2 == 0) for n in range(1, 20)]
    for each in sent[::2]:
        each.mark_prefilled()
    for each in sent:
        each.release()
    assert (known.queued_tokens.own, known.sequences.own) == (0, 0)


steps = st.tuples(
    st.sampled_from(["reserve", "prefilled", "release", "heartbeat", "full"]), st.integers(0, 99), st.booleans()
)


@given(st.lists(steps, max_size=30))
def test_a_snapshot_is_never_older_than_the_last_change(actions: list[tuple[str, int, bool]]) -> None:
    known, sent = view(), list[LoadReservation]()
    for kind, amount, flag in actions:
        if kind == "reserve":
            sent.append(known.reserve(ANY, amount, computes_prompt=flag))
        elif kind == "prefilled" and sent:
            sent[amount % len(sent)].mark_prefilled()
        elif kind == "release" and sent:
            sent.pop(amount % len(sent)).release()
        elif kind == "heartbeat":
            known.apply_heartbeat(load(running=amount, queued_tokens=amount, takes_prompts=flag))
        elif kind == "full":
            known.mark_full()
        for cached_tokens in (0, 16):
            assert known.snapshot_with(cached_tokens, flag) == known._new_snapshot(cached_tokens, flag)
