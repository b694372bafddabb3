"""What comes after an error: another try, or the error itself. No I/O, no waiting.

    error                                           another try
    a lost connection: a status without ErrorInfo   yes
    somebody else there: UNIMPLEMENTED without it   yes
    UNAVAILABLE, QUEUE_FULL, QUOTA_EXCEEDED         yes, not before the server's RetryInfo
    ABORTED (DRAINING, OWNER_CHANGED, SLOW_READER)  yes
    any other                                       no

All that the client asks for may be asked again: what generates carries an id, under which the service runs it once.

    cause                                          rests
    a lost connection, no ErrorInfo, DRAINING      the router, for all calls
    QUOTA_EXCEEDED                                 all routers, for this call: they share the quota
    any other: QUEUE_FULL, NO_WORKER ...           the router, for this call

    nothing has come yet      each router once, and ``MORE_TRIES``; after QUOTA_EXCEEDED these alone
    a stream has begun        for ``patience`` seconds after it broke, counted anew whenever something comes
    a deadline                holds for both: a try that would come too late is not waited for
"""

from __future__ import annotations

import math

import grpc

from decant.client.balancer import SPREAD, RouterSelector, Turn
from decant.runtime.error_details import Reason
from decant.runtime.errors import InvalidArgument, ServiceError

MORE_TRIES = 2
LONGEST_PAUSE_S = 30.0
"""Before anything has come. An error whose server asks for a longer pause is raised."""

_LOST = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.UNIMPLEMENTED,  # another's server: a dead router's address is free for anyone to take
    }
)


_OF_ROUTER = frozenset({Reason.UNSPECIFIED, Reason.DRAINING})
_MOVED = frozenset({Reason.DRAINING, Reason.OWNER_CHANGED, Reason.SLOW_READER})
"""The request goes on at another router, or is whole in the store."""


def may_try_again(error: ServiceError) -> bool:
    """Whether the same, asked elsewhere or later, may be answered."""
    if error.reason is Reason.UNSPECIFIED:
        return error.code in _LOST
    return error.retryable or error.reason in _MOVED


class RetryState:
    """The tries of one call, or of one stream and what it is resumed with."""

    def __init__(self, turns: RouterSelector, seconds: float | None = None, patience: float = 0.0) -> None:
        """`seconds` until the deadline, None without one; `patience` with a stream that has begun, 0 for none. The
        first try is not held up by what others met: it begins at once. Raises InvalidArgument for `seconds` that are no
        finite number."""
        if seconds is not None and not (isinstance(seconds, int | float) and math.isfinite(seconds)):
            limit = "a finite number of seconds, or None for no deadline"
            raise InvalidArgument("timeout", limit, repr(seconds))
        self.seconds = seconds
        self._turns = turns
        self._clock = turns.clock
        self._deadline = None if seconds is None else turns.clock() + seconds
        self._patience = patience
        self._rests = turns.rests_of_call()
        self._unasked = set(range(turns.count))
        self._left = MORE_TRIES
        self._has_begun = False
        self._broke_at: float | None = None
        self._router = turns.take().router
        self._is_well = False

    @property
    def router(self) -> int:
        """Whom to ask."""
        return self._router

    def remaining(self) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def heard(self) -> None:
        """The router answered: with all of it, or with something new of a stream."""
        if not self._is_well:
            self._is_well = self._has_begun = True
            self._broke_at = None
            self._rests = self._turns.rests_of_call()
            self._turns.answered(self._router)

    def after(self, error: ServiceError) -> float:
        """The seconds to wait before `router`, which may be another now, is asked. Raises `error` where it is final."""
        if not may_try_again(error):
            raise error
        self._is_well = False
        self._rest(error)
        turn = self._turns.take(self._rests)
        if self._is_late(turn):
            raise error
        self._router = turn.router
        return turn.pause

    def _rest(self, error: ServiceError) -> None:
        asked_for = self._turns.spread(error.retry_after or 0.0)
        self._unasked.discard(self._router)
        if error.reason in _OF_ROUTER:
            self._turns.failed(self._router, asked_for)
            return
        self._turns.answered(self._router)
        shared = error.reason is Reason.QUOTA_EXCEEDED
        for router in range(self._turns.count) if shared else [self._router]:
            self._rests.failed(router, asked_for)
        if shared:
            self._unasked.clear()

    def _is_late(self, turn: Turn) -> bool:
        now = self._clock()
        if self._deadline is not None and now + turn.pause >= self._deadline:
            return True
        if self._has_begun:
            self._broke_at = now if self._broke_at is None else self._broke_at
            return now + turn.pause >= self._broke_at + self._patience
        self._left -= turn.router not in self._unasked
        return self._left < 0 or turn.pause > LONGEST_PAUSE_S * (1 + SPREAD)
