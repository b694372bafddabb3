from __future__ import annotations

from dataclasses import dataclass

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import decant
from decant.client.address import targets
from decant.client.balancer import DEFAULT_BACKOFF, JITTER, RouterSelector, Selection
from decant.client.retry import LONGEST_PAUSE_S, MORE_TRIES, RetryState, is_retryable
from decant.runtime.error_details import ErrorDetail, Reason, ResumePoint
from decant.runtime.errors import from_detail


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def make_selector(count: int, clock: Clock) -> RouterSelector:
    """Selector that starts at router 0 and then draws the largest jitter."""
    draws = iter([(count - 1) / count])
    return RouterSelector(count, clock, lambda: next(draws, 1.0))


def lost(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> decant.ServiceError:
    return from_detail(ErrorDetail(code.value[0], "gRPC's text"))


def unavailable(retry_after: float = 0.0) -> decant.ServiceError:
    return decant.Unavailable(Reason.NO_WORKER, "none", retry_after=retry_after)


def test_routers_are_selected_in_turn() -> None:
    selector = make_selector(3, Clock())
    assert [selector.select() for _ in range(5)] == [Selection(router, 0) for router in (0, 1, 2, 0, 1)]


def test_a_router_that_failed_is_skipped_until_its_backoff_ends() -> None:
    clock = Clock()
    selector = make_selector(2, clock)
    selector.record_failure(1)
    assert [selector.select().router for _ in range(3)] == [0, 0, 0]
    clock.now += 0.11
    assert [selector.select().router for _ in range(3)] == [1, 0, 1]


def test_backoff_doubles_and_is_at_least_what_the_server_asks_for() -> None:
    clock = Clock()
    selector = make_selector(1, clock)
    backoffs = []
    for _ in range(6):
        selector.record_failure(0)
        backoffs.append(round(selector.select().pause, 6))
        clock.now += backoffs[-1] + 0.001
    assert backoffs == [0.1, 0.2, 0.4, 0.8, DEFAULT_BACKOFF.longest_s, DEFAULT_BACKOFF.longest_s]
    selector.record_failure(0, 7.0)
    assert selector.select().pause == 7.0
    selector.record_success(0)
    assert selector.select().pause == 0


def test_failures_during_a_backoff_count_once() -> None:
    selector = make_selector(1, Clock())
    for _ in range(100):
        selector.record_failure(0)
    assert round(selector.select().pause, 6) == 0.1


@given(st.lists(st.tuples(st.sampled_from(["fails", "answers", "time"]), st.integers(0, 2), st.floats(0, 3))))
def test_routers_without_backoff_are_selected_first(steps: list[tuple[str, int, float]]) -> None:
    clock = Clock()
    selector = RouterSelector(3, clock)
    backoffs = [0.0, 0.0, 0.0]
    for step, router, seconds in steps:
        if step == "fails":
            selector.record_failure(router, seconds)
            backoffs[router] = max(backoffs[router], clock.now + seconds)
        elif step == "answers":
            selector.record_success(router)
            backoffs[router] = 0.0
        else:
            clock.now += seconds
        selection = selector.select()
        assert clock.now + selection.pause >= backoffs[selection.router] - 1e-9
        assert selection.pause <= 3
        if not all(backoffs):
            assert selection.pause == 0


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (lost(), True),
        (lost(grpc.StatusCode.CANCELLED), True),  # RST_STREAM
        (lost(grpc.StatusCode.INTERNAL), True),
        (lost(grpc.StatusCode.UNKNOWN), True),
        (lost(grpc.StatusCode.DEADLINE_EXCEEDED), False),
        (lost(grpc.StatusCode.RESOURCE_EXHAUSTED), False),  # from gRPC itself: the message is too large
        (lost(grpc.StatusCode.UNIMPLEMENTED), True),  # another server at a router's address
        (unavailable(), True),
        (decant.Unavailable(Reason.DRAINING, "draining", retry_after=0.1), True),
        (decant.QueueFull(4, retry_after=1), True),
        (decant.QuotaExceeded("t", "in_flight", 4, 5, retry_after=1), True),
        (decant.Unavailable(Reason.WORKERS_LOST, "lost", retry_after=0.1), True),
        (decant.Aborted(Reason.WORKERS_LOST, "lost", resume=ResumePoint(0, 3)), False),  # the run is over
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
def test_only_retryable_errors_are_tried_again(error: decant.ServiceError, again: bool) -> None:
    assert is_retryable(error) is again
    tries = RetryState(make_selector(2, Clock()), resume_seconds=30)
    tries.mark_progress()
    if again:
        pause = tries.pause_after(error)
        assert (pause, tries.router) == (1 + JITTER if error.reason is Reason.QUOTA_EXCEEDED else 0, 1)
    else:
        with pytest.raises(type(error)):
            tries.pause_after(error)


def tried(tries: RetryState, clock: Clock, error: decant.ServiceError) -> int:
    count = 1
    while True:
        try:
            clock.now += tries.pause_after(error)
        except type(error):
            return count
        count += 1


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    "refusal", [unavailable(), decant.QueueFull(4, retry_after=0.1), lost(grpc.StatusCode.UNIMPLEMENTED)], ids=str
)
def test_refusals_before_the_first_message_are_limited(count: int, refusal: decant.ServiceError) -> None:
    clock = Clock()
    assert tried(RetryState(make_selector(count, clock), resume_seconds=30), clock, refusal) == count + MORE_TRIES
    assert clock.now < 100.0 + 1


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    "loss", [lost(), decant.Unavailable(Reason.DRAINING, "draining", retry_after=0.1)], ids=["lost", "draining"]
)
def test_a_loss_before_the_first_message_is_tried_for_resume_seconds(count: int, loss: decant.ServiceError) -> None:
    clock = Clock()
    assert tried(RetryState(make_selector(count, clock), resume_seconds=30), clock, loss) > 20
    assert 28 < clock.now - 100 < 30


@pytest.mark.parametrize("count", [1, 2, 5])
def test_without_resume_seconds_a_loss_before_the_first_message_has_a_few_tries(count: int) -> None:
    clock = Clock()
    assert tried(RetryState(make_selector(count, clock), resume_seconds=0), clock, lost()) == count + MORE_TRIES


def test_the_tries_after_a_refusal_do_not_count_losses() -> None:
    clock = Clock()
    tries = RetryState(make_selector(1, clock), resume_seconds=30)
    for _ in range(10):
        clock.now += tries.pause_after(lost())
    assert tried(tries, clock, unavailable()) == 1 + MORE_TRIES


def test_a_loss_that_only_other_settings_end_has_a_few_tries() -> None:
    clock = Clock()
    tries = RetryState(make_selector(1, clock), resume_seconds=30)
    for _ in range(MORE_TRIES):
        clock.now += tries.pause_after(lost(), is_lasting=True)
    with pytest.raises(decant.Unavailable):
        tries.pause_after(lost(), is_lasting=True)


def test_resume_seconds_start_again_after_a_call_that_a_router_had_accepted() -> None:
    clock = Clock()
    tries = RetryState(make_selector(1, clock), resume_seconds=3)
    for _ in range(20):
        clock.now += 2
        tries.mark_accepted()
        clock.now += tries.pause_after(lost())
    assert clock.now > 140
    assert tried(tries, clock, lost()) < 10


def test_a_stream_that_has_begun_is_tried_for_its_resume_seconds() -> None:
    clock = Clock()
    tries = RetryState(make_selector(1, clock), resume_seconds=30)
    tries.mark_progress()
    assert tried(tries, clock, lost()) > 20
    assert 28 < clock.now - 100 < 30


def test_resume_seconds_start_again_after_a_message() -> None:
    clock = Clock()
    tries = RetryState(make_selector(1, clock), resume_seconds=3)
    for _ in range(20):
        tries.mark_progress()
        clock.now += tries.pause_after(lost()) + 1
    assert clock.now > 120


def test_without_resume_seconds_a_stream_that_broke_is_over() -> None:
    for count in (1, 2):
        tries = RetryState(make_selector(count, Clock()), resume_seconds=0)
        tries.mark_progress()
        with pytest.raises(decant.Unavailable):
            tries.pause_after(lost())


def test_a_new_call_begins_at_once_despite_backoffs() -> None:
    clock = Clock()
    selector = make_selector(1, clock)
    selector.record_failure(0, 60)
    assert RetryState(selector).router == 0
    assert selector.select().pause == 60


def test_retry_after_is_waited_for_unless_it_is_long_or_beyond_the_deadline() -> None:
    clock = Clock()
    assert RetryState(make_selector(1, clock)).pause_after(unavailable(2)) == 2 * (1 + JITTER)
    assert RetryState(make_selector(1, clock)).pause_after(unavailable(LONGEST_PAUSE_S)) == LONGEST_PAUSE_S * (
        1 + JITTER
    )
    assert RetryState(make_selector(1, clock), seconds=4).pause_after(unavailable(2)) == 2 * (1 + JITTER)
    for seconds, asked in ((1, 2), (None, LONGEST_PAUSE_S + 1)):
        with pytest.raises(decant.Unavailable):
            RetryState(make_selector(1, clock), seconds).pause_after(unavailable(asked))


def test_another_router_is_tried_before_waiting_for_one() -> None:
    tries = RetryState(make_selector(2, Clock()))
    assert (tries.pause_after(unavailable(3)), tries.router) == (0, 1)
    assert (tries.pause_after(unavailable(3)), tries.router) == (3 * (1 + JITTER), 0)


def test_a_refusal_backs_off_for_its_own_call_only() -> None:
    for refusal in (
        decant.QueueFull(4, retry_after=20),
        unavailable(20),
        decant.Unavailable(Reason.WORKERS_LOST, "lost", retry_after=20),
        decant.Unavailable(Reason.STATE_STORE_UNAVAILABLE, "away", retry_after=20),
    ):
        selector = make_selector(2, Clock())
        refused = RetryState(selector)
        assert (refused.pause_after(refusal), refused.router) == (0, 1)
        assert RetryState(selector).router == 0
        other = RetryState(selector)
        assert other.router == 1
        assert (other.pause_after(lost()), other.router) == (0, 0)


def test_a_drain_or_lost_connection_backs_off_for_all_calls() -> None:
    for error in (lost(), decant.Unavailable(Reason.DRAINING, "draining", retry_after=0.1)):
        selector = make_selector(2, Clock())
        assert RetryState(selector).pause_after(error) == 0
        assert [selector.select().router for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("count", [1, 2, 10])
def test_an_exceeded_quota_backs_off_all_routers(count: int) -> None:
    clock = Clock()
    tries = RetryState(make_selector(count, clock))
    refusal = decant.QuotaExceeded("t", "in_flight", 4, 5, retry_after=2)
    for _ in range(MORE_TRIES):
        pause = tries.pause_after(refusal)
        assert pause >= 2
        clock.now += pause
    with pytest.raises(decant.QuotaExceeded):
        tries.pause_after(refusal)


def test_calls_that_are_refused_together_return_at_different_times() -> None:
    for refusal in (decant.QueueFull(4, retry_after=1), decant.QuotaExceeded("t", "in_flight", 4, 5, retry_after=1)):
        selector = RouterSelector(1, Clock())
        pauses = [RetryState(selector).pause_after(refusal) for _ in range(100)]
        assert all(1 <= pause <= 1 + JITTER for pause in pauses)
        assert len({round(pause, 2) for pause in pauses}) > 20


def test_a_refusal_before_the_stream_began_does_not_delay_its_resumption() -> None:
    tries = RetryState(make_selector(2, Clock()), resume_seconds=3)
    assert (tries.pause_after(decant.QueueFull(4, retry_after=20)), tries.router) == (0, 1)
    tries.mark_progress()
    assert (tries.pause_after(lost()), tries.router) == (0, 0)


@given(st.floats(0, 50), st.lists(st.tuples(st.booleans(), st.floats(0, 8)), max_size=30))
def test_no_try_begins_after_the_deadline(seconds: float, steps: list[tuple[bool, float]]) -> None:
    clock = Clock()
    tries = RetryState(RouterSelector(2, clock), seconds, resume_seconds=1000)
    for answers, took in steps:
        clock.now += took
        if answers:
            tries.mark_progress()
        try:
            clock.now += tries.pause_after(unavailable(took))
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
def test_addresses_become_one_target_each(addresses: str | list[str], meant: tuple[str, ...]) -> None:
    assert targets(addresses) == meant


def test_a_scheme_must_agree_with_tls() -> None:
    assert targets("https://a:1, grpcs://b", tls=True) == ("a:1", "b:50051")
    with pytest.raises(ValueError, match=r"https:// means TLS: give its roots too \(tls=Tls\(ca=...\), --ca\)"):
        targets("https://a:1")
    with pytest.raises(ValueError, match="http:// means plaintext, but tls= is set"):
        targets("http://a:1", tls=True)


BAD = ["", ",", "a:1,", [], "ftp://a:1", "a:0", "a:65536", "a:http", "http://a:1/path", "http://", "a b", "a:"]


@pytest.mark.parametrize("addresses", BAD)
def test_an_invalid_address_is_refused(addresses: str | list[str]) -> None:
    with pytest.raises(ValueError, match="address: "):
        targets(addresses)
