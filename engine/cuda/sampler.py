from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from decant.engine.cuda import sampler_kernels as kernels
from decant.engine.cuda.adjust import adjust_all
from decant.engine.cuda.staging import Staging
from decant.engine.model.sampler import Sampler, random_number
from decant.engine.plan import Row

TILE = 4096

WARPS = 16
"""A row has one program, whose time is that of its reductions."""

_PARAMS: tuple[tuple[str, Any], ...] = (
    ("temperature", np.float32),
    ("top_k", np.int32),
    ("top_p", np.float64),
    ("min_p", np.float32),
    ("number", np.float64),
)


class TritonSampler(Sampler):
    """Draws the tokens of ``Sampler``, up to rounding of sums."""

    def top(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First token with the highest logit of each row, and whether its logits are valid, without waiting."""
        count = len(logits)
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        finite = torch.empty(count, dtype=torch.int8, device=logits.device)
        if count:
            logits = logits if logits.stride(1) == 1 else logits.contiguous()
            kernels.top_token[(count,)](
                *(logits, tokens, finite, logits.shape[1], logits.stride(0)), TILE=TILE, num_warps=WARPS, num_stages=3
            )
        return tokens, finite

    def launch(self, rows: Sequence[Row], scores: torch.Tensor, eos: frozenset[int], staging: Staging) -> torch.Tensor:
        """Draw tokens [n] on the device without waiting for it. Changes scores [n, vocabulary], float32."""
        adjust_all(rows, scores, eos, staging)
        params = staging.upload(*_columns(rows))
        tokens = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
        kernels.draw[(len(rows),)](scores, tokens, *params, scores.shape[1], TILE=TILE, num_warps=WARPS, num_stages=3)
        return tokens

    def _draw(self, rows: Sequence[Row], scores: list[torch.Tensor], eos: frozenset[int]) -> list[int]:
        stacked = torch.stack(scores).float()
        drawn: list[int] = self.launch(rows, stacked, eos, Staging(stacked.device)).tolist()
        return drawn


def _columns(rows: Sequence[Row]) -> list[np.ndarray]:
    entries = []
    for row in rows:
        sampling = row.request.sampling
        drawing = (0.0, 0.0) if sampling.is_greedy else (sampling.temperature, random_number(row))
        entries.append((drawing[0], sampling.top_k, sampling.top_p, sampling.min_p, drawing[1]))
    return [np.array(column, dtype) for column, (_, dtype) in zip(zip(*entries, strict=True), _PARAMS, strict=True)]
