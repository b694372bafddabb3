from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np
import torch

from decant.engine.cpu.threads import num_threads
from decant.engine.logits_processors import Allow
from decant.engine.model.sampler import Sampler, TopToken, apply, random_number
from decant.engine.plan import Row

SCORES_AT_ONCE = 1 << 18
"""Scores of one tensor operation: what a CPU's caches hold."""

_DTYPES = (torch.bfloat16, torch.float32)

_DRAW = np.dtype(
    [("scores", np.uint64), ("half", np.int64), ("top_k", np.int64)]
    + [(name, np.float64) for name in ("top_p", "min_p", "temperature", "number")]
    + [("allowed", np.uint64), ("words", np.int64)]
)
"""Layout of a draw, as in kernels/sample.h."""


class NativeSampler(Sampler):
    def __init__(self, kernels: ModuleType) -> None:
        super().__init__(SCORES_AT_ONCE)
        self._kernels = kernels

    def top_tokens(self, logits: torch.Tensor) -> TopToken:
        if logits.dtype not in _DTYPES:
            return super().top_tokens(logits)
        logits = _contiguous_rows(logits)
        count, vocabulary = logits.shape
        scores, tokens = torch.empty(count), torch.empty(count, dtype=torch.int64)
        addresses = logits.data_ptr(), scores.data_ptr(), tokens.data_ptr()
        sizes = count, vocabulary, logits.stride(0)
        finite = self._kernels.highest(logits.dtype == torch.bfloat16, *addresses, *sizes, num_threads())
        return TopToken(scores, tokens, finite)

    def _draw(self, rows: Sequence[Row], scores: list[torch.Tensor], eos: frozenset[int]) -> list[int]:
        if scores[0].dtype not in _DTYPES:
            return super()._draw(rows, scores, eos)
        draws, masks = np.zeros(len(rows), _DRAW), dict[int, bytes]()
        buffers: list[object] = []  # until the kernel has read them
        for index, (row, of_row) in enumerate(zip(rows, scores, strict=True)):
            sampling, adjusted = row.request.sampling, _contiguous_rows(of_row)
            edits = row.edits(eos)
            if edits and isinstance(last := edits[-1], Allow):  # the kernel applies it behind the others
                masks[index] = last.mask
                edits.pop()
            if edits:
                adjusted = adjusted.to(torch.float32, copy=True)
                for edit in edits:
                    apply(edit, adjusted)
            buffers.append(adjusted)
            draws[index] = (
                adjusted.data_ptr(),
                adjusted.dtype == torch.bfloat16,
                *(sampling.top_k, sampling.top_p, sampling.min_p),
                *((0.0, 0.0) if sampling.is_greedy else (sampling.temperature, random_number(row))),
                *(0, 0),
            )
        buffers.append(_place(masks, draws))
        tokens = np.empty(len(rows), np.int64)
        self._kernels.draw(draws.ctypes.data, tokens.ctypes.data, len(rows), len(scores[0]), num_threads())
        sampled: list[int] = tokens.tolist()
        return sampled


def _place(masks: Mapping[int, bytes], draws: np.ndarray) -> bytes:
    """Set the masks of the draws with these indexes; return the memory that they are in."""
    packed = b"".join(masks.values())
    if masks:
        sizes = np.fromiter(map(len, masks.values()), np.int64, len(masks))
        indexes = np.fromiter(masks, np.int64, len(masks))
        draws["allowed"][indexes] = np.frombuffer(packed, np.uint8).ctypes.data + (np.cumsum(sizes) - sizes)
        draws["words"][indexes] = sizes // 4
    return packed


def _contiguous_rows(scores: torch.Tensor) -> torch.Tensor:
    return scores if scores.stride(-1) == 1 else scores.contiguous()
