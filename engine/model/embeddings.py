"""Embeddings: hidden states after the model's last norm, pooled over a prompt, with the same bits in any chunking."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decant.engine.model.step_batch import FlatBatch, Ints, spans
from decant.engine.plan import Row
from decant.engine.request import EmbeddingParams, Pooling

NOT_FINITE = "the model's hidden states are not finite"
NONE_RETURNED = "the model returns no hidden states"


class EmbeddingRows:
    """Rows of a step that need hidden states, by their ``indexes`` in the batch.

    ``positions``: flattened positions that are needed, row after row.
    """

    def __init__(self, flat: FlatBatch, indexes: list[int]) -> None:
        self._flat = flat
        self._counts = np.zeros(len(flat.rows), np.int64)
        self._counts[indexes] = [_needed_tokens(flat.rows[index]) for index in indexes]
        self._indexes = [index for index in indexes if self._counts[index]]
        self.positions: Ints = spans(flat.stops, self._counts)

    def pool(self, hidden: torch.Tensor | None) -> tuple[dict[int, Any], dict[int, str]]:
        """``StepResult.pooled`` and ``failed``, from the last hidden states [T, size] of all tokens."""
        pooled: dict[int, Any] = {}
        failed: dict[int, str] = {}
        for index in self._indexes:
            row, place = self._flat.rows[index], int(self._flat.order[index])
            stop, count = int(self._flat.stops[index]), int(self._counts[index])
            if hidden is None:
                failed[place] = NONE_RETURNED
            elif _is_finite(result := _pool(row, hidden[stop - count : stop])):
                pooled[place] = result
            else:
                failed[place] = NOT_FINITE
        return pooled, failed


def _needed_tokens(row: Row) -> int:
    """Number of the row's last tokens whose hidden states its embedding needs."""
    embedding = row.request.embedding
    if embedding is None:
        return 0
    return row.end - row.start if embedding.pooling is Pooling.MEAN else int(row.end == row.request.prompt_len)


def _pool(row: Row, hidden: torch.Tensor) -> Any:
    embedding = row.request.embedding
    assert embedding is not None
    before = row.state.pooled if row.state is not None else None
    total = np.zeros(hidden.shape[1]) if before is None else before.copy()
    for values in hidden.double().numpy(force=True):  # one by one: the bits of a sum depend on its order
        total += values
    if row.end < row.request.prompt_len:
        return total
    return _finish(total if embedding.pooling is Pooling.LAST else total / row.request.prompt_len, embedding)


def _finish(values: npt.NDArray[np.float64], embedding: EmbeddingParams) -> bytes:
    values = values[: embedding.dimensions]
    if embedding.normalize and (length := math.sqrt(math.fsum(values * values))):
        values = values / length
    return values.astype("<f4").tobytes()


def _is_finite(pooled: Any) -> bool:
    return bool(np.isfinite(np.frombuffer(pooled, "<f4") if isinstance(pooled, bytes) else pooled).all())


class HiddenStates:
    """Last hidden states of a model of Hugging Face: what its part without the language head returns."""

    def __init__(self, model: torch.nn.Module) -> None:
        base: Any = getattr(model, "base_model", model)
        self._base: torch.nn.Module | None = None if base is model else base
        config: Any = getattr(model, "config", None)
        self.size: int = 0 if self._base is None else config.get_text_config().hidden_size
        self.last: torch.Tensor | None = None
        """[T, size] of the last step within ``captured``."""

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Keep the last hidden states of the steps in the block."""
        assert self._base is not None
        self.last = None
        hook = self._base.register_forward_hook(self._keep)
        try:
            yield
        finally:
            hook.remove()

    def _keep(self, module: object, arguments: object, output: Any) -> None:
        hidden = output.get("last_hidden_state") if isinstance(output, Mapping) else None
        if isinstance(hidden, torch.Tensor) and hidden.dim() == 3 and hidden.shape[2] == self.size:
            self.last = hidden[0]
