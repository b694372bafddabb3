"""Addresses are of contiguous memory; linear.h, attention.h, layer.h, elementwise.h and sample.h say what it holds."""

from collections.abc import Sequence
from typing import Any

def flatten(
    rows: Sequence[Any], block_size: int, blank: int, /
) -> tuple[list[Any], bytearray, bytearray, bytearray, bytearray, int, int]: ...
def pack(half: bool, weight: int, packed: int, outputs: int, inner: int, /) -> int: ...
def pack_codes(
    half: bool,
    for_int8: bool,
    kind: int,
    codes: int,
    scales: int,
    zeros: int,
    mins: int,
    half_scales: bool,
    packed: int,
    outputs: int,
    inner: int,
    group: int,
    /,
) -> int: ...
def multiply(
    half: bool,
    form: int,
    x: int,
    packed: int,
    bias: int,
    out: int,
    rows: int,
    inner: int,
    panels: int,
    threads: int,
    /,
) -> None: ...
def attend(half_cache: bool, half_query: bool, cache: int, step: int, call: int, threads: int, /) -> None: ...
def layers(
    half: bool,
    calls: int,
    count: int,
    x: int,
    cos: int,
    sin: int,
    out: int,
    tokens: int,
    changes: int,
    threads: int,
    /,
) -> None: ...
def rms_norm(half: bool, x: int, weight: int, out: int, rows: int, width: int, eps: float, threads: int, /) -> None: ...
def gate(half: bool, gate: int, up: int, out: int, rows: int, width: int, stride: int, threads: int, /) -> None: ...
def rotate(
    half: bool,
    x: int,
    cos: int,
    sin: int,
    out: int,
    tokens: int,
    heads: int,
    width: int,
    token_stride: int,
    head_stride: int,
    threads: int,
    /,
) -> None: ...
def highest(
    half: bool, rows: int, scores: int, indices: int, count: int, vocabulary: int, stride: int, threads: int, /
) -> bool: ...
def draw(rows: int, tokens: int, count: int, vocabulary: int, threads: int, /) -> None: ...
