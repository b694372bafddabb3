"""Integers of a few bits in int32 words, the lowest bits first."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unpack(words: torch.Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Unpack words of neighbours along ``dim``, as uint8. With ``order``, the n-th of a word is its order[n]-th."""
    count, mask = 32 // bits, (1 << bits) - 1
    parts = [(words >> shift & mask).to(torch.uint8) for shift in range(0, 32, bits)]
    if order is not None:
        parts = [parts[list(order).index(n)] for n in range(count)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def columns_by_group(groups: torch.Tensor, size: int) -> torch.Tensor | None:
    """Return the order that makes the inputs of a group neighbours, given the group of each; None if they are.

    Raises ValueError unless each group has ``size`` inputs, and the last one the rest.
    """
    inner = len(groups)
    expected = torch.arange(inner) // size
    if torch.equal(groups.long(), expected):
        return None
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], expected):
        raise ValueError(f"its g_idx does not give each group {size} inputs")
    return order
