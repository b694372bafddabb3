"""``engine.model.sampler.apply`` for all rows of a step at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.cuda.sampler_kernels import allow
from decant.engine.cuda.staging import Staging
from decant.engine.logits_processors import Add, Allow, Edit, Forbid, Penalise
from decant.engine.plan import Row

_HIGHEST = torch.finfo(torch.float32).max
_TILE = 1024

Entries = Callable[[int, Any], list[npt.NDArray[Any]]]
Change = Callable[..., torch.Tensor]
RowEdits = Sequence[tuple[int, Any]]
"""Row and edit, all of one kind."""


def adjust_all(rows: Sequence[Row], scores: torch.Tensor, eos: frozenset[int], staging: Staging) -> None:
    """Change scores [n, vocabulary], float32, in place: each row by its edits in their order, by kind for all."""
    left = [(at, edits) for at, row in enumerate(rows) if (edits := row.edits(eos)[::-1])]
    while left:
        kind = min({type(edits[-1]) for _, edits in left}, key=_ORDER.index)
        edits_of_kind = [(at, edits.pop()) for at, edits in left if isinstance(edits[-1], kind)]
        if kind is Allow:
            _allow(edits_of_kind, scores, staging)
        else:
            _change(*_KINDS[kind], edits_of_kind, scores, staging)
        left = [(at, edits) for at, edits in left if edits]


def _change(entries: Entries, change: Change, edits: RowEdits, scores: torch.Tensor, staging: Staging) -> None:
    parts = [entries(at, edit) for at, edit in edits]
    places, tokens, *columns = staging.upload(*map(np.concatenate, zip(*parts, strict=True)))
    scores[places, tokens] = change(scores[places, tokens], *columns)


def _allow(edits: RowEdits, scores: torch.Tensor, staging: Staging) -> None:
    words = max(len(edit.mask) for _, edit in edits) // 4
    packed = np.zeros((len(edits), words), np.int32)
    for index, (_, edit) in enumerate(edits):
        packed[index, : len(edit.mask) // 4] = np.frombuffer(edit.mask, "<i4")
    rows, masks = staging.upload(np.array([at for at, _ in edits], np.int64), packed)
    vocabulary = scores.shape[1]
    grid = (len(edits), -(-vocabulary // _TILE))
    allow[grid](scores, rows, masks, vocabulary, words, TILE=_TILE, num_warps=4)


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


_KINDS: dict[type[Edit], tuple[Entries, Change]] = {
    Add: (_added, torch.add),
    Forbid: (_forbidden, lambda scores: torch.full_like(scores, -math.inf)),
    Penalise: (_penalties, _penalised),
}
"""By kind, in the usual order: the arrays of an edit (row, token and columns), and the change of its scores."""
_ORDER = [*_KINDS, Allow]
