"""Logits to tokens: every row by its own parameters, all rows in the same few tensor operations.

Every operation is elementwise or per row, so a row's token does not depend on which rows it is sampled with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.draw import uniform
from engine.plan import Row, TokenLogprobs
from engine.request import SamplingParams

_OFF = float("-inf")

PIECE = 1024
"""Scores of which one maximum is found at a time."""


def sample(rows: Sequence[Row], logits: torch.Tensor, eos: frozenset[int]) -> list[int]:
    """One token for each row; logits [n, vocabulary] are not changed. Source of the draw: ``draw.uniform``."""
    if all([row.request.plain for row in rows]):  # noqa: C419 - half the time of a generator, every step
        return _likeliest(logits).tolist()
    scores = logits.to(torch.float32, copy=True)
    for index, row in enumerate(rows):
        _adjust(row, scores[index], eos)
    greedy = _likeliest(scores)
    drawn = [index for index, row in enumerate(rows) if not row.request.sampling.greedy]
    if drawn:
        greedy[drawn] = _draw([rows[index] for index in drawn], scores[drawn])
    return greedy.tolist()


def _likeliest(scores: torch.Tensor) -> torch.Tensor:
    """The place of the highest of scores [n, vocabulary]: [n]. The highest of pieces first, and then within one, for
    torch finds a maximum many times as fast as the place of one."""
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % PIECE), value=_OFF)
    pieces = padded.unflatten(-1, (-1, PIECE))
    piece = pieces.amax(-1).argmax(-1)
    places: torch.Tensor = piece * PIECE + pieces[torch.arange(len(piece), device=piece.device), piece].argmax(-1)
    return places


def _adjust(row: Row, scores: torch.Tensor, eos: frozenset[int]) -> None:
    """Bias, minimum length and penalties of one row, in place; scores [vocabulary]."""
    sampling, stop = row.request.sampling, row.request.stop
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    forbidden = stop.stop_token_ids if stop.ignore_eos else stop.stop_token_ids | eos
    if forbidden and row.end - row.request.prompt_len < stop.min_tokens:
        scores[list(forbidden)] = _OFF
    if sampling.penalised:
        _penalise(sampling, row.tokens, row.request.prompt_len, scores)


def _penalise(sampling: SamplingParams, tokens: Sequence[int], prompt: int, scores: torch.Tensor) -> None:
    seen = torch.tensor(sorted(set(tokens)), device=scores.device)
    before = scores[seen]
    penalty = sampling.repetition_penalty
    scores[seen] = torch.where(before > 0, before / penalty, before * penalty)
    if len(tokens) > prompt:
        written, counts = torch.tensor(tokens[prompt:], device=scores.device).unique(return_counts=True)
        scores[written] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _draw(rows: Sequence[Row], scores: torch.Tensor) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution at one uniform number."""
    params = [row.request.sampling for row in rows]

    def column(of: Callable[[SamplingParams], float]) -> torch.Tensor:
        return torch.tensor([of(p) for p in params], dtype=scores.dtype, device=scores.device)[:, None]

    scores = scores / column(lambda p: p.temperature)
    _keep_top_k([p.top_k for p in params], scores)
    probabilities = torch.softmax(scores, -1)
    _keep_top_p([p.top_p for p in params], probabilities)
    highest = probabilities.amax(-1, keepdim=True)
    probabilities = probabilities.masked_fill(probabilities < column(lambda p: p.min_p) * highest, 0.0)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    numbers = [
        uniform(p.seed, p.output_index, row.end - row.request.prompt_len) for p, row in zip(params, rows, strict=True)
    ]
    targets = torch.tensor(numbers, dtype=torch.float64, device=scores.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).flatten().clamp(max=scores.shape[-1] - 1)


def _keep_top_k(ks: Sequence[int], scores: torch.Tensor) -> None:
    """Leave the k highest of each row (and what equals the lowest of them), in place."""
    for index, k in enumerate(ks):
        if 0 < k < scores.shape[-1]:
            lowest = scores[index].topk(k).values[-1]
            scores[index].masked_fill_(scores[index] < lowest, _OFF)


def _keep_top_p(ps: Sequence[float], probabilities: torch.Tensor) -> None:
    """Leave the fewest likeliest tokens of each row that together reach p, in place."""
    for index, p in enumerate(ps):
        if p < 1.0:
            ordered, _ = probabilities[index].sort(descending=True)
            before = ordered.cumsum(-1, dtype=torch.float64) - ordered
            lowest = ordered[before < p].min()
            probabilities[index].masked_fill_(probabilities[index] < lowest, 0.0)


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of ``tokens`` [n] under logits [n, vocabulary] and the ``counts[i]`` likeliest of each row."""
    normal = torch.log_softmax(logits, -1)
    chosen = normal.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (normal > chosen).sum(-1) + 1
    most = max(counts)
    best = normal.topk(most, dim=-1) if most else None
    entries = []
    for index, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        top: tuple[tuple[int, float], ...] = ()
        if best is not None:
            top = tuple(zip(best.indices[index, :count].tolist(), best.values[index, :count].tolist(), strict=True))
        entries.append(TokenLogprobs(token, float(chosen[index]), int(ranks[index]), top))
    return entries
