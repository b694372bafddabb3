"""Logits to tokens, every row by its own parameters.

On a CPU with kernels each row is drawn by itself, in place (``engine/cpu/kernels/sample.h``); elsewhere all rows go
through the same few tensor operations, which are elementwise or per row. Either way a row's token does not depend on
which rows it is sampled with.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence, Set
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from decant.engine.counter_rng import counter_uniform
from decant.engine.cpu.kernels import KERNELS
from decant.engine.cpu.threads import team
from decant.engine.plan import Row, TokenLogprobs
from decant.engine.request import SamplingParams
from decant.engine.sampler_state import TokenCounts

_OFF = float("-inf")

_HIGHEST = torch.finfo(torch.float32).max

PIECE = 1024
"""Scores of which one maximum, or one sum, is found at a time."""

AT_ONCE = 1 << 18
"""Scores that go through all operations together on a CPU: what its caches hold. Rows of more are read from memory,
and their temporaries mapped anew, by each operation."""


class TopToken(NamedTuple):
    """Of each of n rows: its highest score, not a number where one of its scores is none, and the first place of it.
    ``finite``: all these scores are."""

    scores: torch.Tensor
    places: torch.Tensor
    finite: bool


def highest(logits: torch.Tensor) -> TopToken:
    """Of logits [n, vocabulary]."""
    if KERNELS is None or not _compiled(logits):
        return _highest(logits)
    logits = _side_by_side(logits)
    count, vocabulary = logits.shape
    scores, places = torch.empty(count), torch.empty(count, dtype=torch.int64)
    addresses = logits.data_ptr(), scores.data_ptr(), places.data_ptr()
    sizes = count, vocabulary, logits.stride(0)
    finite = KERNELS.highest(logits.dtype == torch.bfloat16, *addresses, *sizes, team())
    return TopToken(scores, places, finite)


def sample(
    rows: Sequence[Row], logits: torch.Tensor, eos: frozenset[int], likeliest: torch.Tensor | None = None
) -> list[int]:
    """One token for each row; logits [n, vocabulary] are not changed. Source of the draw: ``draw.uniform``.

    ``likeliest`` [n]: the places of ``highest``, where they are known.
    """
    others = [index for index, row in enumerate(rows) if not row.request.plain]
    if others and len(others) == len(rows):
        return _drawn(rows, list(logits), eos)
    tokens: list[int] = (highest(logits).places if likeliest is None else likeliest).tolist()
    if others:
        drawn = _drawn([rows[index] for index in others], [logits[index] for index in others], eos)
        for index, token in zip(others, drawn, strict=True):
            tokens[index] = token
    return tokens


def _drawn(rows: Sequence[Row], scores: list[torch.Tensor], eos: frozenset[int]) -> list[int]:
    """One token for each row, from its scores [vocabulary]."""
    if KERNELS is not None and _compiled(scores[0]):
        return _sample_each(KERNELS, rows, scores, eos)
    count = max(1, AT_ONCE // len(scores[0])) if scores[0].device.type == "cpu" else len(rows)
    tokens: list[int] = []
    for first in range(0, len(rows), count):
        tokens += _sample(rows[first : first + count], torch.stack(scores[first : first + count]), eos)
    return tokens


def _compiled(logits: torch.Tensor) -> bool:
    """Whether kernels, where there are any, are for such logits."""
    return logits.device.type == "cpu" and logits.dtype in (torch.bfloat16, torch.float32)


def _side_by_side(scores: torch.Tensor) -> torch.Tensor:
    return scores if scores.stride(-1) == 1 else scores.contiguous()


_DRAWN = np.dtype(
    [("scores", np.uint64), ("half", np.int64), ("top_k", np.int64)]
    + [(name, np.float64) for name in ("top_p", "min_p", "temperature", "number")]
)
"""As in engine/cpu/kernels/sample.h."""


def _sample_each(
    kernels: ModuleType, rows: Sequence[Row], scores: list[torch.Tensor], eos: frozenset[int]
) -> list[int]:
    """Compiled. Only rows whose scores are changed are copied."""
    drawn, read = np.empty(len(rows), _DRAWN), []
    for index, (row, given) in enumerate(zip(rows, scores, strict=True)):
        sampling, here = row.request.sampling, _side_by_side(given)
        if sampling.logit_bias or sampling.penalised or _forbidden(row, eos):
            here = here.to(torch.float32, copy=True)
            _adjust(row, here, eos)
        read.append(here)  # until they are read
        drawn[index] = (
            here.data_ptr(),
            here.dtype == torch.bfloat16,
            *(sampling.top_k, sampling.top_p, sampling.min_p),
            *((0.0, 0.0) if sampling.greedy else (sampling.temperature, _number(row))),
        )
    tokens = np.empty(len(rows), np.int64)
    addresses = drawn.ctypes.data, tokens.ctypes.data
    kernels.draw(*addresses, len(rows), len(scores[0]), team())
    found: list[int] = tokens.tolist()
    return found


def _sample(rows: Sequence[Row], scores: torch.Tensor, eos: frozenset[int]) -> list[int]:
    """In tensor operations; scores [n, vocabulary], which are a copy already."""
    scores = scores.float()
    for index, row in enumerate(rows):
        _adjust(row, scores[index], eos)
    greedy = _highest(scores).places
    drawn = [index for index, row in enumerate(rows) if not row.request.sampling.greedy]
    if drawn:
        greedy[drawn] = _draw([rows[index] for index in drawn], scores[drawn])
    return greedy.tolist()


def _highest(scores: torch.Tensor) -> TopToken:
    """The highest of pieces first, and its place within one then, for torch finds a maximum many times as fast as the
    place of one."""
    pieces = _pieces(scores, _OFF)
    most, piece = pieces.amax(-1).max(-1)
    within = pieces[torch.arange(len(piece), device=piece.device), piece].argmax(-1)
    return TopToken(most, piece * PIECE + within, bool(most.isfinite().all()))


def _pieces(values: torch.Tensor, filler: float) -> torch.Tensor:
    """[n, vocabulary] -> [n, pieces, PIECE], the last one filled up."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % PIECE), value=filler)
    pieces: torch.Tensor = padded.unflatten(-1, (-1, PIECE))
    return pieces


def _adjust(row: Row, scores: torch.Tensor, eos: frozenset[int]) -> None:
    """Bias, minimum length and penalties of one row, in place; scores [vocabulary]."""
    state = row.state
    assert state is not None, "a request that is not plain has a sampler state"
    if state.bias_tokens:
        scores[_tensor(state.bias_tokens, torch.int64, scores)] += _tensor(state.bias, torch.float32, scores)
    if forbidden := _forbidden(row, eos):
        scores[list(forbidden)] = _OFF
    if state.counts is not None:
        state.counts.update(row.tokens, row.end)
        _penalise(row.request.sampling, state.counts, scores)


def _tensor(values: array[Any], dtype: torch.dtype, beside: torch.Tensor) -> torch.Tensor:
    """An array's memory as a tensor on the device of another. While it is alive the array can't grow."""
    return torch.frombuffer(values, dtype=dtype).to(beside.device)


def _forbidden(row: Row, eos: frozenset[int]) -> Set[int]:
    """What would end the text before its minimum length."""
    stop = row.request.stop
    return frozenset() if row.end - row.request.prompt_len >= stop.min_tokens else stop.ids(eos)


def _number(row: Row) -> float:
    """Of the row's draw."""
    sampling = row.request.sampling
    return counter_uniform(sampling.seed, sampling.output_index, row.end - row.request.prompt_len)


def _penalise(sampling: SamplingParams, counts: TokenCounts, scores: torch.Tensor) -> None:
    """In place, of the distinct tokens alone; scores [vocabulary]."""
    if not counts.tokens:
        return
    tokens, output = (_tensor(part, torch.int64, scores) for part in (counts.tokens, counts.output))
    changed = scores[tokens]
    if (penalty := sampling.repetition_penalty) != 1.0:
        changed = torch.where(changed > 0, changed / penalty, changed * penalty)
        changed.clamp_(-_HIGHEST, _HIGHEST)  # a reward may be without bounds, a score must be a number
    scores[tokens] = changed - (sampling.presence_penalty * (output > 0) + sampling.frequency_penalty * output)


def _draw(rows: Sequence[Row], scores: torch.Tensor) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution at one uniform number."""
    params = [row.request.sampling for row in rows]

    def column(of: Callable[[SamplingParams], float]) -> torch.Tensor:
        return torch.tensor([of(p) for p in params], dtype=scores.dtype, device=scores.device)[:, None]

    # The highest is 0, so that no temperature takes it beyond what a float holds.
    scores = (scores - scores.amax(-1, keepdim=True)).div_(column(lambda p: p.temperature))
    _keep_top_k([p.top_k for p in params], scores)
    probabilities = torch.softmax(scores, -1)
    _keep_top_p([p.top_p for p in params], probabilities)
    if any(p.min_p for p in params):
        highest = probabilities.amax(-1, keepdim=True)
        probabilities.masked_fill_(probabilities < column(lambda p: p.min_p) * highest, 0.0)
    numbers = torch.tensor([_number(row) for row in rows], dtype=torch.float64, device=scores.device)
    return _inverse(probabilities, numbers[:, None])


def _inverse(shares: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Where the running sum of shares [n, vocabulary] passes the part ``numbers`` [n, 1] of their sum: [n]. In which
    piece first, and then within it, for a sum is many times as fast as a running one."""
    pieces = _pieces(shares, 0.0)
    sums = pieces.sum(-1)
    ends = sums.cumsum(-1, dtype=torch.float64)
    targets = numbers * ends[:, -1:]
    piece = torch.searchsorted(ends, targets, right=True).clamp(max=ends.shape[-1] - 1)
    mass = sums.gather(1, piece)
    part = (targets - (ends.gather(1, piece) - mass)) / mass
    within = pieces[torch.arange(len(piece), device=piece.device), piece[:, 0]].cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(within, part * within[:, -1:], right=True)
    return (piece * PIECE + place).flatten().clamp(max=shares.shape[-1] - 1)


def _keep_top_k(ks: Sequence[int], scores: torch.Tensor) -> None:
    """Leave the k highest of each row (and what equals the lowest of them), in place."""
    for index, k in enumerate(ks):
        if 0 < k < scores.shape[-1]:
            lowest = scores[index].topk(k).values[-1]
            scores[index] = torch.where(scores[index] < lowest, _OFF, scores[index])


def _keep_top_p(ps: Sequence[float], probabilities: torch.Tensor) -> None:
    """Leave the fewest likeliest tokens of each row that together reach p, in place.

    All that are less likely than half of 1 - p over their number are never as much as 1 - p together: only the others,
    few of them, are sorted.
    """
    for index, p in enumerate(ps):
        if p < 1.0:
            row = probabilities[index]
            ordered, _ = row[row >= (1 - p) / (2 * len(row))].sort(descending=True)
            before = ordered.cumsum(-1, dtype=torch.float64) - ordered
            lowest = ordered[before < p].min()
            row.mul_(row >= lowest)


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of ``tokens`` [n] under logits [n, vocabulary] and the ``counts[i]`` likeliest of each row.

    An entry depends on its own row and count alone; equally likely alternatives are ordered by token id.
    """
    normal = torch.log_softmax(logits, -1)
    chosen = normal.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (normal > chosen).sum(-1) + 1
    entries = zip(tokens, chosen[:, 0].tolist(), ranks.tolist(), _top_tokens(normal, counts), strict=True)
    return [TokenLogprobs(*entry) for entry in entries]


def _top_tokens(scores: torch.Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """The ``counts[i]`` highest scores of each row of [n, vocabulary] with their tokens, best first.

    Of ``topk`` only the values are used: which of equal scores it returns, and in what order, depends on the k of the
    call, and that is the largest count of the batch.
    """
    most = min(max(counts), scores.shape[-1])
    found: list[list[tuple[float, int]]] = [[] for _ in counts]
    if most:
        last = torch.tensor(counts, device=scores.device)[:, None].clamp(max=most) - 1
        lowest = scores.topk(most, dim=-1).values.gather(1, last.clamp(min=0))
        rows, tokens = ((scores >= lowest) & (last >= 0)).nonzero(as_tuple=True)
        for row, token, score in zip(rows.tolist(), tokens.tolist(), scores[rows, tokens].tolist(), strict=True):
            found[row].append((-score, token))
    return [
        tuple((token, -score) for score, token in sorted(of)[:count]) for of, count in zip(found, counts, strict=True)
    ]
