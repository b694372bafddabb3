"""Tokens and log-probabilities of a step, read by the host in one wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from decant.engine.cuda.graphs import StepOutput
from decant.engine.cuda.sampler import TritonSampler
from decant.engine.cuda.staging import Array, Download, Staging
from decant.engine.model.runner import LOGPROB_ROWS, NOT_FINITE, StepLogits, invalid_rows
from decant.engine.plan import Row, StepResult, TokenLogprobs

_LOW = 0xFFFFFFFF


class _Logprobs(NamedTuple):
    """Log-probabilities of the plan's row ``row``: ``part`` of each of its ``_FIELDS``, downloads from ``first`` on."""

    row: int
    most: int
    is_prompt: bool
    first: int
    part: slice


class StepDraw:
    """Draw of a step. ``drawn`` [rows of the plan or more], on the device, gets the tokens by index in the plan."""

    def __init__(
        self,
        step: StepLogits,
        output: StepOutput,
        eos: frozenset[int],
        drawn: torch.Tensor,
        staging: Staging,
        sampler: TritonSampler,
    ) -> None:
        self._step = step
        self._staging = staging
        self._downloads: list[torch.Tensor] = []
        self._logprobs: list[_Logprobs] = []
        self._downloads.append(output.finite)
        if len(step.drawing):
            self._draw(output.logits, output.likeliest, eos, drawn, sampler)
        for at in step.prompt_rows:
            self._launch_prompt(at, output.logits)
        self._download = Download(self._downloads)

    def _draw(
        self,
        logits: torch.Tensor,
        likeliest: torch.Tensor,
        eos: frozenset[int],
        drawn: torch.Tensor,
        sampler: TritonSampler,
    ) -> None:
        step = self._step
        rows = [step.rows[at] for at in step.drawing.tolist()]
        others = np.array([at for at, row in enumerate(rows) if not row.request.is_plain_greedy], np.int64)
        with_logprobs = np.array([at for at, row in enumerate(rows) if row.request.logprobs is not None], np.int64)
        places = step.order[step.drawing]
        if len(others) or len(with_logprobs) or len(step.drawing) < len(step.keep):
            last = (np.cumsum(step.kept) - 1)[step.drawing]
            places_of, last_of, others_of = self._staging.upload(places, last, others)
            tokens = likeliest.index_select(0, last_of)
        else:  # each row of the logits draws
            (places_of,), tokens = self._staging.upload(places), likeliest
        if len(others):
            chosen = [rows[at] for at in others.tolist()]
            tokens[others_of] = sampler.launch(chosen, logits[last_of[others_of]].float(), eos, self._staging)
        drawn.index_copy_(0, places_of, tokens)
        self._downloads.append(tokens)
        for begin in range(0, len(with_logprobs), LOGPROB_ROWS):
            piece = with_logprobs[begin : begin + LOGPROB_ROWS]
            (which,) = self._staging.upload(piece)
            counts = [rows[at].request.logprobs or 0 for at in piece.tolist()]
            indexes = step.order[step.drawing][piece].tolist()
            first = len(self._downloads)
            self._downloads.extend(logprobs_of(logits[last_of[which]].float(), tokens[which], max(counts)))
            for at, (index, count) in enumerate(zip(indexes, counts, strict=True)):
                self._logprobs.append(_Logprobs(index, count, False, first, slice(at, at + 1)))

    def _launch_prompt(self, at: int, logits: torch.Tensor) -> None:
        step = self._step
        row: Row = step.rows[at]
        stop = int(step.kept[: at + 1].sum())
        first = stop - int(step.kept[at])
        targets = np.array(row.tokens[row.first_logprob : min(row.end, row.request.prompt_len - 1) + 1], np.int64)
        count = row.request.prompt_logprobs or 0
        (tokens,) = self._staging.upload(targets)
        for begin in range(0, len(targets), LOGPROB_ROWS):
            piece = tokens[begin : begin + LOGPROB_ROWS]
            place = len(self._downloads)
            self._downloads.extend(logprobs_of(logits[first + begin :][: len(piece)].float(), piece, count))
            self._logprobs.append(_Logprobs(int(step.order[at]), count, True, place, slice(0, len(piece))))

    def result(self) -> StepResult:
        arrays, step = self._download.wait(), self._step
        finite = arrays[0].astype(bool)
        invalid = set() if finite.all() else invalid_rows(step.kept, finite)
        failed = {int(step.order[at]) for at in invalid}
        sampled: list[int | None] = [None] * len(step.rows)
        if len(step.drawing):
            for index, token in zip(step.order[step.drawing].tolist(), arrays[1].tolist(), strict=True):
                sampled[index] = None if index in failed else token
        logprobs: dict[int, TokenLogprobs] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        for part in self._logprobs:
            if part.row in failed:
                continue
            entries = _entries([array[part.part] for array in arrays[part.first :][: len(_FIELDS)]], part.most)
            if part.is_prompt:
                prompts.setdefault(part.row, []).extend(entries)
            else:
                logprobs[part.row] = entries[0]
        return StepResult(sampled, logprobs, prompts, dict.fromkeys(sorted(failed), NOT_FINITE))


_FIELDS = ("token", "logprob", "rank", "alternatives", "their logprobs")


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """``_FIELDS`` of ``tokens`` [n] under logits [n, vocabulary], with ``most`` alternatives each, best first.

    One integer holds likelihood and token id of an alternative, so none are equal.
    """
    normal = torch.log_softmax(logits, -1) + 0.0  # no negative zero
    chosen = normal.gather(1, tokens[:, None])
    ranks = (normal > chosen).sum(-1) + 1
    bits = normal.view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(normal.shape[1], device=normal.device)
    keys = (order << 32) | (_LOW - ids)
    top = keys.topk(min(most, normal.shape[1]), dim=-1).values
    alternatives = _LOW - (top & _LOW)
    return tokens, chosen[:, 0], ranks, alternatives, normal.gather(1, alternatives)


def _entries(arrays: Sequence[Array], count: int) -> list[TokenLogprobs]:
    columns = [array.tolist() for array in arrays]
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(alternatives[:count], their, strict=False)))
        for token, logprob, rank, alternatives, their in zip(*columns, strict=True)
    ]
