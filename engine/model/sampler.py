"""Logits to tokens. All operations are elementwise or per row: a row's token does not depend on the other rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, assert_never

import numpy as np
import torch

from decant.engine.counter_rng import counter_uniform
from decant.engine.logits_processors import Add, Allow, Edit, Forbid, Penalise
from decant.engine.plan import Row, TokenLogprobs
from decant.engine.request import SamplingParams

_OFF = float("-inf")

_HIGHEST = torch.finfo(torch.float32).max

PIECE = 1024


class TopToken(NamedTuple):
    """Highest score of each row (NaN if it has one), and the first token that has it."""

    scores: torch.Tensor
    tokens: torch.Tensor
    finite: bool


class Sampler:
    """Draws the next token of each row from its logits, by the sampling parameters of its request.

    It has no state: a row's draw depends on its seed, output and position alone. Runners call it once a step.
    """

    def __init__(self, scores_at_once: int | None = None) -> None:
        self._scores_at_once = scores_at_once

    def top_tokens(self, logits: torch.Tensor) -> TopToken:
        return top_tokens(logits)

    def sample(
        self, rows: Sequence[Row], logits: torch.Tensor, eos: frozenset[int], greedy: torch.Tensor | None = None
    ) -> list[int]:
        """Draw tokens; ``logits`` [n, vocabulary] are not changed. ``greedy``: tokens of ``top_tokens``, if known."""
        others = [index for index, row in enumerate(rows) if not row.request.is_plain_greedy]
        if others and len(others) == len(rows):
            return self._draw(rows, list(logits), eos)
        tokens: list[int] = (self.top_tokens(logits).tokens if greedy is None else greedy).tolist()
        if others:
            drawn = self._draw([rows[index] for index in others], [logits[index] for index in others], eos)
            for index, token in zip(others, drawn, strict=True):
                tokens[index] = token
        return tokens

    def _draw(self, rows: Sequence[Row], scores: list[torch.Tensor], eos: frozenset[int]) -> list[int]:
        count = len(rows)
        if self._scores_at_once is not None:
            count = max(1, self._scores_at_once // len(scores[0]))
        tokens: list[int] = []
        for first in range(0, len(rows), count):
            tokens += _sample(rows[first : first + count], torch.stack(scores[first : first + count]), eos)
        return tokens


def _sample(rows: Sequence[Row], scores: torch.Tensor, eos: frozenset[int]) -> list[int]:
    scores = scores.float()
    for index, row in enumerate(rows):
        for edit in row.edits(eos):
            apply(edit, scores[index])
    greedy = top_tokens(scores).tokens
    drawn = [index for index, row in enumerate(rows) if not row.request.sampling.is_greedy]
    if drawn:
        greedy[drawn] = _draw([rows[index] for index in drawn], scores[drawn])
    return greedy.tolist()


def top_tokens(scores: torch.Tensor) -> TopToken:
    most, tokens = highest(scores)
    return TopToken(most, tokens, bool(most.isfinite().all()))


def highest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Highest score and first token that has it, of each row; does not wait for the device.

    Works by pieces, as torch's max is many times as fast as argmax.
    """
    pieces = _pieces(scores, _OFF)
    most, piece = pieces.amax(-1).max(-1)
    within = pieces[torch.arange(len(piece), device=piece.device), piece].argmax(-1)
    return most, piece * PIECE + within


def _pieces(values: torch.Tensor, filler: float) -> torch.Tensor:
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % PIECE), value=filler)
    pieces: torch.Tensor = padded.unflatten(-1, (-1, PIECE))
    return pieces


def apply(edit: Edit, scores: torch.Tensor) -> None:
    """Change ``scores`` [vocabulary], float32, in place."""
    match edit:
        case Add():
            scores[_tensor(edit.tokens, torch.int64, scores)] += _tensor(edit.values, torch.float32, scores)
        case Forbid():
            scores[list(edit.tokens)] = _OFF
        case Penalise():
            _penalise(edit, scores)
        case Allow():
            scores.masked_fill_(_is_forbidden(edit, scores), _OFF)
        case _:
            assert_never(edit)


def _is_forbidden(edit: Allow, scores: torch.Tensor) -> torch.Tensor:
    packed = np.invert(np.frombuffer(edit.mask, np.uint8))
    missing = max(0, len(scores) - 8 * len(packed))
    bits = np.unpackbits(packed, count=len(scores) - missing, bitorder="little")
    if missing:
        bits = np.pad(bits, (0, missing), constant_values=1)
    return torch.from_numpy(bits).view(torch.bool).to(scores.device)


def _tensor(values: array[Any], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Copy to the device of ``like``; on a CPU a view of ``values``, which can't grow while it exists."""
    return torch.frombuffer(values, dtype=dtype).to(like.device)


def random_number(row: Row) -> float:
    sampling = row.request.sampling
    return counter_uniform(sampling.seed, sampling.output_index, row.end - row.request.prompt_len)


def _penalise(edit: Penalise, scores: torch.Tensor) -> None:
    tokens = _tensor(edit.tokens, torch.int64, scores)
    seen = scores[tokens]
    if (penalty := edit.repetition) != 1.0:
        seen = torch.where(seen > 0, seen / penalty, seen * penalty)
        seen.clamp_(-_HIGHEST, _HIGHEST)  # a reward may be unbounded, a score must be finite
    if edit.presence or edit.frequency:
        output = _tensor(edit.output, torch.int64, scores)
        seen = seen - (edit.presence * (output > 0) + edit.frequency * output)
    scores[tokens] = seen


def _draw(rows: Sequence[Row], scores: torch.Tensor) -> torch.Tensor:
    params = [row.request.sampling for row in rows]

    def column(of: Callable[[SamplingParams], float]) -> torch.Tensor:
        return torch.tensor([of(p) for p in params], dtype=scores.dtype, device=scores.device)[:, None]

    # The highest score becomes 0, so that no temperature overflows.
    scores = (scores - scores.amax(-1, keepdim=True)).div_(column(lambda p: p.temperature))
    _keep_top_k([p.top_k for p in params], scores)
    probabilities = torch.softmax(scores, -1)
    _keep_top_p([p.top_p for p in params], probabilities)
    if any(p.min_p for p in params):
        highest = probabilities.amax(-1, keepdim=True)
        probabilities.masked_fill_(probabilities < column(lambda p: p.min_p) * highest, 0.0)
    numbers = torch.tensor([random_number(row) for row in rows], dtype=torch.float64, device=scores.device)
    return _inverse(probabilities, numbers[:, None])


def _inverse(shares: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Index [n] at which the cumulative sum of shares [n, vocabulary] passes ``numbers`` [n, 1] of the total."""
    pieces = _pieces(shares, 0.0)
    sums = pieces.sum(-1)
    ends = sums.cumsum(-1, dtype=torch.float64)
    targets = numbers * ends[:, -1:]
    piece = torch.searchsorted(ends, targets, right=True).clamp(max=ends.shape[-1] - 1)
    mass = sums.gather(1, piece)
    part = (targets - (ends.gather(1, piece) - mass)) / mass
    within = pieces[torch.arange(len(piece), device=piece.device), piece[:, 0]].cumsum(-1, dtype=torch.float64)
    index = torch.searchsorted(within, part * within[:, -1:], right=True)
    return (piece * PIECE + index).flatten().clamp(max=shares.shape[-1] - 1)


def _keep_top_k(ks: Sequence[int], scores: torch.Tensor) -> None:
    for index, k in enumerate(ks):
        if 0 < k < scores.shape[-1]:
            lowest = scores[index].topk(k).values[-1]
            scores[index] = torch.where(scores[index] < lowest, _OFF, scores[index])


def _keep_top_p(ps: Sequence[float], probabilities: torch.Tensor) -> None:
    """Zero all but the likeliest tokens that together reach p.

    Tokens less likely than (1 - p) / (2 x vocabulary) never sum to 1 - p and are not sorted.
    """
    for index, p in enumerate(ps):
        if p < 1.0:
            row = probabilities[index]
            ordered, _ = row[row >= (1 - p) / (2 * len(row))].sort(descending=True)
            before = ordered.cumsum(-1, dtype=torch.float64) - ordered
            lowest = ordered[before < p].min()
            row.mul_(row >= lowest)


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of ``tokens`` [n] under ``logits`` [n, vocabulary], with ``counts[i]`` alternatives in row i.

    An entry depends only on its row and count; equally likely alternatives are ordered by token id.
    """
    normal = torch.log_softmax(logits, -1)
    chosen = normal.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (normal > chosen).sum(-1) + 1
    entries = zip(tokens, chosen[:, 0].tolist(), ranks.tolist(), _top_tokens(normal, counts), strict=True)
    return [TokenLogprobs(*entry) for entry in entries]


def _top_tokens(scores: torch.Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """Alternatives of each row, best first.

    Only the values of ``topk`` are used: its choice among equal scores depends on the batch's largest count.
    """
    most = min(max(counts), scores.shape[-1])
    alternatives: list[list[tuple[float, int]]] = [[] for _ in counts]
    if most:
        last = torch.tensor(counts, device=scores.device)[:, None].clamp(max=most) - 1
        lowest = scores.topk(most, dim=-1).values.gather(1, last.clamp(min=0))
        rows, tokens = ((scores >= lowest) & (last >= 0)).nonzero(as_tuple=True)
        for row, token, score in zip(rows.tolist(), tokens.tolist(), scores[rows, tokens].tolist(), strict=True):
            alternatives[row].append((-score, token))
    return [
        tuple((token, -score) for score, token in sorted(of)[:count])
        for of, count in zip(alternatives, counts, strict=True)
    ]
