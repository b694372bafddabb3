"""Blocks of ggml's quantized types as codes. A row of a matrix is a whole number of blocks.

Scales of zero, those of blocks whose numbers are all equal, become scales of one with codes that stand for zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from decant.engine.checkpoint.weight import CodeKind, Codes

_DECODED_BYTES = 1 << 20
"""Of rows that are decoded at once."""

KINDS = {
    "Q8_0": CodeKind.INT8,
    "Q5_0": CodeKind.INT8,
    "Q5_1": CodeKind.INT8,
    "Q5_K": CodeKind.INT8,
    "Q4_0": CodeKind.INT4,
    "Q4_1": CodeKind.INT4,
    "Q4_K": CodeKind.INT4,
    "Q6_K": CodeKind.INT8,
}


def decode(type: str, rows: torch.Tensor) -> Codes:
    """Decode the bytes [out, bytes] of a matrix. Raises ValueError, also for scales that are not finite.

    Some rows at a time: a decoder takes several times the memory of its codes.
    """
    size, decoder = _DECODERS[type]
    step = max(1, _DECODED_BYTES // rows.shape[1])
    pieces = rows.split(step)
    first = decoder(pieces[0].unflatten(1, (-1, size)))
    if len(pieces) == 1:
        return first
    shape = len(first.scales), len(rows)
    codes, scales = first.codes.new_empty(len(rows), first.shape[1]), first.scales.new_empty(shape)
    mins = None if first.mins is None else first.mins.new_empty(shape)
    for at, piece in enumerate(pieces):
        part = decoder(piece.unflatten(1, (-1, size)))
        own = slice(at * step, at * step + len(piece))
        codes[own], scales[:, own] = part.codes, part.scales
        if mins is not None and part.mins is not None:
            mins[:, own] = part.mins
    return replace(first, codes=codes, scales=scales, mins=mins)


def _q8_0(blocks: torch.Tensor) -> Codes:
    return _make(CodeKind.INT8, blocks[..., 2:].view(torch.int8), _half(blocks[..., :2]))


def _q5_0(blocks: torch.Tensor) -> Codes:
    codes = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return _make(CodeKind.INT8, codes.view(torch.int8) - 16, _half(blocks[..., :2]))


def _q5_1(blocks: torch.Tensor) -> Codes:
    codes = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return _make(CodeKind.INT8, codes.view(torch.int8), _half(blocks[..., :2]), -_half(blocks[..., 2:4]))


def _q5_k(blocks: torch.Tensor) -> Codes:
    scales, mins = _six_bits(blocks[..., 4:16])
    lower = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(2, 3)
    fifth = torch.stack([blocks[..., 16:48] >> bit & 1 for bit in range(8)], -2)
    codes = (lower | fifth << 4).view(torch.int8)
    return _make(CodeKind.INT8, codes, _half(blocks[..., :2]) * scales, _half(blocks[..., 2:4]) * mins)


def _q4_0(blocks: torch.Tensor) -> Codes:
    return _make(CodeKind.INT4, _halves(blocks[..., 2:]), _half(blocks[..., :2]))


def _q4_1(blocks: torch.Tensor) -> Codes:
    return _make(CodeKind.INT4, _halves(blocks[..., 4:]), _half(blocks[..., :2]), -_half(blocks[..., 2:4]))


def _q4_k(blocks: torch.Tensor) -> Codes:
    scales, mins = _six_bits(blocks[..., 4:16])
    codes = _halves(blocks[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(2, 3)
    return _make(CodeKind.INT4, codes, _half(blocks[..., :2]) * scales, _half(blocks[..., 2:4]) * mins)


def _q6_k(blocks: torch.Tensor) -> Codes:
    lower = _halves(blocks[..., :128].unflatten(-1, (2, 64))).flatten(2)
    above = torch.stack([blocks[..., 128:192].unflatten(-1, (2, 32)) >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    codes = (lower | above.flatten(2) << 4).view(torch.int8) - 32
    scales = _half(blocks[..., 208:]) * blocks[..., 192:208].view(torch.int8)
    return _make(CodeKind.INT8, codes.unflatten(-1, (16, 16)), scales)


_DECODERS: dict[str, tuple[int, Callable[[torch.Tensor], Codes]]] = {
    "Q8_0": (34, _q8_0),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q5_K": (176, _q5_k),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and what decodes blocks [out, blocks, bytes]."""


def _make(kind: CodeKind, codes: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor | None = None) -> Codes:
    """Codes [out, blocks, group] or [out, blocks, groups, group]; scales and mins [out, blocks, 1 or groups]."""
    group, is_zero = codes.shape[-1], scales == 0
    if bool(is_zero.any()):
        scales = torch.where(is_zero, 1.0, scales)
        zero = 8 if kind is CodeKind.INT4 and mins is None else 0
        codes = codes.masked_fill(is_zero.view(*codes.shape[:-1], 1), zero)
    whole = codes.flatten(1).contiguous()
    least = None if mins is None else _by_group(mins)
    return Codes(kind, whole, _by_group(scales), group, mins=least)


def _by_group(each: torch.Tensor) -> torch.Tensor:
    return each.flatten(1).T.contiguous()


def _half(pairs: torch.Tensor) -> torch.Tensor:
    """The float16 of two bytes [.., 2] as float32 [.., 1]."""
    return pairs.contiguous().view(torch.float16).float()


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """The lower halves of bytes [.., n], then the upper ones: [.., 2n]."""
    return torch.cat([pairs & 15, pairs >> 4], -1)


def _bits(content: torch.Tensor) -> torch.Tensor:
    """The bits of bytes, the lowest first: [.., n] -> [.., 8n]."""
    return torch.stack([content >> bit & 1 for bit in range(8)], -1).flatten(-2)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of twelve bytes. Four bytes have the first scales, four the first minima, below two
    bits of the others, whose lower bits are in the last four.
    """
    scales, mins, rest = packed.split(4, -1)
    further = [scales >> 2 & 48 | rest & 15, mins >> 2 & 48 | rest >> 4]
    return torch.cat([scales & 63, further[0]], -1), torch.cat([mins & 63, further[1]], -1)
