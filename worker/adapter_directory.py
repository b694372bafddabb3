"""Adapters in a directory, a folder each: loaded, replaced and dropped while the worker runs.

A folder is read once its files were the same in two looks, so that a copy in progress is not read; if one of its two
files alone was replaced, after a minute: the other may be on its way. One that is refused is logged, and looked at
again when its files change: what its name stood for before stays until then. A directory that can't be read changes
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from decant.engine.errors import AdapterRefused, EngineStopped
from decant.engine.plan import PreparedAdapter
from decant.protos import worker_pb2 as wire
from decant.runtime.telemetry import logs
from decant.worker.adapters import NAME, announcement
from decant.worker.engine_host import EngineHost

FILES = ("adapter_config.json", "adapter_model.safetensors")
LOOK_SECONDS = 5.0
LOOKS, LOOKS_AT_ONE_FILE = 2, 12
"""Looks in which files were the same before they are read."""

Stamp = tuple[tuple[int, int, int], ...]

_log = logs.get(__name__)


@dataclass(slots=True)
class _Known:
    stamp: Stamp
    adapter: wire.Adapter | None
    """None while it was never accepted."""


class AdapterDirectory:
    """Keeps the engine's adapters, and those that the worker announces, as the directory has them.

    Names of ``host.adapters`` at the start are not the directory's: folders of these names are refused.
    """

    def __init__(self, folder: Path, host: EngineHost, announce: Callable[[], None] = lambda: None) -> None:
        self.announce = announce
        """Called after each change."""
        self._folder = folder
        self._host = host
        self._reserved = frozenset(adapter.name for adapter in host.adapters)
        self._seen: Mapping[str, Stamp] = {}
        self._equal_looks: dict[str, int] = {}
        self._known: dict[str, _Known] = {}
        self._is_readable = True

    async def begin(self) -> None:
        """Load what is there at the start, before routers send requests."""
        for _ in range(LOOKS):
            await self.look()

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except EngineStopped:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Apply changes that have lasted for some looks."""
        try:
            seen = await asyncio.to_thread(stamps, self._folder)
        except OSError as error:
            if self._is_readable:
                _log.warning("the directory of adapters can't be read", reason=str(error))
            self._is_readable = False
            return
        self._is_readable = True
        before, self._seen = self._seen, seen
        looks = self._equal_looks
        self._equal_looks = {name: looks[name] + 1 if before.get(name) == seen[name] else 1 for name in seen}
        for name in self._known.keys() - seen.keys():
            await self._drop(self._known.pop(name), name)
        for name, stamp in seen.items():
            known = self._known.get(name)
            if (known is None or known.stamp != stamp) and self._equal_looks[name] >= _looks_needed(known, stamp):
                await self._load(name, stamp, None if known is None else known.adapter)

    async def _load(self, name: str, stamp: Stamp, replaced: wire.Adapter | None) -> None:
        self._known[name] = _Known(stamp, replaced)
        try:
            if name in self._reserved:
                raise AdapterRefused(name, "--adapters has the name")
            load = partial(self._host.adapter_digests.load, name, self._folder / name)
            prepared: PreparedAdapter = await asyncio.to_thread(load)
        except AdapterRefused as refused:
            _log.warning("adapter refused", name=name, reason=refused.reason)
            return
        except Exception as error:  # noqa: BLE001 - a folder of an outsider, or too little memory: the worker goes on
            _log.error("adapter refused", name=name, reason=f"{type(error).__name__}: {error}")
            return
        await self._host.loop.call(lambda engine: engine.add_adapter(prepared))
        adapter = self._known[name].adapter = announcement(name, prepared)
        self._host.adapters = (*(each for each in self._host.adapters if each.name != name), adapter)
        self.announce()
        _log.info("adapter loaded", name=name, digest=adapter.digest, rank=adapter.rank)
        if replaced is not None:
            self._retire(replaced)

    async def _drop(self, known: _Known, name: str) -> None:
        if known.adapter is None:
            return
        self._host.adapters = tuple(each for each in self._host.adapters if each.name != name)
        self.announce()
        _log.info("adapter dropped", name=name, digest=known.adapter.digest)
        self._retire(known.adapter)

    def _retire(self, adapter: wire.Adapter) -> None:
        """Have the engine drop an adapter once no sequence has it, unless another name stands for it."""
        digest = adapter.digest
        if all(each.digest != digest for each in self._host.adapters):
            self._host.loop.post(lambda engine: engine.remove_adapter(digest))


def _looks_needed(known: _Known | None, stamp: Stamp) -> int:
    if known is None or known.adapter is None:
        return LOOKS
    num_changed = sum(old != new for old, new in zip(known.stamp, stamp, strict=True))
    return LOOKS_AT_ONE_FILE if num_changed == 1 else LOOKS


def stamps(folder: Path) -> Mapping[str, Stamp]:
    """Return the folders in a directory that have an adapter's files, with size, time and inode of each.

    Raises OSError if the directory or a file can't be looked at.
    """
    found: dict[str, Stamp] = {}
    for each in sorted(folder.iterdir()):
        if NAME.fullmatch(each.name) is not None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found[each.name] = tuple(_stamp(each / file) for file in FILES)
    return found


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino
