"""Whose turn it is, and what is tried again, with a clock that tests move."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import decant
from decant.client.address import targets
from decant.client.balancer import LONGEST_REST_S, SPREAD, RouterSelector, Turn
from decant.client.retry import LONGEST_PAUSE_S, MORE_TRIES, RetryState, may_try_again
from decant.runtime.error_details import ErrorDetail, Reason, ResumePoint
from decant.runtime.errors import from_fault


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def make_turns(count: int, clock: Clock) -> RouterSelector:
    """Begins with router 0, keeps every rest in full, and adds all that may be added to a wait."""
    draws = iter([(count - 1) / count])
    return RouterSelector(count, clock, lambda: next(draws, 1.0))


def lost(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> decant.ServiceError:
    return from_fault(ErrorDetail(code.value[0], "as gRPC says it"))


def away(retry_after: float = 0.0) -> decant.ServiceError:
    return decant.Unavailable(Reason.NO_WORKER, "none", retry_after=retry_after)


def test_routers_are_asked_in_turn() -> None:
    turns = make_turns(3, Clock())
    assert [turns.take() for _ in range(5)] == [Turn(router, 0) for router in (0, 1, 2, 0, 1)]


def test_one_that_failed_is_passed_over_and_comes_back_by_itself() -> None:
    clock = Clock()
    turns = make_turns(2, clock)
    turns.failed(1)
    assert [turns.take().router for _ in range(3)] == [0, 0, 0]
    clock.now += 0.11
    assert [turns.take().router for _ in range(3)] == [1, 0, 1]


def test_a_router_rests_longer_each_time_and_as_long_as_it_asked_for() -> None:
    clock = Clock()
    turns = make_turns(1, clock)
    rests = []
    for _ in range(6):
        turns.failed(0)
        rests.append(round(turns.take().pause, 6))
        clock.now += rests[-1] + 0.001
    assert rests == [0.1, 0.2, 0.4, 0.8, LONGEST_REST_S, LONGEST_REST_S]
    turns.failed(0, 7.0)
    assert turns.take().pause == 7.0
    turns.answered(0)
    assert turns.take().pause == 0


def test_a_crowd_that_fails_together_counts_once() -> None:
    turns = make_turns(1, Clock())
    for _ in range(100):
        turns.failed(0)
    assert round(turns.take().pause, 6) == 0.1


@given(st.lists(st.tuples(st.sampled_from(["fails", "answers", "time"]), st.integers(0, 2), st.floats(0, 3))))
def test_whoever_is_well_goes_before_whoever_rests(steps: list[tuple[str, int, float]]) -> None:
    clock = Clock()
    turns = RouterSelector(3, clock)
    rests = [0.0, 0.0, 0.0]
    for step, router, seconds in steps:
        if step == "fails":
            turns.failed(router, seconds)
            rests[router] = max(rests[router], clock.now + seconds)
        elif step == "answers":
            turns.answered(router)
            rests[router] = 0.0
        else:
            clock.now += seconds
        turn = turns.take()
        assert clock.now + turn.pause >= rests[turn.router] - 1e-9
        assert turn.pause <= 3
        if not all(rests):
            assert turn.pause == 0


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (lost(), True),
        (lost(grpc.StatusCode.CANCELLED), True),  # RST_STREAM
        (lost(grpc.StatusCode.INTERNAL), True),
        (lost(grpc.StatusCode.UNKNOWN), True),
        (lost(grpc.StatusCode.DEADLINE_EXCEEDED), False),
        (lost(grpc.StatusCode.RESOURCE_EXHAUSTED), False),  # gRPC's own: a message that is too large
        (lost(grpc.StatusCode.UNIMPLEMENTED), True),  # another's server, where a router was
        (away(), True),
        (decant.Unavailable(Reason.DRAINING, "draining", retry_after=0.1), True),
        (decant.QueueFull(4, retry_after=1), True),
        (decant.QuotaExceeded("t", "in_flight", 4, 5, retry_after=1), True),
        (decant.Unavailable(Reason.WORKERS_LOST, "lost", retry_after=0.1), True),
        (decant.Aborted(Reason.WORKERS_LOST, "lost", resume=ResumePoint(0, 3)), False),  # it is over
        (decant.Aborted(Reason.DRAINING, "draining", resume=ResumePoint(0, 3)), True),
        (decant.Aborted(Reason.OWNER_CHANGED, "taken over", resume=ResumePoint(0, 3)), True),
        (decant.Aborted(Reason.SLOW_READER, "unread", resume=ResumePoint(0, 3)), True),
        (decant.Unavailable(Reason.OWNER_CHANGED, "taken over", retry_after=0.1), True),
        (decant.Aborted(Reason.SUPERSEDED, "newer"), False),
        (decant.Aborted(Reason.TAIL_UNCERTAIN, "tail", resume=ResumePoint(0, 3)), False),
        (decant.Cancelled(), False),
        (decant.DeadlineExceeded(), False),
        (decant.Internal(), False),
        (decant.InvalidArgument("f", "l", 1), False),
        (decant.Unimplemented("f"), False),
        (decant.NotFound("request", "r"), False),
        (decant.AlreadyExists("r"), False),
        (decant.OutOfRange(9, 0, 3), False),
        (decant.Unauthenticated(), False),
        (decant.PermissionDenied("it"), False),
    ],
    ids=lambda value: f"{value.code.name}-{value.label}" if isinstance(value, decant.ServiceError) else str(value),
)
def test_only_what_may_be_answered_elsewhere_or_later_is_tried_again(error: decant.ServiceError, again: bool) -> None:
    assert may_try_again(error) is again
    tries = RetryState(make_turns(2, Clock()), patience=30)
    tries.heard()
    if again:
        pause = tries.after(error)
        assert (pause, tries.router) == (1 + SPREAD if error.reason is Reason.QUOTA_EXCEEDED else 0, 1)
    else:
        with pytest.raises(type(error)):
            tries.after(error)


def tried(tries: RetryState, clock: Clock, error: decant.ServiceError) -> int:
    """How often it is tried in all, each try failing at once."""
    count = 1
    while True:
        try:
            clock.now += tries.after(error)
        except type(error):
            return count
        count += 1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_nobody_answers_is_given_up_soon(count: int) -> None:
    clock = Clock()
    assert tried(RetryState(make_turns(count, clock), patience=30), clock, lost()) == count + MORE_TRIES
    assert clock.now < 100.0 + 1


def test_a_stream_that_has_begun_is_tried_for_as_long_as_the_patience_lasts() -> None:
    clock = Clock()
    tries = RetryState(make_turns(1, clock), patience=30)
    tries.heard()
    assert tried(tries, clock, lost()) > 20
    assert 28 < clock.now - 100 < 30


def test_patience_is_whole_again_when_something_came() -> None:
    clock = Clock()
    tries = RetryState(make_turns(1, clock), patience=3)
    for _ in range(20):
        tries.heard()
        clock.now += tries.after(lost()) + 1
    assert clock.now > 120


def test_without_patience_a_stream_that_broke_is_over() -> None:
    for count in (1, 2):
        tries = RetryState(make_turns(count, Clock()), patience=0)
        tries.heard()
        with pytest.raises(decant.Unavailable):
            tries.after(lost())


def test_a_new_call_is_not_held_up_by_what_others_met() -> None:
    clock = Clock()
    turns = make_turns(1, clock)
    turns.failed(0, 60)
    assert RetryState(turns).router == 0
    assert turns.take().pause == 60


def test_what_the_server_asks_for_is_waited_for_unless_it_is_much_or_too_late() -> None:
    clock = Clock()
    assert RetryState(make_turns(1, clock)).after(away(2)) == 2 * (1 + SPREAD)
    assert RetryState(make_turns(1, clock)).after(away(LONGEST_PAUSE_S)) == LONGEST_PAUSE_S * (1 + SPREAD)
    assert RetryState(make_turns(1, clock), seconds=4).after(away(2)) == 2 * (1 + SPREAD)
    for seconds, asked in ((1, 2), (None, LONGEST_PAUSE_S + 1)):
        with pytest.raises(decant.Unavailable):
            RetryState(make_turns(1, clock), seconds).after(away(asked))


def test_another_router_is_asked_before_one_is_waited_for() -> None:
    tries = RetryState(make_turns(2, Clock()))
    assert (tries.after(away(3)), tries.router) == (0, 1)
    assert (tries.after(away(3)), tries.router) == (3 * (1 + SPREAD), 0)


def test_a_router_that_refused_one_call_is_still_asked_by_others() -> None:
    for refusal in (
        decant.QueueFull(4, retry_after=20),
        away(20),
        decant.Unavailable(Reason.WORKERS_LOST, "lost", retry_after=20),
        decant.Unavailable(Reason.STATE_STORE_AWAY, "away", retry_after=20),
    ):
        turns = make_turns(2, Clock())
        refused = RetryState(turns)
        assert (refused.after(refusal), refused.router) == (0, 1)
        assert RetryState(turns).router == 0
        other = RetryState(turns)
        assert other.router == 1
        assert (other.after(lost()), other.router) == (0, 0)


def test_a_router_that_drains_or_is_gone_is_passed_over_by_others() -> None:
    for error in (lost(), decant.Unavailable(Reason.DRAINING, "draining", retry_after=0.1)):
        turns = make_turns(2, Clock())
        assert RetryState(turns).after(error) == 0
        assert [turns.take().router for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("count", [1, 2, 10])
def test_a_quota_is_not_asked_of_the_next_router_before_its_time(count: int) -> None:
    clock = Clock()
    tries = RetryState(make_turns(count, clock))
    refusal = decant.QuotaExceeded("t", "in_flight", 4, 5, retry_after=2)
    for _ in range(MORE_TRIES):
        pause = tries.after(refusal)
        assert pause >= 2
        clock.now += pause
    with pytest.raises(decant.QuotaExceeded):
        tries.after(refusal)


def test_calls_that_are_refused_together_do_not_come_back_together() -> None:
    for refusal in (decant.QueueFull(4, retry_after=1), decant.QuotaExceeded("t", "in_flight", 4, 5, retry_after=1)):
        turns = RouterSelector(1, Clock())
        pauses = [RetryState(turns).after(refusal) for _ in range(100)]
        assert all(1 <= pause <= 1 + SPREAD for pause in pauses)
        assert len({round(pause, 2) for pause in pauses}) > 20


def test_a_refusal_before_the_stream_began_does_not_delay_its_resumption() -> None:
    tries = RetryState(make_turns(2, Clock()), patience=3)
    assert (tries.after(decant.QueueFull(4, retry_after=20)), tries.router) == (0, 1)
    tries.heard()
    assert (tries.after(lost()), tries.router) == (0, 0)


@given(st.floats(0, 50), st.lists(st.tuples(st.booleans(), st.floats(0, 8)), max_size=30))
def test_no_try_begins_after_the_deadline(seconds: float, steps: list[tuple[bool, float]]) -> None:
    clock = Clock()
    tries = RetryState(RouterSelector(2, clock), seconds, patience=1000)
    for hears, took in steps:
        clock.now += took
        if hears:
            tries.heard()
        try:
            clock.now += tries.after(away(took))
        except decant.Unavailable:
            return
        assert clock.now < 100 + seconds
        assert tries.remaining() == pytest.approx(100 + seconds - clock.now)


@pytest.mark.parametrize(
    ("addresses", "meant"),
    [
        ("a:1", ("a:1",)),
        ("a:1,b:2", ("a:1", "b:2")),
        (" a:1 , b:2,a:1", ("a:1", "b:2")),
        (["a:1", "b:2,c:3"], ("a:1", "b:2", "c:3")),
        ("dns:///decant.example:50051", ("dns:///decant.example:50051",)),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", ("ipv4:10.0.0.1:1,10.0.0.2:1",)),
        ("[::1]:5", ("[::1]:5",)),
        ("localhost", ("localhost:50051",)),
        ("a, b:2", ("a:50051", "b:2")),
        ("::1", ("[::1]:50051",)),
        ("[::1]", ("[::1]:50051",)),
        ("dns:///decant.example", ("dns:///decant.example:50051",)),
        ("dns://8.8.8.8/decant.example:7", ("dns://8.8.8.8/decant.example:7",)),
        ("grpc://a:1,http://b,HTTP://c:3/", ("a:1", "b:50051", "c:3")),
        ("unix:/run/decant.sock", ("unix:/run/decant.sock",)),
    ],
)
def test_routers_are_named_one_by_one(addresses: str | list[str], meant: tuple[str, ...]) -> None:
    assert targets(addresses) == meant


def test_a_scheme_says_whether_tls_is_meant() -> None:
    assert targets("https://a:1, grpcs://b", tls=True) == ("a:1", "b:50051")
    with pytest.raises(ValueError, match=r"https:// means TLS: give its roots too \(tls=Tls\(ca=...\), --ca\)"):
        targets("https://a:1")
    with pytest.raises(ValueError, match="http:// means plaintext, and TLS is asked for"):
        targets("http://a:1", tls=True)


BAD = ["", ",", "a:1,", [], "ftp://a:1", "a:0", "a:65536", "a:http", "http://a:1/path", "http://", "a b", "a:"]


@pytest.mark.parametrize("addresses", BAD)
def test_what_is_no_address_is_refused(addresses: str | list[str]) -> None:
    with pytest.raises(ValueError, match="address: "):
        targets(addresses)
