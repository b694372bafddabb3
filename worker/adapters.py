"""Adapters that a worker serves: which names it announces to routers, and the digests that requests may have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from decant.engine.plan import Adapters, PreparedAdapter
from decant.protos import worker_pb2 as wire
from decant.runtime.settings import SettingError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def load(adapters: Adapters, entries: Iterable[str]) -> tuple[wire.Adapter, ...]:
    """Load adapters given as NAME=FOLDER, before the engine starts. Raises SettingError, AdapterRefused."""
    served = []
    for name, folder in parse(entries):
        prepared = adapters.load(name, folder)
        adapters.add(prepared)
        served.append(announcement(name, prepared))
    return tuple(served)


def announcement(name: str, prepared: PreparedAdapter) -> wire.Adapter:
    return wire.Adapter(name=name, digest=prepared.digest, rank=prepared.rank, memory_bytes=prepared.nbytes)


def parse(entries: Iterable[str]) -> Sequence[tuple[str, Path]]:
    """Split entries NAME=FOLDER, each name once. Raises SettingError."""
    return list(_parsed(entries))


def _parsed(entries: Iterable[str]) -> Iterator[tuple[str, Path]]:
    seen = set[str]()
    for entry in entries:
        name, _, folder = entry.partition("=")
        if not folder or NAME.fullmatch(name) is None:
            limit = "NAME=FOLDER, a name of up to 128 letters, digits, points, dashes and underscores"
            raise SettingError("adapters", limit, entry)
        if name in seen:
            raise SettingError("adapters", "each name once", name)
        seen.add(name)
        yield name, Path(folder)
