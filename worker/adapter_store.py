"""Adapters that a worker offers, and those of them that are in memory.

offered   name -> folder, digest     routers know them           offer, withdraw
loaded    digest -> bytes            the device has them         a use loads one; the least recently used ones leave

One that has left memory is still offered: the next use reads its folder again. Uses that need a load go one after the
other. If all memory is used, the next one waits until the uses of those that are to leave have ended; new uses of these
queue behind it, so that none waits for ever.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from decant.engine.engine import Engine
from decant.engine.errors import AdapterRefused, InvalidRequest
from decant.engine.loop import EngineLoop
from decant.engine.plan import Adapters, PreparedAdapter
from decant.protos import worker_pb2 as wire
from decant.runtime.event_source import EventSource
from decant.runtime.telemetry import logs
from decant.worker.adapters import announcement

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class _Offer:
    folder: Path
    adapter: wire.Adapter
    is_watched: bool


class AdapterUse:
    """A run's use of an adapter, which stays in memory from ``begin`` until the block of ``with`` ends."""

    def __init__(self, store: AdapterStore, digest: str) -> None:
        self._store = store
        self._digest = digest
        self._has_begun = False

    async def begin(self) -> None:
        """Wait until the adapter is in memory. Raises InvalidRequest if this worker does not have it."""
        if self._digest:
            await self._store.take(self._digest)
            self._has_begun = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_begun:
            self._has_begun = False
            self._store.give_back(self._digest)


class AdapterStore:
    """Owner of a worker's adapters: of what it announces, and of the device's.

    ``max_bytes`` bounds the matrices in the device's memory. One adapter more is in the host's from when its folder is
    read until it fits.
    """

    def __init__(self, loop: EngineLoop, device: Adapters, max_bytes: int | None = None) -> None:
        self.changes = EventSource[None]()
        """Published when other adapters are offered or in memory."""
        self.loads = self.evictions = 0
        self._loop = loop
        self._device = device
        self._max_bytes = max_bytes
        self._offers: dict[str, _Offer] = {}
        self._loaded: dict[str, int] = {}  # least recently used first
        self._leaving: dict[str, int] = {}  # when their uses have ended
        self._uses = Counter[str]()
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    def __contains__(self, digest: object) -> bool:
        """Whether runs may have the adapter: it is offered, or was withdrawn and has uses."""
        return digest in self._loaded or digest in self._leaving or self._is_offered(digest)

    @property
    def announcements(self) -> list[wire.Adapter]:
        return [_announced(offer, self._loaded) for offer in self._offers.values()]

    @property
    def num_loaded(self) -> int:
        return len(self._loaded) + len(self._leaving)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices in memory."""
        return sum(self._loaded.values()) + sum(self._leaving.values())

    # -- what is offered ------------------------------------------------------------------------------------------

    async def offer(self, name: str, folder: Path, *, is_watched: bool = False) -> wire.Adapter:
        """Read a folder, and offer its adapter in place of what the name stood for. Raises AdapterRefused.

        ``is_watched``: the watched directory has the name, which only this may change.
        """
        self._check_owner(name, is_watched=is_watched)
        async with self._turn:
            prepared = await asyncio.to_thread(self._read, name, folder)
            self._check_owner(name, is_watched=is_watched)  # the name may have been taken meanwhile
            offer = _Offer(folder, announcement(name, prepared), is_watched)
            if prepared.digest not in self._loaded and self._has_room(prepared.nbytes):
                await self._add(prepared)
            replaced, self._offers[name] = self._offers.get(name), offer
        if replaced is not None:
            self._retire(replaced.adapter.digest)
        self.changes.publish(None)
        _log.info("adapter loaded", name=name, digest=offer.adapter.digest, rank=offer.adapter.rank)
        return _announced(offer, self._loaded)

    def withdraw(self, name: str, *, is_watched: bool = False) -> wire.Adapter | None:
        """Offer an adapter no more; runs that have it keep it. None if there is none of this name.

        Raises AdapterRefused.
        """
        if name not in self._offers:
            return None
        self._check_owner(name, is_watched=is_watched)
        adapter = self._offers.pop(name).adapter
        self._retire(adapter.digest)
        self.changes.publish(None)
        _log.info("adapter dropped", name=name, digest=adapter.digest)
        return adapter

    def _check_owner(self, name: str, *, is_watched: bool) -> None:
        if (offer := self._offers.get(name)) is not None and offer.is_watched != is_watched:
            owner = "--adapter-directory" if offer.is_watched else "--adapters or an administrator"
            raise AdapterRefused(name, f"{owner} has the name")

    def _is_offered(self, digest: object) -> bool:
        return any(offer.adapter.digest == digest for offer in self._offers.values())

    def _read(self, name: str, folder: Path) -> PreparedAdapter:
        prepared = self._device.load(name, folder)
        if self._max_bytes is not None and prepared.nbytes > self._max_bytes:
            reason = f"its matrices have {prepared.nbytes} bytes, and --adapter-memory is {self._max_bytes}"
            raise AdapterRefused(name, reason)
        return prepared

    # -- what is in memory ----------------------------------------------------------------------------------------

    def use(self, digest: str) -> AdapterUse:
        """Use of an adapter, none if the digest is empty."""
        return AdapterUse(self, digest)

    async def take(self, digest: str) -> None:
        """Count a use, once the adapter is in memory; for ``AdapterUse``."""
        if digest not in self._loaded:
            async with self._turn:
                if digest not in self._loaded:
                    await self._load(digest)
        self._touch(digest)
        self._uses[digest] += 1

    def give_back(self, digest: str) -> None:
        """End a use; for ``AdapterUse``."""
        self._uses[digest] -= 1
        if self._uses[digest]:
            return
        del self._uses[digest]
        if digest in self._leaving or not self._is_offered(digest):
            self._remove(digest)
        else:
            self._touch(digest)
            self._freed.set()

    async def _load(self, digest: str) -> None:
        if digest in self._leaving:  # it was to leave for a use that did not wait for it
            self._loaded[digest] = self._leaving.pop(digest)
            return
        found = next(((name, offer) for name, offer in self._offers.items() if offer.adapter.digest == digest), None)
        if found is None:
            raise InvalidRequest("adapter", "one that this worker has", digest)
        name, offer = found
        try:
            prepared = await asyncio.to_thread(self._read, name, offer.folder)
            if prepared.digest != digest:
                raise InvalidRequest("adapter", "one whose folder still has it", digest)
            await self._make_room(prepared.nbytes)  # only now: a folder that is broken makes no other adapter leave
            await self._add(prepared)
        except AdapterRefused as refused:
            _log.warning("adapter can't be read again", name=name, reason=refused.reason)
            limit = "one whose folder can still be read, with memory left for it"
            raise InvalidRequest("adapter", limit, digest) from None
        self.changes.publish(None)

    async def _add(self, prepared: PreparedAdapter) -> None:
        digest = prepared.digest

        def undo(engine: Engine, _: None) -> None:
            engine.remove_adapter(digest)

        await self._loop.call(lambda engine: engine.add_adapter(prepared), undo)
        self._leaving.pop(digest, None)
        self._loaded[digest] = prepared.nbytes
        self.loads += 1

    def _touch(self, digest: str) -> None:
        self._loaded[digest] = self._loaded.pop(digest)

    def _retire(self, digest: str) -> None:
        """Free an adapter that is offered no more, once its uses have ended."""
        if not self._is_offered(digest) and not self._uses[digest]:
            self._remove(digest)

    def _remove(self, digest: str) -> None:
        self._loaded.pop(digest, None)
        self._leaving.pop(digest, None)
        self._loop.post(lambda engine: engine.remove_adapter(digest))
        self._freed.set()

    def _excess(self, nbytes: int) -> int:
        """Bytes that are too many with ``nbytes`` more, if those that leave have left."""
        return 0 if self._max_bytes is None else sum(self._loaded.values()) + nbytes - self._max_bytes

    def _has_room(self, nbytes: int) -> bool:
        """Make room for ``nbytes`` at once, by those without uses; False if that does not suffice."""
        while self._max_bytes is not None and self.nbytes + nbytes > self._max_bytes:
            if (unused := next((each for each in self._loaded if not self._uses[each]), None)) is None:
                return False
            self._evict(unused)
        return True

    async def _make_room(self, nbytes: int) -> None:
        """Make room for ``nbytes``, by those without uses first."""
        while not self._has_room(nbytes):
            while self._excess(nbytes) > 0:
                self._evict(next(iter(self._loaded)))
            self._freed.clear()
            await self._freed.wait()

    def _evict(self, digest: str) -> None:
        self.evictions += 1
        if self._uses[digest]:
            self._leaving[digest] = self._loaded.pop(digest)
        else:
            self._remove(digest)


def _announced(offer: _Offer, loaded: dict[str, int]) -> wire.Adapter:
    adapter = wire.Adapter()
    adapter.CopyFrom(offer.adapter)
    adapter.in_memory = adapter.digest in loaded
    return adapter
