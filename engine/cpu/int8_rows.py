"""Products of rows that are rounded to int8 with weights of integer codes, by torch alone.

A row has a scale of its own: its largest absolute number / 127. The products of a group's codes are exact integers, in
pieces that float32 holds; the scales are applied by the same operations, in the same order, as in the compiled kernels
(kernels/int8_rows.h and gemm_int8.h), so that the bits are theirs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from decant.engine.checkpoint.weight import CodeKind, Codes
from decant.engine.cpu.threads import all_for_torch

LEAST = 2.0**-100
"""Rows of smaller numbers are zeros."""

MOST_INNER = 1 << 17
"""Inputs with a common scale whose products of int8 fit into an int32."""

_EXACT = 1024
"""Products of int8 whose sums are exact in float32: 2^10 * 127 * 128 < 2^24."""

_NUMBERS_AT_ONCE = 1 << 22


def takes(codes: Codes) -> bool:
    """Whether rows are rounded for a weight: its numbers are integers, or doubled are, in groups that kernels take."""
    return codes.kind is not CodeKind.FP8 and codes.has_kernel_group


def check_inner(codes: Codes) -> None:
    """Raise ValueError for a weight whose sums may not fit into an int32."""
    inner = min(codes.group, codes.shape[1])
    if inner > MOST_INNER:
        raise ValueError(f"group: at most {MOST_INNER:,} inputs, for rows in int8, got {inner:,}")


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``rows`` [n, in], integers in float32, and their scales [n, 1]."""
    numbers = rows.float()
    largest = numbers.abs().amax(1, keepdim=True)
    is_finite = largest.isfinite()
    largest = largest.clamp(min=LEAST)
    all_codes = torch.full_like(largest, 127)
    codes = torch.where(is_finite, (numbers * (all_codes / largest)).round(), 0.0)
    return codes, torch.where(is_finite, largest / all_codes, torch.nan)


class RoundedRows:
    """The product of ``CodesForInt8`` (gemm.py), without the compiled kernels."""

    def __init__(self, codes: Codes, bias: torch.Tensor | None) -> None:
        check_inner(codes)
        codes = codes.without_e2m1()
        zeros, mins = (None if each is None else each.clone() for each in (codes.zeros, codes.mins))
        self._codes = replace(codes, codes=codes.codes.clone(), scales=codes.scales.clone(), zeros=zeros, mins=mins)
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs, inner = self._codes.shape
        rows, scales = round_rows(x.reshape(-1, inner))
        out = rows.new_empty(len(rows), outputs)
        step = max(1, _NUMBERS_AT_ONCE // max(inner, len(rows)))
        with all_for_torch():
            for first in range(0, outputs, step):
                out[:, first : first + step] = self._sums(rows, first, min(outputs, first + step))
        out *= scales
        if self._bias is not None:
            out += self._bias
        return out.to(x.dtype).view(*x.shape[:-1], outputs)

    def _sums(self, rows: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Return the sums of the outputs from ``first`` to ``stop``, without the scales of the rows."""
        of, inner = self._codes, rows.shape[1]
        total = None
        for group, begin in enumerate(range(0, inner, of.group)):
            columns = slice(begin, min(inner, begin + of.group))
            part = rows[:, columns]
            exact = _exact(part, self._numbers(group, columns, first, stop)) * of.scales[group, first:stop]
            total = exact if total is None else total + exact
            if of.mins is not None:
                total = total - part.sum(1, keepdim=True, dtype=torch.float64).float() * of.mins[group, first:stop]
        assert total is not None
        return total

    def _numbers(self, group: int, columns: slice, first: int, stop: int) -> torch.Tensor:
        numbers = self._codes.codes[first:stop, columns].float()
        if self._codes.kind is CodeKind.INT4 and self._codes.mins is None:
            numbers -= 8 if self._codes.zeros is None else self._codes.zeros[group, first:stop, None]
        return numbers


def _exact(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return rows [n, in] times numbers [out, in], integers all, rounded once."""
    parts = zip(rows.split(_EXACT, 1), numbers.split(_EXACT, 1), strict=True)
    sums = [one @ other.T for one, other in parts]
    return sums[0] if len(sums) == 1 else torch.stack(sums).double().sum(0).float()
