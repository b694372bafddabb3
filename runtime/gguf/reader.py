"""The header of a GGUF file: metadata and the places of its tensors. Little-endian, no tensor is read.

    magic GGUF | version u32 | tensors u64 | entries u64 | entries | tensors | padding | data of the tensors
    entry      key | type u32 | value
    tensor     name | dimensions u32 | u64 each, the innermost first | type u32 | offset in the data u64

A text is its length as u64 and its bytes in UTF-8; an array is the type of its items, their number as u64, the items.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000
"""As safetensors' own limit."""
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_TEXT, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by type."""

BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Numbers and bytes of a block of the types that are served."""

_TYPES = (
    *("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K"),
    *(
        "Q6_K",
        "Q8_K",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ3_XXS",
        "IQ1_S",
        "IQ4_NL",
        "IQ3_S",
        "IQ2_S",
        "IQ4_XS",
        "I8",
        "I16",
        "I32",
    ),
    *("I64", "F64", "IQ1_M", "BF16", "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8"),
    *("IQ4_NL_8_8", "MXFP4", "NVFP4", "Q1_0"),
)
"""Names of types by number."""


class GgufUnreadable(ValueError):
    """A GGUF file that is malformed, or that is not served; the text is the reason."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in the file: ``shape`` with the innermost dimension last, its bytes from ``begin`` to ``end``."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]


def read_header(file: Path) -> GgufHeader:
    """Read and check a header. Raises GgufUnreadable, OSError."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        if not size:
            raise GgufUnreadable("it is empty")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Header(content, min(size, MAX_HEADER_BYTES)).read(size)


class _Header:
    def __init__(self, content: mmap.mmap, limit: int) -> None:
        self._content, self._limit, self._at = content, limit, 0
        self._what = "its header"

    def read(self, size: int) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise GgufUnreadable("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            big_endian = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            reason = "is big-endian" if big_endian in VERSIONS else f"has the version {version}"
            raise GgufUnreadable(f"it {reason}; little-endian files of the versions 2 and 3 are served")
        tensors, entries = self._number("Q"), self._number("Q")
        metadata = self._metadata(entries)
        infos = self._infos(tensors)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise GgufUnreadable(f"general.alignment: a power of two from 8, got {alignment!r}")
        start = self._at + -self._at % alignment
        places: dict[str, TensorPlace] = {}
        for name, (shape, kind, offset) in infos.items():
            if offset % alignment:
                raise GgufUnreadable(f"{name} begins at {offset}, which is no multiple of {alignment}")
            places[name] = _place(name, shape, kind, start + offset)
            if places[name].end > size:
                raise GgufUnreadable(f"it has {size} bytes, and {name} ends at {places[name].end}: it is incomplete")
        return GgufHeader(metadata, places)

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            self._what = "its metadata"
            key = self._text()
            self._what = f"the value of {key}"
            if key in metadata:
                raise GgufUnreadable(f"{key} is there twice")
            metadata[key] = self._value(self._number("I"))
        return metadata

    def _infos(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            self._what = "its list of tensors"
            name = self._text()
            if name in infos:
                raise GgufUnreadable(f"the tensor {name} is there twice")
            dimensions = self._number("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise GgufUnreadable(f"{name} has {dimensions} dimensions: 1 to {MAX_DIMENSIONS}")
            shape = tuple(reversed(self._numbers("Q", dimensions)))
            infos[name] = shape, self._number("I"), self._number("Q")
        return infos

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._number(self._format(kind))
        items, count = self._number("I"), self._number("Q")
        if items == _TEXT:
            return [self._text() for _ in range(count)]
        return list(self._numbers(self._format(items), count))

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise GgufUnreadable(f"{self._what} has the unknown type {kind}")
        return _NUMBERS[kind]

    def _text(self) -> str:
        content = self._bytes(self._number("Q"))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise GgufUnreadable(f"{self._what} is not UTF-8: {error}") from None

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        width = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{count}{code}", self._bytes(count * width))

    def _bytes(self, count: int) -> bytes:
        if count > self._limit - self._at:
            ends = "ends" if self._limit < MAX_HEADER_BYTES else f"has a header of more than {MAX_HEADER_BYTES} bytes"
            raise GgufUnreadable(f"it {ends} within {self._what}")
        content = self._content[self._at : self._at + count]
        self._at += count
        return content


def _place(name: str, shape: tuple[int, ...], kind: int, begin: int) -> TensorPlace:
    title = _TYPES[kind] if kind < len(_TYPES) else f"type {kind}"
    if title not in BLOCKS:
        raise GgufUnreadable(f"{title} weights are not served ({name}); {', '.join(BLOCKS)} are")
    numbers, nbytes = BLOCKS[title]
    if 0 in shape or shape[-1] % numbers:
        raise GgufUnreadable(f"{name} is {list(shape)}: rows of {title} are multiples of {numbers}")
    return TensorPlace(title, shape, begin, begin + math.prod(shape) // numbers * nbytes)
