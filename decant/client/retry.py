"""Decision whether an error leads to another try; nothing here waits.

    error                                                   another try
    lost connection: a status without ErrorInfo             yes
    another server: UNIMPLEMENTED without ErrorInfo         yes
    UNAVAILABLE, QUEUE_FULL, QUOTA_EXCEEDED                 yes, after the server's RetryInfo
    ABORTED (DRAINING, OWNER_CHANGED, SLOW_READER)          yes
    any other                                               no

Every request may be repeated: the service runs an id once.

    cause                                          backs off
    a lost connection, DRAINING                    the router, for all calls
    QUOTA_EXCEEDED                                 all routers, for this call
    any other                                      the router, for this call

    limit of tries
    before the first message   each router once, and `MORE_TRIES`; after QUOTA_EXCEEDED only these
    a stream that has begun,   `resume_seconds` after it broke, again after a new message or after a router has accepted
    or a loss that may pass    the request; before the first message at least the tries above
    a deadline                 no wait for a try that would begin after it

A loss that may pass is a lost connection, or a router that leaves. A refusal does not: the router is well, and repeated
calls would only load it.
"""

from __future__ import annotations

import math

import grpc

from decant.client.balancer import JITTER, RouterSelector, Selection
from decant.runtime.error_details import Reason
from decant.runtime.errors import InvalidArgument, ServiceError

MORE_TRIES = 2
LONGEST_PAUSE_S = 30.0
"""Longest pause before the first message; an error with a longer retry delay is raised."""

_MAX_CALL_S = 1e9
"""Longest time of a call: gRPC takes a deadline beyond its 64 bits of nanoseconds for one that has passed."""

_LOST_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.UNIMPLEMENTED,  # another server may have a lost router's address by now
    }
)
_ROUTER_REASONS = frozenset({Reason.UNSPECIFIED, Reason.DRAINING})
_MOVED_REASONS = frozenset({Reason.DRAINING, Reason.OWNER_CHANGED, Reason.SLOW_READER})
"""The request runs at another router, or is complete in the store."""
_PASSING_REASONS = _ROUTER_REASONS | _MOVED_REASONS


def is_retryable(error: ServiceError) -> bool:
    if error.reason is Reason.UNSPECIFIED:
        return error.code in _LOST_CODES
    return error.retryable or error.reason in _MOVED_REASONS


def may_pass(error: ServiceError) -> bool:
    """Whether a retryable error is a loss that may pass, not the refusal of a router or of another server."""
    return error.reason in _PASSING_REASONS and error.code is not grpc.StatusCode.UNIMPLEMENTED


class RetryState:
    """Retry state of a call, or of a stream with its resumptions."""

    def __init__(self, selector: RouterSelector, seconds: float | None = None, resume_seconds: float = 0.0) -> None:
        """Begin with a try that ignores backoffs. Raises InvalidArgument unless timeout `seconds` is finite or None."""
        if seconds is not None and not (isinstance(seconds, int | float) and math.isfinite(seconds)):
            limit = "a finite number of seconds, or None for no deadline"
            raise InvalidArgument("timeout", limit, repr(seconds))
        self.seconds = seconds
        self.metadata: tuple[tuple[str, str], ...] = ()
        """Metadata of each call, beside the credentials."""
        self._selector = selector
        self._clock = selector.clock
        self._deadline: float | None = None
        self._resume_seconds = resume_seconds
        self._backoffs = selector.backoffs_of_call()
        self._untried = set(range(selector.count))
        self._left = {False: MORE_TRIES, True: MORE_TRIES}
        """More tries after refusals, and after losses that may pass."""
        self._has_begun = False
        self._broke_at: float | None = None
        self._router = selector.select().router
        self._is_healthy = False
        self.start_deadline()

    def start_deadline(self) -> None:
        """Count the timeout from now; the constructor does so too."""
        self._deadline = None if self.seconds is None else self._clock() + self.seconds

    @property
    def router(self) -> int:
        return self._router

    def remaining(self) -> float | None:
        return None if self._deadline is None else min(max(0.0, self._deadline - self._clock()), _MAX_CALL_S)

    def mark_progress(self) -> None:
        """Reset backoffs and the time to resume; call it for each response or new message of a stream."""
        if not self._is_healthy:
            self._is_healthy = self._has_begun = True
            self._broke_at = None
            self._backoffs = self._selector.backoffs_of_call()
            self._selector.record_success(self._router)

    def mark_accepted(self) -> None:
        """Reset the time to resume: a router had accepted the request when its call broke."""
        self._broke_at = None

    def pause_after(self, error: ServiceError, *, is_lasting: bool = False) -> float:
        """Select the next `router`; return the seconds until its call. Raises `error` if it is final; a lasting one
        needs the caller's correction, and gets only the tries of a refusal.
        """
        if not is_retryable(error):
            raise error
        self._is_healthy = False
        self._back_off(error)
        selection = self._selector.select(self._backoffs)
        if self._is_late(selection, may_pass=may_pass(error) and not is_lasting):
            raise error
        self._router = selection.router
        return selection.pause

    def _back_off(self, error: ServiceError) -> None:
        at_least = self._selector.add_jitter(error.retry_after or 0.0)
        self._untried.discard(self._router)
        if error.reason in _ROUTER_REASONS:
            self._selector.record_failure(self._router, at_least)
            return
        self._selector.record_success(self._router)
        shared = error.reason is Reason.QUOTA_EXCEEDED
        for router in range(self._selector.count) if shared else [self._router]:
            self._backoffs.record_failure(router, at_least)
        if shared:
            self._untried.clear()

    def _is_late(self, selection: Selection, *, may_pass: bool) -> bool:
        now, pause = self._clock(), selection.pause
        if self._deadline is not None and now + pause >= self._deadline:
            return True
        self._broke_at = now if self._broke_at is None else self._broke_at
        has_time = now + pause < self._broke_at + self._resume_seconds
        if self._has_begun:
            return not has_time
        self._left[may_pass] -= selection.router not in self._untried
        if may_pass and has_time:
            return False
        return self._left[may_pass] < 0 or pause > LONGEST_PAUSE_S * (1 + JITTER)
