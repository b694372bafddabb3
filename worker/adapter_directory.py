"""Adapters in a directory, a folder each: loaded, replaced and dropped while the worker runs.

A folder is read once its files were the same in two looks, so that a copy in progress is not read; if one of its two
files alone was replaced, after a minute: the other may be on its way. One that is refused is logged, and looked at
again when its files change: what its name stood for before stays until then. A directory that can't be read changes
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from decant.engine.errors import AdapterRefused, EngineStopped
from decant.runtime.telemetry import logs
from decant.worker.adapter_store import AdapterStore
from decant.worker.adapters import NAME

FILES = ("adapter_config.json", "adapter_model.safetensors")
LOOK_SECONDS = 5.0
LOOKS, LOOKS_AT_ONE_FILE = 2, 12
"""Looks in which files were the same before they are read."""

Stamp = tuple[tuple[int, int, int], ...]

_log = logs.get(__name__)


@dataclass(slots=True)
class _Known:
    stamp: Stamp
    is_offered: bool
    """Whether its adapter, of this stamp or one before, was accepted."""


class AdapterDirectory:
    """Keeps the store's adapters as the directory has them.

    Names that ``--adapters`` or an administrator has are not the directory's: folders of these names are refused.
    """

    def __init__(self, folder: Path, store: AdapterStore) -> None:
        self._folder = folder
        self._store = store
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
            if self._known.pop(name).is_offered:
                self._store.withdraw(name, is_watched=True)
        for name, stamp in seen.items():
            known = self._known.get(name)
            if (known is None or known.stamp != stamp) and self._equal_looks[name] >= _looks_needed(known, stamp):
                await self._load(name, stamp, is_offered=known is not None and known.is_offered)

    async def _load(self, name: str, stamp: Stamp, *, is_offered: bool) -> None:
        self._known[name] = _Known(stamp, is_offered)
        try:
            await self._store.offer(name, self._folder / name, is_watched=True)
        except EngineStopped:
            raise
        except AdapterRefused as refused:
            _log.warning("adapter refused", name=name, reason=refused.reason)
        except Exception as error:  # noqa: BLE001 - a folder of an outsider, or too little memory: the worker goes on
            _log.error("adapter refused", name=name, reason=f"{type(error).__name__}: {error}")
        else:
            self._known[name].is_offered = True


def _looks_needed(known: _Known | None, stamp: Stamp) -> int:
    if known is None or not known.is_offered:
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
