"""Which blocks the prefix cache holds, as each router's session is told of it.

    engine thread --look: note--> what changed --hear--> cached --┬--> untold of session a --take--> its next beat
                                                                  '--> untold of session b --take--> its next beat

What is untold is the difference between what a session was told and what is cached. So it is never more than two
pools' worth, however rarely anyone asks; and a block that came and went between two beats is not told at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from itertools import islice

from decant.engine.block_hashes import REPORTED_BYTES, BlockHash
from decant.engine.blocks import apply_changes
from decant.protos import worker_pb2 as wire

AT_ONCE = 4096
"""Most blocks that one beat names."""


class PrefixCacheFeed:
    """All but ``note`` is for the event loop."""

    def __init__(self) -> None:
        self._cached: dict[BlockHash, None] = {}  # in the order in which they came: a prefix before what follows it
        self._unsent: dict[Hashable, dict[BlockHash, None]] = {}
        self._noted = deque[list[BlockHash]]()

    def note(self, changed: list[BlockHash]) -> None:
        """Keep what the pool tells until ``hear``. From any thread."""
        self._noted.append(changed)

    def collect(self) -> None:
        """What was noted is news from now on."""
        while self._noted:
            changed = self._noted.popleft()
            apply_changes(self._cached, changed)
            for unsent in self._unsent.values():
                apply_changes(unsent, changed)

    def begin(self, session: Hashable) -> None:
        """A session is to be told everything, until ``end``."""
        self._unsent[session] = dict(self._cached)

    def end(self, session: Hashable) -> None:
        """It is told no more. May be said twice."""
        self._unsent.pop(session, None)

    def take(self, session: Hashable) -> wire.PrefixCacheUpdate | None:
        """What is told to it now, as much as fits a beat; None: nothing is new."""
        unsent = self._unsent.get(session)
        if not unsent:
            return None
        told = list(islice(unsent, AT_ONCE))
        apply_changes(unsent, told)
        published = b"".join(digest[:REPORTED_BYTES] for digest in told if digest in self._cached)
        dropped = b"".join(digest[:REPORTED_BYTES] for digest in told if digest not in self._cached)
        return wire.PrefixCacheUpdate(published=published, dropped=dropped)
