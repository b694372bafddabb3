"""Everything that the state store raises on purpose.

StateError
├── StoreUnavailable    Redis is unavailable, or silent for longer than the deadline; ask again later
├── StoreFault          Redis answered with an error that waiting does not cure
│   └── UnreadableRequest   what it holds of one request can't be read
├── Superseded          another router owns the request; the caller forgets it
├── IncarnationReplaced another incarnation is registered under the caller's id
├── AlreadyExists       the request id is taken by another payload
├── UnknownRequest      unknown, expired, or another tenant's
├── StoreRefilling      unknown in a Redis that was emptied a moment ago; ask again later
├── OwnerAlive          the request's owner is registered; nothing was taken from it
├── QuotaExceeded       a tenant has as much as it may have: quota, limit, value
└── PrivateRedisFailed  a Redis of one's own did not start
"""

from __future__ import annotations

from decant.state.ids import Incarnation, RequestKey, State


class StateError(Exception):
    """Base of all errors that state/ raises on purpose."""


class StoreUnavailable(StateError):
    """Redis is away, or did not answer within the deadline. What was asked may or may not have happened.

    Every write of this package can be repeated, so the caller does.
    """


class StoreFault(StateError):
    """Redis answered with an error: a wrong password, keys of another program, a Redis too old."""


class UnreadableRequest(StoreFault):
    """What Redis holds of a request is nothing that an owner writes. Other requests are not concerned."""

    def __init__(self, key: RequestKey, why: str) -> None:
        super().__init__(f"request {key} can't be read: {why}")
        self.key = key


class Superseded(StateError):
    """A write by a router that no longer owns the request, or for an attempt that is over. Nothing was written.

    `stream_epoch`: the last epoch that began with a client's stream on another router; 0: none did.
    """

    def __init__(self, key: RequestKey, epoch: int, owner: Incarnation, state: State, stream_epoch: int = 0) -> None:
        super().__init__(f"request {key}: epoch {epoch} is owned by {owner}")
        self.key = key
        self.epoch = epoch
        self.owner = owner
        self.state = state
        self.stream_epoch = stream_epoch


class IncarnationReplaced(StateError):
    """Another incarnation has registered under this id since; this one is over."""

    def __init__(self, incarnation: Incarnation) -> None:
        super().__init__(f"{incarnation}: another incarnation is registered under this id")
        self.incarnation = incarnation


class AlreadyExists(StateError):
    """The id of a request is taken by one with another payload."""

    def __init__(self, key: RequestKey) -> None:
        super().__init__(f"request {key} exists with another payload")
        self.key = key


class UnknownRequest(StateError):
    """Nothing of that tenant has this id, or not any more."""

    def __init__(self, key: RequestKey) -> None:
        super().__init__(f"request {key} is unknown")
        self.key = key


class StoreRefilling(StateError):
    """Redis was emptied, and the request's owner may not have written it again yet."""

    def __init__(self, key: RequestKey, retry_after_s: float) -> None:
        super().__init__(f"request {key} is not known yet: the store was emptied, ask again in {retry_after_s:.1f} s")
        self.key = key
        self.retry_after_s = retry_after_s


class OwnerAlive(StateError):
    """A takeover was refused: the other router is registered."""

    def __init__(self, owner: Incarnation) -> None:
        super().__init__(f"{owner} is alive and keeps its requests")
        self.owner = owner


class QuotaExceeded(StateError):
    """A tenant's quota has no room for this request. Nothing was booked."""

    def __init__(self, quota: str, limit: int, value: int, retry_after_s: float) -> None:
        super().__init__(f"{quota}: the limit is {limit}, this would make {value}")
        self.quota = quota
        self.limit = limit
        self.value = value
        self.retry_after_s = retry_after_s


class PrivateRedisFailed(StateError):
    """No redis-server was found, or it ended or stayed silent while it was started."""
