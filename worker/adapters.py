"""Names of the adapters that a worker offers, and what it announces about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from decant.engine.plan import PreparedAdapter
from decant.protos import worker_pb2 as wire
from decant.runtime.settings import SettingError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NAME_LIMIT = "up to 128 letters, digits, points, dashes and underscores"


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
            raise SettingError("adapters", f"NAME=FOLDER, a name of {NAME_LIMIT}", entry)
        if name in seen:
            raise SettingError("adapters", "each name once", name)
        seen.add(name)
        yield name, Path(folder)
