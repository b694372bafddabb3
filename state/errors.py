"""Errors of the state store.

StateError
├── StoreUnavailable    Redis is unreachable, or exceeds the deadline; the command may have run; retry later
├── StoreFault          a permanent error of Redis: wrong password, keys of another program, or an old version
│   └── UnreadableRequest   the stored data of one request is invalid
├── Superseded          another router owns the request
├── IncarnationReplaced another incarnation is registered under the caller's id
├── AlreadyExists       the request id has another payload
├── UnknownRequest      unknown, expired, or another tenant's
├── StoreRefilling      unknown, and Redis was emptied; retry later
├── OwnerRegistered     the request's owner is registered
├── QuotaExceeded       a tenant has reached a limit
└── PrivateRedisFailed  a private Redis did not start
"""

from __future__ import annotations

from decant.state.ids import Incarnation, RequestKey, State


class StateError(Exception):
    pass


class StoreUnavailable(StateError):
    pass


class StoreFault(StateError):
    pass


class UnreadableRequest(StoreFault):
    def __init__(self, key: RequestKey, why: str) -> None:
        super().__init__(f"request {key} can't be read: {why}")
        self.key = key


class Superseded(StateError):
    """Another router owns the request; nothing was written. `stream_epoch` is as in `StoredRequest`."""

    def __init__(self, key: RequestKey, epoch: int, owner: Incarnation, state: State, stream_epoch: int = 0) -> None:
        super().__init__(f"request {key}: epoch {epoch} is owned by {owner}")
        self.key = key
        self.epoch = epoch
        self.owner = owner
        self.state = state
        self.stream_epoch = stream_epoch


class IncarnationReplaced(StateError):
    def __init__(self, incarnation: Incarnation) -> None:
        super().__init__(f"{incarnation}: another incarnation is registered under this id")
        self.incarnation = incarnation


class AlreadyExists(StateError):
    def __init__(self, key: RequestKey) -> None:
        super().__init__(f"request {key} exists with another payload")
        self.key = key


class UnknownRequest(StateError):
    def __init__(self, key: RequestKey) -> None:
        super().__init__(f"request {key} is unknown")
        self.key = key


class StoreRefilling(StateError):
    def __init__(self, key: RequestKey, retry_after_s: float) -> None:
        super().__init__(f"request {key} is not known yet: the store was emptied, retry in {retry_after_s:.1f} s")
        self.key = key
        self.retry_after_s = retry_after_s


class OwnerRegistered(StateError):
    def __init__(self, owner: Incarnation) -> None:
        super().__init__(f"{owner} is registered and keeps its requests")
        self.owner = owner


class QuotaExceeded(StateError):
    def __init__(self, quota: str, limit: int, value: int, retry_after_s: float) -> None:
        super().__init__(f"{quota}: the limit is {limit}, this would make {value}")
        self.quota = quota
        self.limit = limit
        self.value = value
        self.retry_after_s = retry_after_s


class PrivateRedisFailed(StateError):
    pass
