from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.model.adapters import NO_ADAPTERS, ModelAdapters
from decant.engine.model.attention.interface import AttentionBackend, attending, calls_made
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.embeddings import EmbeddingRows, HiddenStates
from decant.engine.model.kv_store import KvStore
from decant.engine.model.sampler import Sampler, token_logprobs
from decant.engine.model.step_batch import FlatBatch, Ints, spans
from decant.engine.plan import Row, StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from decant.engine.model.backend import Backend

LOGPROB_ROWS = 64

NOT_FINITE = "the model's logits are not finite"


class ModelRunner:
    """Runs a step's plan on a model of Hugging Face: flattens the rows, calls the model once, and samples.

    It owns no state between steps: the KV is in the ``KvStore``, and sampling draws from the request's seed and
    position. The engine calls it through ``ModelDevice``, and the probe for its trial. Backends replace parts of it.
    """

    overlaps_steps = False
    adapters: ModelAdapters = NO_ADAPTERS

    def __init__(
        self,
        model: torch.nn.Module,
        store: KvStore,
        layer_windows: Sequence[AttentionWindow],
        eos: frozenset[int],
        backend: Backend,
    ) -> None:
        self._model = model
        self._store = store
        self._layer_windows = layer_windows
        self._eos = eos
        self._backend = backend
        self._device = store.blocks.device
        self._hidden = HiddenStates(model)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        flat = self.flatten(plan.rows)
        step = StepLogits(flat, self._backend.sampler)
        with self._backend.around_step():
            if step.embedding_rows:
                return self._run_with_embeddings(flat, step)
            logits = self.forward(flat, step.keep)
            return step.result(logits, self._eos)

    def _run_with_embeddings(self, flat: FlatBatch, step: StepLogits) -> StepResult:
        rows = EmbeddingRows(flat, step.embedding_rows)
        with self._hidden.captured():
            logits = self.forward(flat, step.keep, np.union1d(step.keep, rows.positions))
        result = step.result(logits, self._eos)
        pooled, failed = rows.pool(self._hidden.last)
        self._hidden.last = None
        return replace(result.without_tokens(failed), pooled=pooled)

    @property
    def embedding_size(self) -> int:
        """Values of an embedding; 0: none are returned."""
        return self._hidden.size

    @property
    def layer_windows(self) -> Sequence[AttentionWindow]:
        return self._layer_windows

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self.run, plan)

    def flatten(self, rows: Sequence[Row]) -> FlatBatch:
        return self._backend.flatten(rows, self._store.layout.block_size, self._store.null_block)

    def logits(self, rows: Sequence[Row], keep: Ints) -> torch.Tensor:
        """Logits [kept, vocabulary] in the order of ``FlatBatch``, not of ``rows``."""
        return self.forward(self.flatten(rows), keep)

    def forward(self, flat: FlatBatch, keep: Ints, attended: Ints | None = None) -> torch.Tensor:
        """Compute the KV of all rows; return logits [kept, vocabulary] of the flattened positions ``keep``.

        ``attended``: positions whose last hidden states are needed; None: ``keep``.
        """
        self._store.clear(flat.new_blocks)
        backend, arrays = self._backend, (flat.tokens, flat.positions, keep)
        tokens, positions, kept = (torch.from_numpy(array).to(self._device) for array in arrays)
        with backend.around_step(), self.adapters.applied(flat):
            needed = keep if attended is None else attended
            attention = backend.make_attention(self._store, self._layer_windows, flat, needed)
            return self.compute(tokens, positions, kept, attention)

    def compute(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """Token ids [T], positions [T], kept positions [k] -> logits [k, vocabulary]."""
        inputs: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "use_cache": False,
            "logits_to_keep": keep,
        }
        with attending(attention):
            logits: torch.Tensor = self._model(**inputs).logits[0]
            if calls_made() != len(self._layer_windows):
                raise RuntimeError(f"attention was called {calls_made()} times for {len(self._layer_windows)} layers")
        return logits if len(logits) == len(keep) else logits[keep]  # a model without the option returns all rows


class StepLogits:
    """Which logits of a step are needed.

    keep [kept]     flattened positions: the last one of each sampled row, those that return prompt logprobs
    kept            how many of its last positions each row needs
    embedding_rows  indexes of the rows of requests for an embedding
    """

    def __init__(self, flat: FlatBatch, sampler: Sampler) -> None:
        self._sampler = sampler
        self.rows = flat.rows
        self.order = flat.order
        self.drawing = np.flatnonzero(flat.sampled)
        self.beyond_greedy = [index for index, row in enumerate(flat.rows) if not row.request.needs_tokens_only]
        self.prompt_rows = [index for index in self.beyond_greedy if flat.rows[index].has_prompt_logprobs]
        self.embedding_rows = [index for index in self.beyond_greedy if flat.rows[index].request.embedding is not None]
        self.kept = flat.sampled
        if self.prompt_rows:
            self.kept = flat.sampled.copy()
            self.kept[self.prompt_rows] = [
                row.end - row.first_logprob + 1 for row in map(flat.rows.__getitem__, self.prompt_rows)
            ]
            self.keep = spans(flat.stops, self.kept)
        else:
            self.keep = flat.stops[self.drawing] - 1

    def result(self, logits: torch.Tensor, eos: frozenset[int]) -> StepResult:
        best = self._sampler.top_tokens(logits)
        invalid = set() if best.finite else invalid_rows(self.kept, best.scores.isfinite().numpy(force=True))
        prompts = {
            int(self.order[index]): _prompt_logprobs(self.rows[index], logits[self._span(index)])
            for index in self.prompt_rows
            if index not in invalid
        }
        drawing = self.drawing
        if invalid:
            drawing = np.array([index for index in drawing.tolist() if index not in invalid], np.int64)
        sampled, logprobs = self._draw(drawing, logits, best.tokens, eos)
        failed = dict.fromkeys(self.order[list(invalid)].tolist(), NOT_FINITE) if invalid else {}
        return StepResult(sampled, logprobs, prompts, failed)

    def _span(self, index: int) -> slice:
        stop = int(self.kept[: index + 1].sum())
        return slice(stop - int(self.kept[index]), stop)

    def _draw(
        self, drawing: Ints, logits: torch.Tensor, greedy: torch.Tensor, eos: frozenset[int]
    ) -> tuple[list[int | None], dict[int, TokenLogprobs]]:
        sampled: list[int | None] = [None] * len(self.rows)
        if not len(drawing):
            return sampled, {}
        rows = self.rows if len(drawing) == len(self.rows) else [self.rows[index] for index in drawing.tolist()]
        if len(drawing) < len(logits):
            last = torch.from_numpy((np.cumsum(self.kept) - 1)[drawing]).to(logits.device)
            logits, greedy = logits[last], greedy[last]
        tokens: list[int] = self._sampler.sample(rows, logits, eos, greedy) if self.beyond_greedy else greedy.tolist()
        indexes: list[int] = self.order[drawing].tolist()
        for index, token in zip(indexes, tokens, strict=True):
            sampled[index] = token
        with_logprobs = (
            [at for at, row in enumerate(rows) if row.request.logprobs is not None] if self.beyond_greedy else []
        )
        if not with_logprobs:
            return sampled, {}
        counts = [rows[at].request.logprobs or 0 for at in with_logprobs]
        entries = token_logprobs(logits[with_logprobs].float(), [tokens[at] for at in with_logprobs], counts)
        return sampled, dict(zip([indexes[at] for at in with_logprobs], entries, strict=True))


def invalid_rows(kept: Ints, finite: npt.NDArray[np.bool_]) -> set[int]:
    return set(np.repeat(np.arange(len(kept)), kept)[~finite].tolist())


def _prompt_logprobs(row: Row, logits: torch.Tensor) -> list[TokenLogprobs]:
    last = min(row.end, row.request.prompt_len - 1)
    targets = row.tokens[row.first_logprob : last + 1]
    count = row.request.prompt_logprobs or 0
    entries: list[TokenLogprobs] = []
    for at in range(0, len(targets), LOGPROB_ROWS):
        piece = targets[at : at + LOGPROB_ROWS]
        entries += token_logprobs(logits[at : at + len(piece)].float(), piece, [count] * len(piece))
    return entries
