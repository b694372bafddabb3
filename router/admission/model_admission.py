"""Acceptance and start of the requests for one model: accepted work ends before its deadline.

request --check--> refused at once, if it could not end in time
           '-----> waits --may start--> at workers --> ended
                     '--its deadline passes, or can't be kept any more--> failed, before it costs a step

A request is accepted if its forecast end keeps ``DEADLINE_SHARE`` of the time until its deadline. A waiting request
starts once one more sequence leaves every running answer fast enough for its own deadline.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from decant.router.admission.output_length import OutputLengths
from decant.router.admission.request_size import RequestSize
from decant.router.placement.capacity import PoolCapacity
from decant.router.settings import RouterSettings
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import RETRY_AFTER_SECONDS, DeadlineExceeded, QueueFull
from decant.runtime.priority import queue_key
from decant.runtime.serving.admission import Admission, AdmissionSlot

MAX_RETRY_SECONDS = 10.0
"""Longest retry delay of a refusal: until then the load has changed."""
DEADLINE_SHARE = 0.5
"""Share of the time until a request's deadline that its forecast end may take: forecasts err, and answers vary."""
OVERTAKEN_SHARE = 0.75
"""The same for a waiting request that another one overtakes."""
RUNNING_SHARE = 0.9
"""The same for the answers that run, whose forecasts are shorter."""
REFRESH_SECONDS = 0.2
"""Age of the measured capacity, which takes time in proportion to the workers and the running requests."""


@dataclass(slots=True, eq=False)
class AcceptedRequest:
    size: RequestSize
    due: float
    """Deadline by the event loop's clock; infinite: none."""
    order: float
    priority: int
    deadline: Deadline
    num_tokens: Callable[[], int] = lambda: 0
    """Number of output tokens so far."""
    expected_tokens: float = 1.0
    """Of its output, as it was accepted."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now: a request's first token, and its last."""

    wait_s: float
    decode_s: float

    @property
    def end_s(self) -> float:
        return self.wait_s + self.decode_s


@dataclass(slots=True)
class _Totals:
    """Sums over waiting requests."""

    sequences: int = 0
    prompt_tokens: int = 0

    def add(self, size: RequestSize, sign: int = 1) -> None:
        self.sequences += sign * size.num_outputs
        self.prompt_tokens += sign * size.prompt_tokens


@dataclass(slots=True)
class _State:
    """Capacity as of ``at``, with the number of sequences up to which every running answer ends in time."""

    at: float = -math.inf
    capacity: PoolCapacity = field(default_factory=PoolCapacity)
    sequence_limit: float = math.inf


class ModelAdmission:
    def __init__(
        self, settings: RouterSettings, measure: Callable[[], PoolCapacity], now: Callable[[], float] | None = None
    ) -> None:
        self.lengths = OutputLengths()
        self._now = now or asyncio.get_running_loop().time
        self._settings = settings
        self._measure = measure
        self._slots = Admission(settings.max_active, settings.queue_limit, self._now, self._may_start)
        self._started: set[AcceptedRequest] = set()
        self._waiting: list[AcceptedRequest] = []  # by order
        self._totals = _Totals()
        self._further_sequences = 0  # of started requests with several outputs, besides their first
        self._expected_tokens = 0.0  # of all accepted requests
        self._uncached_share = 1.0
        self._state = _State()

    @property
    def active(self) -> int:
        return self._slots.active

    @property
    def waiting(self) -> int:
        return self._slots.waiting

    # Acceptance

    def check(self, size: RequestSize, priority: int, deadline: Deadline, other_waiting: int = 0) -> None:
        """Raise QueueFull if too many requests wait, or if the request or one that waits could not end in time.

        Cheap, so that an overloaded router refuses at little cost. A request that would be alone is never refused.
        """
        self._refreshed()
        waiting = self._slots.waiting + other_waiting
        if waiting >= self._settings.queue_limit:
            raise QueueFull(self._settings.queue_limit, retry_after=RETRY_AFTER_SECONDS)
        if not self._sequences + waiting:
            return
        order = queue_key(self._now(), priority)
        forecast = self._forecast(size, self._ahead_of(order))
        self._check_forecast(forecast, deadline)
        self._check_overtaken(size, order)

    def _check_forecast(self, forecast: Forecast, deadline: Deadline) -> None:
        left, limit = deadline.remaining(), self._settings.max_queue_seconds
        if left is not None and forecast.end_s > DEADLINE_SHARE * left:
            detail = (
                f"the answer is expected after {forecast.end_s:.1f} s ({forecast.wait_s:.1f} s until its first token), "
                f"at most {DEADLINE_SHARE * left:.1f} s are allowed for a deadline in {left:.1f} s"
            )
            raise QueueFull(detail, retry_after=_retry_after(forecast.end_s - DEADLINE_SHARE * left))
        if forecast.wait_s > limit:
            detail = f"a wait of {forecast.wait_s:.1f} s is predicted, at most {limit:g} s are allowed"
            raise QueueFull(detail, retry_after=_retry_after(forecast.wait_s - limit))

    def _check_overtaken(self, size: RequestSize, order: float) -> None:
        """Check that the requests that this one overtakes, by its priority, still end in time."""
        ahead = self._ahead_of(order)
        ahead.add(size)
        for request in self._waiting[bisect_right(self._waiting, order, key=_order) :]:
            late = self._forecast(request.size, ahead).end_s - OVERTAKEN_SHARE * (request.due - self._now())
            if late > 0:
                detail = "a request of lower priority that was accepted before would miss its deadline"
                raise QueueFull(detail, retry_after=_retry_after(late))
            ahead.add(request.size)

    def _ahead_of(self, order: float) -> _Totals:
        if not self._waiting or self._waiting[-1].order <= order:
            return _Totals(self._totals.sequences, self._totals.prompt_tokens)
        ahead = _Totals()
        for request in self._waiting[: bisect_right(self._waiting, order, key=_order)]:
            ahead.add(request.size)
        return ahead

    def _forecast(self, size: RequestSize, ahead: _Totals) -> Forecast:
        """Forecast a request behind ``ahead`` and all that runs.

        Answers that exceed the pool wait for others to end, at the rate at which the pool generates tokens; prompts
        wait for those before them.
        """
        state = self._state
        capacity = state.capacity
        if not capacity.decode_workers:
            return Forecast(0.0, 0.0)
        limit = max(1.0, min(state.sequence_limit, capacity.batch_limit))
        after = self._sequences + ahead.sequences + size.num_outputs
        shared = min(after, limit)
        wait_for_slot = max(0.0, after - limit) * self._mean_output(size) / capacity.tokens_per_s(shared)
        new_tokens = self._uncached_share * (ahead.prompt_tokens + size.prompt_tokens)
        wait_for_prompt = (capacity.queued_prompt_tokens + new_tokens) / capacity.prompt_tokens_per_s
        decode = self.lengths.high(size) * capacity.seconds_per_token(shared)
        return Forecast(max(wait_for_slot, wait_for_prompt), decode)

    def _mean_output(self, size: RequestSize) -> float:
        """Mean output of the accepted requests, or of the new one if it is the first."""
        accepted = len(self._started) + len(self._waiting)
        return self._expected_tokens / accepted if accepted else self.lengths.mean(size)

    # Start

    def accepted(
        self, size: RequestSize, priority: int, deadline: Deadline, num_tokens: Callable[[], int] = lambda: 0
    ) -> AcceptedRequest:
        """Describe a request to ``enter``; ``num_tokens`` returns the number of its output tokens so far."""
        now, left = self._now(), deadline.remaining()
        due = math.inf if left is None else now + left
        expected = self.lengths.mean(size)
        return AcceptedRequest(size, due, queue_key(now, priority), priority, deadline, num_tokens, expected)

    def num_ahead(self, request: AcceptedRequest) -> int:
        """Number of waiting requests that go before this one, which waits too."""
        return bisect_left(self._waiting, request.order, key=_order)

    async def enter(self, request: AcceptedRequest) -> StartedRequest:
        """Wait until the request may start. Raises QueueFull, and DeadlineExceeded once it can't end in time.

        The caller must ``release`` the result.
        """
        insort(self._waiting, request, key=_order)
        self._totals.add(request.size)
        self._expected_tokens += request.expected_tokens
        since, slot = self._now(), None
        try:
            slot = await self._slots.enter(request.priority, request.deadline)
        finally:
            self._waiting.remove(request)
            self._totals.add(request.size, -1)
            if slot is None:
                self._expected_tokens -= request.expected_tokens
        self._add_started(request)
        started = StartedRequest(self, request, slot)
        if self._now() - since > REFRESH_SECONDS:
            self._check_in_time(request, started)
        return started

    def enter_at_once(self, request: AcceptedRequest) -> StartedRequest:
        """Start a request that another router accepted, whatever runs here."""
        self._expected_tokens += request.expected_tokens
        self._add_started(request)
        return StartedRequest(self, request, self._slots.enter_at_once())

    def grant(self) -> None:
        """Start waiting requests; called when the measured capacity may have changed."""
        if self._slots.waiting:
            self._slots.grant()

    def _add_started(self, request: AcceptedRequest) -> None:
        self._started.add(request)
        self._further_sequences += request.size.num_outputs - 1
        self._limit_sequences(request)

    def _check_in_time(self, request: AcceptedRequest, started: StartedRequest) -> None:
        left = max(0.0, request.due - self._now())
        needed = request.expected_tokens * self._state.capacity.seconds_per_token(self._sequences)
        if needed > left and self._sequences > 1:
            started.release()
            raise DeadlineExceeded(f"the answer takes {needed:.1f} s, and its deadline is in {left:.1f} s")

    def release(self, request: AcceptedRequest) -> None:
        """Forget a started request; idempotent."""
        if request in self._started:
            self._started.remove(request)
            self._further_sequences -= request.size.num_outputs - 1
            self._expected_tokens -= request.expected_tokens

    def learn(self, size: RequestSize, tokens: int, cached_tokens: int) -> None:
        """Learn from a complete answer."""
        self.lengths.add(size, tokens)
        share = 1 - min(1.0, cached_tokens / max(1, size.prompt_tokens))
        self._uncached_share += (share - self._uncached_share) / 64

    @property
    def _sequences(self) -> int:
        return self._slots.active + self._further_sequences + self._state.capacity.other_sequences

    def _may_start(self) -> bool:
        state = self._refreshed()
        sequences = self._sequences
        if not state.capacity.decode_workers or not sequences:
            return True
        return sequences + 1 <= min(state.sequence_limit, state.capacity.batch_limit)

    def _refreshed(self) -> _State:
        now = self._now()
        if now - self._state.at >= REFRESH_SECONDS:
            self._state = _State(now, self._measure())
            for request in self._started:
                self._limit_sequences(request)
        return self._state

    def _limit_sequences(self, request: AcceptedRequest) -> None:
        """Keep the running sequences so few that ``request`` ends in time, unless it is too late for that."""
        state, size = self._state, request.size
        left = request.due - self._now()
        if left == math.inf:
            return
        remaining = max(1.0, self.lengths.high(size) * (1 - request.num_tokens() / max(1, size.max_tokens)))
        allowed = RUNNING_SHARE * left / remaining
        if allowed > state.capacity.seconds_per_token(state.capacity.decode_workers):
            state.sequence_limit = min(state.sequence_limit, state.capacity.sequences_within(allowed))


class StartedRequest:
    """A started request; ``release`` is idempotent."""

    def __init__(self, admission: ModelAdmission, request: AcceptedRequest, slot: AdmissionSlot) -> None:
        self._admission = admission
        self._request = request
        self._slot = slot

    def release(self) -> None:
        self._admission.release(self._request)
        self._slot.release()


def _retry_after(late_s: float) -> float:
    return min(max(RETRY_AFTER_SECONDS, late_s), MAX_RETRY_SECONDS)


def _order(request: AcceptedRequest) -> float:
    return request.order
