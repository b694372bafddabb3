"""``engine.model.sampler.apply`` for all rows of a step at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.cuda.staging import Staging
from decant.engine.logits_processors import Add, Edit, Forbid, Penalise
from decant.engine.plan import Row

_HIGHEST = torch.finfo(torch.float32).max


def adjust_all(rows: Sequence[Row], scores: torch.Tensor, eos: frozenset[int], staging: Staging) -> None:
    """Change scores [n, vocabulary], float32, in place: each row by its edits in their order, by kind for all."""
    left = [(at, edits) for at, row in enumerate(rows) if (edits := row.edits(eos)[::-1])]
    while left:
        kind = min({type(edits[-1]) for _, edits in left}, key=list(_KINDS).index)
        entries, change = _KINDS[kind]
        parts = [entries(at, edits.pop()) for at, edits in left if isinstance(edits[-1], kind)]
        places, tokens, *columns = staging.upload(*map(np.concatenate, zip(*parts, strict=True)))
        scores[places, tokens] = change(scores[places, tokens], *columns)
        left = [(at, edits) for at, edits in left if edits]


def _added(at: int, edit: Add) -> list[npt.NDArray[Any]]:
    return [*_places(at, edit.tokens), np.array(edit.values, np.float32)]


def _forbidden(at: int, edit: Forbid) -> list[npt.NDArray[Any]]:
    return _places(at, sorted(edit.tokens))


def _penalties(at: int, edit: Penalise) -> list[npt.NDArray[Any]]:
    params = (edit.repetition, edit.presence, edit.frequency)
    columns = [np.full(len(edit.tokens), param, np.float32) for param in params]
    return [*_places(at, edit.tokens), np.array(edit.output, np.float32), *columns]


def _places(at: int, tokens: Sequence[int]) -> list[npt.NDArray[Any]]:
    return [np.full(len(tokens), at, np.int64), np.array(tokens, np.int64)]


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


_KINDS: dict[type[Edit], tuple[Callable[[int, Any], list[npt.NDArray[Any]]], Callable[..., torch.Tensor]]] = {
    Add: (_added, torch.add),
    Forbid: (_forbidden, lambda scores: torch.full_like(scores, -math.inf)),
    Penalise: (_penalties, _penalised),
}
"""By kind, in the usual order: the arrays of an edit (row, token and columns), and the change of its scores."""
