"""``engine.model.sampler.adjust`` for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.cuda.staging import Staging
from decant.engine.model.sampler import forbidden
from decant.engine.plan import Row

_HIGHEST = torch.finfo(torch.float32).max

_PENALTIES: tuple[tuple[str, Any], ...] = (
    ("output", np.float32),
    ("repetition", np.float32),
    ("presence", np.float32),
    ("frequency", np.float32),
)


def adjust_all(rows: Sequence[Row], scores: torch.Tensor, eos: frozenset[int], staging: Staging) -> None:
    bias = _entries([(at, row.state.bias_tokens, (row.state.bias,)) for at, row in enumerate(rows) if row.state], 1)
    banned = _entries([(at, sorted(forbidden(row, eos)), ()) for at, row in enumerate(rows)], 0)
    seen = _entries([entry for at, row in enumerate(rows) if (entry := _penalties(at, row))], len(_PENALTIES))
    if len(bias[0]):
        at, tokens, added = staging.upload(*bias)
        scores[at, tokens] = scores[at, tokens] + added
    if len(banned[0]):
        at, tokens = staging.upload(*banned)
        scores[at, tokens] = float("-inf")
    if len(seen[0]):
        at, tokens, *columns = staging.upload(*seen)
        scores[at, tokens] = _penalised(scores[at, tokens], *columns)


def _entries(parts: Sequence[tuple[int, Any, Sequence[Any]]], width: int) -> list[npt.NDArray[Any]]:
    rows = np.concatenate([np.empty(0, np.int64), *(np.full(len(tokens), at) for at, tokens, _ in parts)])
    tokens = np.concatenate([np.empty(0, np.int64), *(np.array(tokens, np.int64) for _, tokens, _ in parts)])
    columns = [
        np.concatenate([np.empty(0, np.float32), *(np.array(values[column], np.float32) for _, _, values in parts)])
        for column in range(width)
    ]
    return [rows, tokens, *columns]


def _penalties(at: int, row: Row) -> tuple[int, Any, Sequence[Any]] | None:
    counts, sampling = row.state.counts if row.state else None, row.request.sampling
    if counts is None:
        return None
    counts.update(row.tokens, row.end)
    params = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    columns = [np.full(len(counts.tokens), param, np.float32) for param in params]
    return at, np.array(counts.tokens, np.int64), (np.array(counts.output, np.float32), *columns)


def _penalised(
    scores: torch.Tensor,
    output: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition).clamp(-_HIGHEST, _HIGHEST)
    scores = torch.where(repetition == 1.0, scores, repeated)
    return scores - (presence * (output > 0) + frequency * output)
