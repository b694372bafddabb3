"""A plan to its result: lay the rows out, call the model once, sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from engine.attention import attending, calls_made
from engine.attention.choice import make_attention
from engine.attention.views import View
from engine.flat import FlatRows, flatten, spans
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
        flat = self.flatten(plan.rows)
        kept = [row.sample if row.request.prompt_logprobs is None else _kept(row) for row in flat.rows]
        logits = self.forward(flat, torch.from_numpy(spans(flat.stops, np.array(kept, np.int64))))
        return _Reading(flat, kept, logits).result(self._eos)

    def flatten(self, rows: Sequence[Row]) -> FlatRows:
        """Rows as this model's store lays them out."""
        return flatten(rows, self._store.layout.block_size, self._store.blank)

    def logits(self, rows: Sequence[Row], keep: torch.Tensor) -> torch.Tensor:
        """``forward`` of rows that are in order already: single tokens first, longest context first."""
        return self.forward(self.flatten(rows), keep)

    def forward(self, flat: FlatRows, keep: torch.Tensor) -> torch.Tensor:
        """Logits [kept, vocabulary] at the flattened positions ``keep``; computes all rows' KV."""
        block_size = self._store.layout.block_size
        begun = flat.places[flat.positions % block_size == 0] // block_size
        if len(begun):
            self._store.clear(torch.from_numpy(begun).to(self._device))
        attention = make_attention(self._store, self._views, flat)
        nothing = keep.numel() == 0
        kept = (keep.new_zeros(1) if nothing else keep).to(self._device)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([flat.tokens], device=self._device),
            "position_ids": torch.from_numpy(flat.positions).to(self._device)[None],
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

    def __init__(self, flat: FlatRows, kept: Sequence[int], logits: torch.Tensor) -> None:
        self._rows = flat.rows
        self._order = flat.order
        self._stops = list(accumulate(kept))
        self._kept = kept
        self._logits = logits

    def result(self, eos: frozenset[int]) -> StepResult:
        failed = self._failed()
        prompts = {
            self._order[index]: _prompt_logprobs(row, self._logits[self._stops[index] - self._kept[index] :])
            for index, row in enumerate(self._rows)
            if row.request.prompt_logprobs is not None and _explained(row) and self._order[index] not in failed
        }
        drawing = [index for index, row in enumerate(self._rows) if row.sample]
        if failed:
            drawing = [index for index in drawing if self._order[index] not in failed]
        sampled, logprobs = self._draw(drawing, eos)
        return StepResult(sampled, logprobs, prompts, failed)

    def _failed(self) -> dict[int, str]:
        """Rows with logits that are no numbers."""
        if not len(self._logits):
            return {}
        highest = self._logits.amax(-1)
        if math.isfinite(highest.sum(dtype=torch.float64).item()):
            return {}
        finite = torch.isfinite(highest)
        bad = [
            index
            for index, (kept, stop) in enumerate(zip(self._kept, self._stops, strict=True))
            if not bool(finite[stop - kept : stop].all())
        ]
        return {self._order[index]: "the model's logits are not finite" for index in bad}

    def _draw(self, drawing: Sequence[int], eos: frozenset[int]) -> tuple[list[int | None], dict[int, TokenLogprobs]]:
        """Tokens of the rows ``drawing``, each from the last of its logits, and the log-probabilities asked for."""
        sampled: list[int | None] = [None] * len(self._rows)
        if not drawing:
            return sampled, {}
        rows = [self._rows[index] for index in drawing]
        last = [self._stops[index] - 1 for index in drawing]
        scores = self._logits if len(last) == len(self._logits) else self._logits[last]
        tokens = sample(rows, scores, eos)
        for index, token in zip(drawing, tokens, strict=True):
            sampled[self._order[index]] = token
        told = [at for at, row in enumerate(rows) if row.request.logprobs is not None]
        if not told:
            return sampled, {}
        counts = [rows[at].request.logprobs or 0 for at in told]
        entries = token_logprobs(scores[told].float(), [tokens[at] for at in told], counts)
        return sampled, {self._order[drawing[at]]: entry for at, entry in zip(told, entries, strict=True)}


def _explained(row: Row) -> bool:
    """Whether every position of the row needs logits."""
    return row.request.prompt_logprobs is not None and row.start < row.request.prompt_len - 1


def _kept(row: Row) -> int:
    """How many of the row's last positions need logits."""
    return row.end - row.start if _explained(row) else row.sample


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
