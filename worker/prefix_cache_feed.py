"""Changes of the prefix cache, for the heartbeats of each router's session.

Unsent is the difference between what a session was sent and what is cached. A block that is published and evicted
between two heartbeats is not sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from itertools import islice

from decant.engine.block_hashes import REPORTED_BYTES, BlockHash
from decant.engine.prefix_index import apply_changes
from decant.protos import worker_pb2 as wire

BLOCKS_PER_HEARTBEAT = 4096


class PrefixCacheFeed:
    """Feed of all sessions; not thread-safe, except ``record``."""

    def __init__(self, blocks_per_heartbeat: int = BLOCKS_PER_HEARTBEAT) -> None:
        self._max_blocks = blocks_per_heartbeat
        self._cached: dict[BlockHash, None] = {}  # in order of publication: a prefix before its continuations
        self._unsent: dict[Hashable, dict[BlockHash, None]] = {}
        self._recorded = deque[list[BlockHash]]()

    def record(self, changed: list[BlockHash]) -> None:
        self._recorded.append(changed)

    def collect(self) -> None:
        while self._recorded:
            changed = self._recorded.popleft()
            apply_changes(self._cached, changed)
            for unsent in self._unsent.values():
                apply_changes(unsent, changed)

    def add_session(self, session: Hashable) -> None:
        self._unsent[session] = dict(self._cached)

    def remove_session(self, session: Hashable) -> None:
        self._unsent.pop(session, None)

    def next_update(self, session: Hashable) -> wire.PrefixCacheUpdate | None:
        """Take the changes for the next heartbeat; None if nothing has changed."""
        unsent = self._unsent.get(session)
        if not unsent:
            return None
        changed = list(islice(unsent, self._max_blocks))
        apply_changes(unsent, changed)
        published = b"".join(block_hash[:REPORTED_BYTES] for block_hash in changed if block_hash in self._cached)
        dropped = b"".join(block_hash[:REPORTED_BYTES] for block_hash in changed if block_hash not in self._cached)
        return wire.PrefixCacheUpdate(published=published, dropped=dropped)
