"""A plan to its result: lay the rows out, call the model once, sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.cpu.threads import one_for_torch
from decant.engine.model.attention import attending, calls_made
from decant.engine.model.attention.choice import make_attention
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.sampler import highest, sample, token_logprobs
from decant.engine.model.step_batch import FlatBatch, Ints, flatten, spans
from decant.engine.plan import Row, StepPlan, StepResult, TokenLogprobs

LOGPROB_ROWS = 64
"""Prompt positions whose log-probabilities are made at once (rows x vocabulary x float32)."""


class ModelRunner:
    """A transformers causal model over a store. ``views[i]`` is what layer i may see."""

    def __init__(
        self, model: torch.nn.Module, store: KvStore, views: Sequence[AttentionWindow], eos: frozenset[int]
    ) -> None:
        self._model = model
        self._store = store
        self._views = views
        self._eos = eos
        self._device = store.blocks.device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One pass of the model over all rows of the plan."""
        flat = self.flatten(plan.rows)
        reading = _StepLogits(flat)
        with one_for_torch():
            logits = self.forward(flat, reading.keep)
            return reading.result(logits, self._eos)

    def flatten(self, rows: Sequence[Row]) -> FlatBatch:
        """Rows as this model's store lays them out."""
        return flatten(rows, self._store.layout.block_size, self._store.blank)

    def logits(self, rows: Sequence[Row], keep: Ints) -> torch.Tensor:
        """``forward`` of rows that are in order already: single tokens first, longest context first."""
        return self.forward(self.flatten(rows), keep)

    def forward(self, flat: FlatBatch, keep: Ints) -> torch.Tensor:
        """Logits [kept, vocabulary] at the flattened positions ``keep``; computes all rows' KV."""
        self._store.clear(flat.begun)
        attention = make_attention(self._store, self._views, flat, keep)
        kept = torch.from_numpy(keep).to(self._device)
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(flat.tokens).to(self._device)[None],
            "position_ids": torch.from_numpy(flat.positions).to(self._device)[None],
            "use_cache": False,
            "logits_to_keep": kept,
        }
        with attending(attention), one_for_torch():
            logits: torch.Tensor = self._model(**inputs).logits[0]
            if calls_made() != len(self._views):
                raise RuntimeError(f"attention was called {calls_made()} times for {len(self._views)} layers")
        if len(logits) != len(kept):  # a model that swallows the option answers with all rows
            logits = logits[kept]
        return logits


class _StepLogits:
    """Which logits of a step are needed, and what is read from them; results stand under the row's place in the plan.

    keep [kept]  flattened positions: the last one of each row that is sampled, all of a row that is explained
    """

    def __init__(self, flat: FlatBatch) -> None:
        self._rows = flat.rows
        self._order = flat.order
        self._drawing = np.flatnonzero(flat.sampled)
        self._special = [index for index, row in enumerate(flat.rows) if not row.request.tokens_only]
        self._explained = [index for index in self._special if _is_explained(flat.rows[index])]
        self._kept = flat.sampled  # of how many of its last positions each row needs them
        if self._explained:
            self._kept = flat.sampled.copy()
            self._kept[self._explained] = (flat.ends - flat.starts)[self._explained]
            self.keep = spans(flat.stops, self._kept)
        else:
            self.keep = flat.stops[self._drawing] - 1

    def result(self, logits: torch.Tensor, eos: frozenset[int]) -> StepResult:
        """Of the logits of all that is kept."""
        best = highest(logits)
        bad = set() if best.finite else self._bad(best.scores.isfinite().numpy(force=True))
        prompts = {
            int(self._order[index]): _prompt_logprobs(self._rows[index], logits[self._span(index)])
            for index in self._explained
            if index not in bad
        }
        drawing = self._drawing
        if bad:
            drawing = np.array([index for index in drawing.tolist() if index not in bad], np.int64)
        sampled, logprobs = self._draw(drawing, logits, best.places, eos)
        failed = dict.fromkeys(self._order[list(bad)].tolist(), "the model's logits are not finite") if bad else {}
        return StepResult(sampled, logprobs, prompts, failed)

    def _span(self, index: int) -> slice:
        """Where the logits of a row are among those that are kept."""
        stop = int(self._kept[: index + 1].sum())
        return slice(stop - int(self._kept[index]), stop)

    def _bad(self, sound: npt.NDArray[np.bool_]) -> set[int]:
        """Rows with logits that are no numbers."""
        owners = np.repeat(np.arange(len(self._rows)), self._kept)
        return set(owners[~sound].tolist())

    def _draw(
        self, drawing: Ints, logits: torch.Tensor, likeliest: torch.Tensor, eos: frozenset[int]
    ) -> tuple[list[int | None], dict[int, TokenLogprobs]]:
        """Tokens of the rows ``drawing``, each from the last of its logits, and the log-probabilities asked for."""
        sampled: list[int | None] = [None] * len(self._rows)
        if not len(drawing):
            return sampled, {}
        rows = self._rows if len(drawing) == len(self._rows) else [self._rows[index] for index in drawing.tolist()]
        if len(drawing) < len(logits):
            last = torch.from_numpy((np.cumsum(self._kept) - 1)[drawing]).to(logits.device)
            logits, likeliest = logits[last], likeliest[last]
        tokens: list[int] = sample(rows, logits, eos, likeliest) if self._special else likeliest.tolist()
        places: list[int] = self._order[drawing].tolist()
        for place, token in zip(places, tokens, strict=True):
            sampled[place] = token
        told = [at for at, row in enumerate(rows) if row.request.logprobs is not None] if self._special else []
        if not told:
            return sampled, {}
        counts = [rows[at].request.logprobs or 0 for at in told]
        entries = token_logprobs(logits[told].float(), [tokens[at] for at in told], counts)
        return sampled, dict(zip([places[at] for at in told], entries, strict=True))


def _is_explained(row: Row) -> bool:
    """Whether a row computes logits of prompt tokens that somebody asked for."""
    return row.request.prompt_logprobs is not None and row.start < row.request.prompt_len - 1


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
