"""Embeddings whose weights stay codes in memory; a step dequantizes the rows of its tokens."""

from __future__ import annotations

import math

import torch
from torch import nn

from decant.engine.checkpoint.weight import CodeKind, Weight, weights_of


class CodedEmbedding(nn.Embedding):
    """``nn.Embedding`` with a quantized weight, of which two codes of 4 bits are in a byte.

    A row has exactly the numbers of the dequantized weight in ``dtype``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    mins: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(self, source: Weight, padding_idx: int | None, dtype: torch.dtype) -> None:
        """Read the weight. Raises ValueError with its name."""
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = source.shape
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self._dtype = dtype
        read = source.codes().without_e2m1()
        self._kind, self._group = read.kind, read.group
        order = None if read.order is None else read.order.argsort()
        zeros = None if read.zeros is None else read.zeros.T.clone(memory_format=torch.contiguous_format)
        parts = (_packed(read.codes, read.kind), _by_row(read.scales), zeros, _by_row(read.mins), order)
        for name, part in zip(("codes", "scales", "zeros", "mins", "order"), parts, strict=True):
            self.register_buffer(name, part)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Not numbers, of the weight's shape, dtype and device: for callers that look at these."""
        return self.scales.new_full((), math.nan, dtype=self._dtype).expand(self.num_embeddings, self.embedding_dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = ids.flatten()
        zeros = None if self.zeros is None else self.zeros[rows]
        mins = None if self.mins is None else self.mins[rows].float()
        numbers = _unpacked(self.codes[rows], self._kind, self.embedding_dim)
        weights = weights_of(self._kind, numbers, self.scales[rows].float(), zeros, mins, self._group)
        weights = weights.to(self._dtype)
        if self.order is not None:
            weights = weights.index_select(1, self.order)
        return weights.view(*ids.shape, self.embedding_dim)


def _by_row(each: torch.Tensor | None) -> torch.Tensor | None:
    """Return numbers [groups, out] as [out, groups], in float16 if that has all of them."""
    if each is None:
        return None
    halves = each.half()
    chosen = halves if torch.equal(halves.float(), each) else each
    return chosen.T.clone(memory_format=torch.contiguous_format)  # no view of a file


def _packed(codes: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    if kind is not CodeKind.INT4:
        return codes.clone()
    padded = nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, ::2] | padded[:, 1::2] << 4


def _unpacked(codes: torch.Tensor, kind: CodeKind, width: int) -> torch.Tensor:
    if kind is CodeKind.INT4:
        codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1)[:, :width]
    return codes.float()
