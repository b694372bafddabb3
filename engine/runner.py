"""A plan to its result: lay the rows out, call the model once, sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.attention import attending, calls_made
from engine.attention.paged import PagedAttention, make_bands
from engine.attention.views import View
from engine.kv_store import KvStore
from engine.plan import Row, StepPlan, StepResult, TokenLogprobs
from engine.sampler import sample, token_logprobs

LOGPROB_ROWS = 64
"""Prompt positions whose log-probabilities are made at once (rows x vocabulary x float32)."""


class ModelRunner:
    """A transformers causal model over a store. ``views[i]`` is what layer i may see."""

    def __init__(self, model: torch.nn.Module, store: KvStore, views: Sequence[View], eos: frozenset[int]) -> None:
        self._model = model
        self._store = store
        self._views = views
        self._eos = eos
        self._device = store.blocks.device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One pass of the model over all rows of the plan."""
        order = sorted(range(len(plan.rows)), key=lambda index: _band_key(plan.rows[index]))
        rows = [plan.rows[index] for index in order]
        spans = _kept_spans(rows)
        logits = self.logits(rows, torch.cat([torch.arange(*span) for span in spans]))
        return _Reading(rows, order, spans, logits).result(self._eos)

    def logits(self, rows: Sequence[Row], keep: torch.Tensor) -> torch.Tensor:
        """Logits [kept, vocabulary] at the flattened positions ``keep``; computes all rows' KV.

        Rows must come in band order: single tokens first, longest context first.
        """
        block_size = self._store.layout.block_size
        tokens, positions, places = (part.to(self._device) for part in _flatten(rows, block_size))
        self._store.clear(places[positions % block_size == 0] // block_size)
        bands = make_bands(rows, self._store)
        attention = PagedAttention(self._store, self._views, bands, (places // block_size, places % block_size))
        nothing = keep.numel() == 0
        kept = (keep.new_zeros(1) if nothing else keep).to(self._device)
        inputs: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "use_cache": False,
            "logits_to_keep": kept,
        }
        with attending(attention):
            logits: torch.Tensor = self._model(**inputs).logits[0]
            if calls_made() != len(self._views):
                raise RuntimeError(f"attention was called {calls_made()} times for {len(self._views)} layers")
        if len(logits) != len(kept):  # a model that swallows the option answers with all rows
            logits = logits[kept]
        return logits[:0] if nothing else logits


class _Reading:
    """The logits of a step, read row by row; results stand under the row's place in the plan."""

    def __init__(
        self,
        rows: Sequence[Row],
        order: Sequence[int],
        spans: Sequence[tuple[int, int]],
        logits: torch.Tensor,
    ) -> None:
        self._rows = rows
        self._order = order
        self._ends = np.cumsum([stop - start for start, stop in spans]).tolist()
        self._logits = logits
        self._finite = torch.isfinite(logits.amax(-1)).tolist() if len(logits) else []

    def result(self, eos: frozenset[int]) -> StepResult:
        failed: dict[int, str] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        drawing: list[int] = []
        start = 0
        for index, (row, end) in enumerate(zip(self._rows, self._ends, strict=True)):
            if not all(self._finite[start:end]):
                failed[self._order[index]] = "the model's logits are not finite"
            else:
                if _explained(row):
                    prompts[self._order[index]] = _prompt_logprobs(row, self._logits[start:end])
                if row.sample:
                    drawing.append(index)
            start = end
        sampled, logprobs = self._draw(drawing, eos)
        return StepResult(sampled, logprobs, prompts, failed)

    def _draw(self, drawing: Sequence[int], eos: frozenset[int]) -> tuple[list[int | None], dict[int, TokenLogprobs]]:
        """Tokens of the rows ``drawing``, each from the last of its logits, and the log-probabilities asked for."""
        sampled: list[int | None] = [None] * len(self._rows)
        if not drawing:
            return sampled, {}
        rows = [self._rows[index] for index in drawing]
        scores = self._logits[[self._ends[index] - 1 for index in drawing]].float()
        tokens = sample(rows, scores, eos)
        for index, token in zip(drawing, tokens, strict=True):
            sampled[self._order[index]] = token
        told = [at for at, row in enumerate(rows) if row.request.logprobs is not None]
        if not told:
            return sampled, {}
        counts = [rows[at].request.logprobs or 0 for at in told]
        entries = token_logprobs(scores[told], [tokens[at] for at in told], counts)
        return sampled, {self._order[drawing[at]]: entry for at, entry in zip(told, entries, strict=True)}


def _band_key(row: Row) -> tuple[bool, int]:
    """Single tokens first, longest context first."""
    return (row.end - row.start > 1, -row.end)


def _explained(row: Row) -> bool:
    """Whether every position of the row needs logits."""
    return row.request.prompt_logprobs is not None and row.start < row.request.prompt_len - 1


def _kept_spans(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """For each row, the flattened positions whose logits are read; a span may be empty."""
    spans, at = [], 0
    for row in rows:
        at += row.end - row.start
        count = row.end - row.start if _explained(row) else int(row.sample)
        spans.append((at - count, at))
    return spans


def _flatten(rows: Sequence[Row], block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions and places (block * block_size + slot) of all rows' tokens, [T] each."""
    tokens: list[int] = []
    counts = np.fromiter((row.end - row.start for row in rows), np.int64, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    for row in rows:
        tokens.extend(row.tokens[row.start : row.end])
    before = np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.repeat(starts, counts) + np.arange(len(tokens)) - before
    first = starts // block_size
    tables = [
        np.frombuffer(row.blocks, np.int32)[a : -(-row.end // block_size)] for row, a in zip(rows, first, strict=True)
    ]
    offsets = np.cumsum([0] + [len(table) for table in tables[:-1]])
    index = np.repeat(offsets - first, counts) + positions // block_size
    places = np.concatenate(tables).astype(np.int64)[index] * block_size + positions % block_size
    return torch.tensor(tokens), torch.from_numpy(positions), torch.from_numpy(places)


def _prompt_logprobs(row: Row, logits: torch.Tensor) -> list[TokenLogprobs]:
    """Of the prompt tokens at positions start + 1 .. end, a slice of positions at a time."""
    last = min(row.end, row.request.prompt_len - 1)
    targets = row.tokens[row.start + 1 : last + 1]
    count = row.request.prompt_logprobs or 0
    entries: list[TokenLogprobs] = []
    for at in range(0, len(targets), LOGPROB_ROWS):
        piece = targets[at : at + LOGPROB_ROWS]
        entries += token_logprobs(logits[at : at + len(piece)].float(), piece, [count] * len(piece))
    return entries
