"""Events of the blocks of one model and tenant, in numbered batches, and its subscribers.

    batches        ... 40 41 42 43 44      kept within ``History``: a subscriber that has 40 gets 41 to 44
    snapshot             [42 43 44]        a new subscriber gets all published blocks, in as many parts as needed,
                                           which have the numbers up to the newest batch

The first number is random, so a number from another router, or from before a restart, is not taken for one of here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple, Self

from decant.router.kv_events.known_blocks import KnownBlock
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_ELSEWHERE_SECONDS, Aborted, OutOfRange, QuotaExceeded, Unavailable

MAX_SUBSCRIBERS = 16
"""Subscribers of one model and tenant at a time."""
RETRY_SUBSCRIBE_SECONDS = 30.0
BATCH_BYTES = 256 * 1024
"""Of one batch, as ``_num_bytes`` counts them."""
CHANGE_BYTES = 200
"""Memory of a change besides a block's tokens."""
_NUMBER_BITS = 62


class RemovedBlock(NamedTuple):
    hash: int


Change = KnownBlock | RemovedBlock
"""A block that is published now, or no longer."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    index: int
    count: int
    blocks: int
    """Blocks in all parts."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Changes in their order. A part of a snapshot has all blocks, parents before children, instead."""

    sequence: int
    time: float
    changes: Sequence[Change]
    snapshot: SnapshotPart | None = None


def _num_bytes(change: Change) -> int:
    return CHANGE_BYTES + (len(change.tokens) if isinstance(change, KnownBlock) else 0)


def _divide(changes: Sequence[Change]) -> Iterator[Sequence[Change]]:
    """Divide changes into those of batches; one batch without any."""
    ends, size = [0], 0
    for place, change in enumerate(changes):
        size += _num_bytes(change)
        if place and size > BATCH_BYTES:
            ends.append(place)
            size = _num_bytes(change)
    ends.append(len(changes))
    return (changes[start:end] for start, end in pairwise(ends))


class History:
    """The newest batches of all feeds, within a limit of bytes; the oldest leave first."""

    def __init__(self, limit_bytes: int) -> None:
        self.num_bytes = 0
        self._limit_bytes = limit_bytes
        self._order: deque[tuple[EventFeed, int]] = deque()

    def append(self, feed: EventFeed, batch: EventBatch) -> None:
        size = sum(map(_num_bytes, batch.changes))
        feed.batches.append(batch)
        self._order.append((feed, size))
        self.num_bytes += size
        while self.num_bytes > self._limit_bytes:
            oldest, size = self._order.popleft()
            oldest.batches.popleft()
            self.num_bytes -= size


class EventFeed:
    """Published blocks of one model and tenant. It keeps batches from its first subscriber on."""

    def __init__(self, history: History, now: Callable[[], float] = time.time) -> None:
        self.sequence = (1 << _NUMBER_BITS) + secrets.randbits(_NUMBER_BITS)
        """Number of the newest batch."""
        self.batches: deque[EventBatch] = deque()
        """The newest ones, without a gap; ``History`` removes the oldest."""
        self.published: dict[int, KnownBlock] = {}
        """By hash, parents before children."""
        self.subscriptions: set[Subscription] = set()
        self.is_closed = False
        self._changes: list[Change] = []
        self._history = history
        self._is_followed = False
        self._now = now

    def publish(self, block: KnownBlock) -> None:
        self.published[block.hash] = block
        self._changes.append(block)

    def remove(self, block: KnownBlock) -> None:
        del self.published[block.hash]
        self._changes.append(RemovedBlock(block.hash))

    def flush(self) -> None:
        """End a batch, if anything has changed, and wake the subscribers."""
        changes, self._changes = self._changes, []
        if not changes:
            return
        if not self._is_followed:
            self.sequence += 1
            return
        now = self._now()
        for some in _divide(changes):
            self.sequence += 1
            self._history.append(self, EventBatch(self.sequence, now, some))
        for subscription in self.subscriptions:
            subscription.wake()

    def close(self) -> None:
        self.is_closed = True
        for subscription in self.subscriptions:
            subscription.wake()

    def subscribe(self, tenant: str, after: int) -> Subscription:
        """Return a subscription to what comes after batch ``after``; 0: to all published blocks, and what comes then.

        Raises QuotaExceeded, OutOfRange for a number that is not among those kept, and Unavailable in a drain.
        """
        self.check_open()
        if len(self.subscriptions) >= MAX_SUBSCRIBERS:
            count = len(self.subscriptions) + 1
            raise QuotaExceeded(
                tenant, "kv_event_subscribers", MAX_SUBSCRIBERS, count, retry_after=RETRY_SUBSCRIBE_SECONDS
            )
        if after and not self.oldest_resumable <= after <= self.sequence:
            raise OutOfRange.of_kv_events(after, self.oldest_resumable, self.sequence)
        self._is_followed = True
        return Subscription(self, after)

    @property
    def oldest_resumable(self) -> int:
        """Number of the oldest batch after which all batches are kept."""
        return self.sequence - len(self.batches)

    def snapshot(self) -> Iterator[EventBatch]:
        """Parts of a snapshot of the published blocks as they are now."""
        blocks = list(self.published.values())
        parts = list(_divide(blocks))
        first, now = self.sequence - len(parts) + 1, self._now()
        return (
            EventBatch(first + index, now, part, SnapshotPart(index, len(parts), len(blocks)))
            for index, part in enumerate(parts)
        )

    def check_open(self) -> None:
        if self.is_closed:
            raise Unavailable(Reason.DRAINING, "this router drains", retry_after=RETRY_ELSEWHERE_SECONDS)


class Subscription:
    """The place of one subscriber, within a ``with`` block. It keeps no batches, and the blocks of its snapshot only
    until they are sent.
    """

    def __init__(self, feed: EventFeed, after: int) -> None:
        self._feed = feed
        self._sequence = after or feed.sequence  # of the newest batch that it has, or has with its snapshot
        self._snapshot = iter(()) if after else feed.snapshot()
        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()

    async def next(self) -> EventBatch:
        """Return the next part of the snapshot, or the next batch once there is one.

        Raises Aborted(SLOW_READER) if that is no longer kept, and Unavailable in a drain.
        """
        feed = self._feed
        while True:
            self._changed.clear()
            feed.check_open()
            missing = feed.sequence - self._sequence
            if missing > len(feed.batches):
                raise Aborted(
                    Reason.SLOW_READER,
                    f"the subscriber is {missing} batches behind, and the router keeps {len(feed.batches)}:"
                    " subscribe again with start_sequence_number 0",
                )
            if (part := next(self._snapshot, None)) is not None:
                return part
            if missing:
                self._sequence += 1
                return feed.batches[-missing]
            await self._changed.wait()

    def __enter__(self) -> Self:
        self._feed.subscriptions.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.subscriptions.discard(self)
