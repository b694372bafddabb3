"""A quantized weight is a value: what a file has of it, in the one form that every backend takes.

    weight[o, i] = scales[g, o] * (codes[o, i] - zeros[g, o]) - mins[g, o]        g = i // group

A format (``formats.py``) gives a ``Weight`` for each of its matrices; ``Backend.prepare`` makes a product of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

MAX_GROUP = 512
"""Most inputs with a common scale that kernels take, unless all have one."""

PIECE = 1 << 20
"""Elements that are dequantized at once."""


E2M1 = tuple(sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""The numbers of the codes from 0 to 15."""


class CodeKind(Enum):
    """Codes of int8 and fp8 (e4m3) are their numbers; int4 has codes from 0 to 15, whose zero is 8 or stored; e2m1 has
    the numbers of a table."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    E2M1 = "e2m1"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a code in ``Codes``, which takes a byte."""
        return _DTYPES[self]


_DTYPES = {
    CodeKind.INT8: torch.int8,
    CodeKind.INT4: torch.uint8,
    CodeKind.FP8: torch.float8_e4m3fn,
    CodeKind.E2M1: torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes [out, in] of a weight.

    scales  float32 [groups, out]
    zeros   uint8 [groups, out], of int4 alone; None: all are 8, or 0 with ``mins``
    group   inputs with a common scale, the last group may have fewer
    order   the input of each column, int64 [in]; None: as they are
    mins    float32 [groups, out], of int8, and of int4 without zeros; None: all are 0
    """

    kind: CodeKind
    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    mins: torch.Tensor | None = None

    def __post_init__(self) -> None:
        outputs, inner = self.codes.shape
        groups = -(-inner // self.group)
        if self.codes.dtype != self.kind.dtype:
            raise ValueError(f"codes: {self.kind.dtype}, got {self.codes.dtype}")
        for name, each in (("scales", self.scales), ("zero points", self.zeros), ("minima", self.mins)):
            if each is not None and each.shape != (groups, outputs):
                raise ValueError(f"{name} are {list(each.shape)}: by its shape they are [{groups}, {outputs}]")
        if not bool((self.scales.isfinite() & (self.scales != 0)).all()):
            raise ValueError("a scale is zero, infinite or not a number")
        if self.mins is not None and not bool(self.mins.isfinite().all()):
            raise ValueError("a minimum is infinite or not a number")
        if self.mins is not None and (self.kind in (CodeKind.FP8, CodeKind.E2M1) or self.zeros is not None):
            raise ValueError("minima: not of fp8 and e2m1, and not beside zero points")
        if self.zeros is not None and self.kind is not CodeKind.INT4:
            raise ValueError(f"zero points: of int4 alone, not of {self.kind.value}")
        if self.codes.dtype == torch.uint8 and int(self.codes.max()) > 15:
            raise ValueError(f"a code is {int(self.codes.max())}, and codes end at 15")
        if self.zeros is not None and int(self.zeros.max()) > 15:
            raise ValueError(f"a zero point is {int(self.zeros.max())}, and codes end at 15")
        if self.kind is CodeKind.FP8 and bool((self.codes.view(torch.uint8) & 127 == 127).any()):
            raise ValueError("a number is not a number")
        if self.order is not None and not _is_permutation(self.order, inner):
            raise ValueError("the order of its inputs is not a permutation")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def has_kernel_group(self) -> bool:
        """Whether kernels take the group: all inputs, or a multiple of 8 up to MAX_GROUP."""
        return self.group >= self.shape[1] or (self.group % 8 == 0 and self.group <= MAX_GROUP)

    def in_order(self) -> Codes:
        """Return the same codes for rows that are in ``order`` already."""
        return replace(self, order=None)

    def to(self, device: torch.device) -> Codes:
        if self.codes.device == device:
            return self
        zeros, order, mins = (None if each is None else each.to(device) for each in (self.zeros, self.order, self.mins))
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, zeros=zeros, order=order, mins=mins)

    def padded(self, outputs: int) -> Codes:
        """Return the codes with further outputs, up to ``outputs``, whose numbers are not defined."""
        missing = outputs - self.shape[0]
        if not missing:
            return self

        def pad(each: torch.Tensor, dim: int) -> torch.Tensor:
            last = each.narrow(dim, each.shape[dim] - 1, 1)
            return torch.cat([each, *[last] * missing], dim)

        zeros, mins = (None if each is None else pad(each, 1) for each in (self.zeros, self.mins))
        return replace(self, codes=pad(self.codes, 0), scales=pad(self.scales, 1), zeros=zeros, mins=mins)

    def without_e2m1(self) -> Codes:
        """Return a weight of e2m1 in int8, as its numbers, doubled, are whole, with half the scales; else itself."""
        if self.kind is not CodeKind.E2M1:
            return self
        return replace(self, kind=CodeKind.INT8, codes=_e2m1(self.codes, torch.int8, 2), scales=self.scales / 2)

    def dequantize(self, dtype: torch.dtype, first: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the weight's outputs from ``first`` to ``stop``: products in float32, or in float64 for float64."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rows = slice(first, stop)
        zeros, mins = (None if each is None else each[:, rows].T for each in (self.zeros, self.mins))
        numbers = _e2m1(self.codes[rows], wide) if self.kind is CodeKind.E2M1 else self.codes[rows].to(wide)
        numbers = weights_of(self.kind, numbers, self.scales[:, rows].T, zeros, mins, self.group)
        numbers = numbers.to(dtype)
        if self.order is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(1, self.order, numbers)


def weights_of(
    kind: CodeKind,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    mins: torch.Tensor | None,
    group: int,
) -> torch.Tensor:
    """Make weights of numbers [out, in], in place; scales, zero points and minima are [out, groups] here."""
    inner = numbers.shape[1]
    if kind is CodeKind.INT4 and mins is None:
        numbers -= 8 if zeros is None else _spread(zeros, group, inner)
    numbers *= _spread(scales, group, inner)
    if mins is not None:
        numbers -= _spread(mins, group, inner)
    return numbers


def _spread(each: torch.Tensor, group: int, inner: int) -> torch.Tensor:
    return each if each.shape[1] == 1 else each.repeat_interleave(group, 1)[:, :inner]


def _e2m1(codes: torch.Tensor, dtype: torch.dtype, factor: int = 1) -> torch.Tensor:
    """Numbers of codes of e2m1, times the factor."""
    table = torch.tensor([factor * number for number in E2M1], dtype=dtype, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _is_permutation(order: torch.Tensor, count: int) -> bool:
    return torch.equal(order.sort().values, torch.arange(count, device=order.device))


@dataclass(frozen=True, slots=True)
class Weight:
    """A quantized matrix [out, in] that is not read yet. As a ``Slice`` it is dequantized, in float32.

    ``nbytes`` counts its tensors in the file. ``read`` raises ValueError for a weight that is not as its format says.
    """

    name: str
    shape: tuple[int, int]
    kind: CodeKind
    nbytes: int
    read: Callable[[], Codes]

    def __getitem__(self, index: Any) -> torch.Tensor:
        codes = self.codes()
        weight = torch.empty(self.shape)
        step = max(1, PIECE // self.shape[1])
        for first in range(0, self.shape[0], step):
            weight[first : first + step] = codes.dequantize(torch.float32, first, first + step)
        return weight[index]

    def codes(self) -> Codes:
        """Read the codes. Raises ValueError with the weight's name."""
        try:
            with _disable_current_modes():  # one that widens dtypes would also do so to those of bytes in the file
                codes = self.read()
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: {error}") from error
        if codes.shape != self.shape:
            raise ValueError(f"{self.name} has codes for {list(codes.shape)}, and is {list(self.shape)}")
        return codes


def integer_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    group: int,
    order: torch.Tensor | None = None,
) -> Codes:
    """Make codes of unsigned numbers [out, in] of 4 or 8 bits and zero points [groups, out], all uint8.

    Raises ValueError, also for numbers of 8 bits whose distance from their zero point does not fit into int8.
    """
    if bits == 4:
        plain = zeros is None or bool((zeros == 8).all())
        return Codes(CodeKind.INT4, codes, scales, group, None if plain else zeros, order)
    if zeros is None or bool((zeros == 128).all()):
        return Codes(CodeKind.INT8, (codes ^ 128).view(torch.int8), scales, group, None, order)
    spread = zeros.T.repeat_interleave(group, 1)[:, : codes.shape[1]]
    numbers = codes.to(torch.int16) - spread
    if int(numbers.min()) < -128 or int(numbers.max()) > 127:
        raise ValueError("numbers of 8 bits are more than 127 above their zero point, or 128 below: this is not served")
    return Codes(CodeKind.INT8, numbers.to(torch.int8), scales, group, None, order)
