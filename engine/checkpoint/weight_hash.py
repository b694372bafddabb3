"""Digests of weight files over all their bytes, cached beside the files::

    model.safetensors
    .model.safetensors.xxh128     {"stamp": [size, mtime_ns, ctime_ns, inode], "digest": "..."}

If the folder can't be written, the cache is in the user's cache folder. A digest counts while the stamp is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from decant.engine.errors import ModelRefused

Stamp = tuple[int, int, int, int]

MIN_CACHED_AGE_NS = 2_000_000_000
"""Least age of a file whose digest is cached, so that a later write has another timestamp."""

MIN_CACHED_BYTES = 64 << 20
"""Bytes of the smallest file whose digest is cached."""

_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class Digests:
    """Identity of weights: a digest of each file, with its stamp from before it was read; or a hub name's commit."""

    values: tuple[str, ...]
    stamps: Mapping[Path, Stamp]

    def check_unchanged(self, name: str) -> None:
        for file, stamp in self.stamps.items():
            if _stamp(file) != stamp:
                raise ModelRefused(name, f"{file.name} changed while it was loaded")


def digest_files(
    files: Sequence[Path], *, min_cached_bytes: int = MIN_CACHED_BYTES, min_cached_age_ns: int = MIN_CACHED_AGE_NS
) -> Digests:
    stamps = {file: _stamp(file) for file in files}
    values = tuple(
        f"{file.name}:{_digest(file, stamp, min_cached_bytes, min_cached_age_ns)}" for file, stamp in stamps.items()
    )
    return Digests(values, stamps)


def _digest(file: Path, stamp: Stamp, min_cached_bytes: int, min_cached_age_ns: int) -> str:
    if stamp[0] < min_cached_bytes:
        return read_digest(file)
    for path in _cache_paths(file):
        if (cached := _load(path, stamp)) is not None:
            return cached
    digest = read_digest(file)
    if time.time_ns() - max(stamp[1:3]) > min_cached_age_ns:
        _write(file, stamp, digest)
    return digest


def read_digest(file: Path) -> str:
    import xxhash  # the GPU benchmark loads no files, and has to run without it

    digest, buffer = xxhash.xxh3_128(), bytearray(_CHUNK)
    view = memoryview(buffer)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _cache_paths(file: Path) -> Iterator[Path]:
    yield file.with_name(f".{file.name}.xxh128")
    with contextlib.suppress(RuntimeError):  # no home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = hashlib.blake2b(bytes(file.resolve()), digest_size=16).hexdigest()
        yield cache / "decant" / "weights" / f"{path}.xxh128"


def _load(path: Path, stamp: Stamp) -> str | None:
    try:
        content = json.loads(path.read_bytes())
        digest = content["digest"] if content["stamp"] == list(stamp) else None
    except (OSError, ValueError, LookupError, RecursionError, TypeError):
        return None
    return digest if isinstance(digest, str) else None


def _write(file: Path, stamp: Stamp, digest: str) -> None:
    """Write in place: a concurrent reader gets all of it, or no valid JSON."""
    content = json.dumps({"stamp": stamp, "digest": digest})
    for path in _cache_paths(file):
        with contextlib.suppress(OSError):
            if path.parent != file.parent:
                path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            return
