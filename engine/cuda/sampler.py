"""Sampling in one Triton kernel per step: all rows at once, without a sort, and one synchronization for the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from decant.engine.cuda import sampler_kernels as kernels
from decant.engine.model.sampler import Sampler, adjust, random_number
from decant.engine.plan import Row

TILE = 1024
"""Scores that a program reads at a time."""

_PARAMS: tuple[tuple[str, Any], ...] = (
    ("temperature", np.float32),
    ("top_k", np.int32),
    ("top_p", np.float64),
    ("min_p", np.float32),
    ("number", np.float64),
)


class TritonSampler(Sampler):
    """Draws with the same random numbers and rules as ``Sampler``, so the same tokens up to rounding of sums."""

    def _draw(self, rows: Sequence[Row], scores: list[torch.Tensor], eos: frozenset[int]) -> list[int]:
        logits = torch.stack(scores).float()
        for row, of_row in zip(rows, logits, strict=True):
            adjust(row, of_row, eos)
        params = [torch.from_numpy(column).to(logits.device) for column in _columns(rows)]
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        kernels.draw[(len(rows),)](logits, tokens, *params, logits.shape[1], TILE=TILE)
        drawn: list[int] = tokens.tolist()
        return drawn


def _columns(rows: Sequence[Row]) -> list[np.ndarray]:
    """``_PARAMS`` of the rows, an array each; the temperature of a greedy row is 0."""
    entries = []
    for row in rows:
        sampling = row.request.sampling
        drawing = (0.0, 0.0) if sampling.greedy else (sampling.temperature, random_number(row))
        entries.append((drawing[0], sampling.top_k, sampling.top_p, sampling.min_p, drawing[1]))
    return [np.array(column, dtype) for column, (_, dtype) in zip(zip(*entries, strict=True), _PARAMS, strict=True)]
