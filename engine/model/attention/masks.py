"""The window of each layer, found by calling transformers' mask functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface

from decant.engine.errors import ModelRefused
from decant.engine.kv_layout import LayerSpec, Window, WindowKind
from decant.engine.model.attention.interface import NAME, AttentionCall

MaskFunction = Callable[..., torch.Tensor]
"""(batch, head, query position, key position) -> visible."""


@dataclass(frozen=True, slots=True)
class AttentionWindow(Window):
    def first(self, positions: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case WindowKind.FULL:
                return torch.zeros_like(positions)
            case WindowKind.SLIDING:
                return (positions - self.size + 1).clamp(min=0)
            case WindowKind.CHUNKED:
                return positions // self.size * self.size


def fit(visible: MaskFunction, context_length: int) -> AttentionWindow | None:
    last = torch.tensor(context_length - 1)
    queries = torch.unique(torch.linspace(0, context_length - 1, 64).long().clamp(max=context_length - 1))
    keys = torch.arange(context_length)
    seen = torch.stack([_row(visible, query, keys) for query in queries])
    first = int(_row(visible, last, keys).int().argmax())
    for view in _candidates(context_length, first, seen, queries):
        expected = (keys >= view.first(queries)[:, None]) & (keys <= queries[:, None])
        if torch.equal(seen, expected):
            return view
    return None


def _candidates(
    context_length: int, first: int, seen: torch.Tensor, queries: torch.Tensor
) -> Iterator[AttentionWindow]:
    yield AttentionWindow()
    yield AttentionWindow(WindowKind.SLIDING, context_length - first)
    starts = {int(row.int().argmax()) for row in seen} - {0}
    if starts:
        yield AttentionWindow(WindowKind.CHUNKED, min(starts) if len(starts) == 1 else _step(sorted(starts)))


def _step(starts: list[int]) -> int:
    size = starts[0]
    for start in starts[1:]:
        size = int(torch.gcd(torch.tensor(size), torch.tensor(start)))
    return size


def _row(visible: MaskFunction, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    zero = torch.tensor(0)
    answer = torch.as_tensor(visible(zero, zero, query, keys))
    return answer.bool().expand(keys.shape)


@contextmanager
def mask_markers() -> Iterator[dict[int, MaskFunction]]:
    """Give models with attention ``NAME`` marker tensors as masks; yield marker id -> mask function."""
    markers: dict[int, MaskFunction] = {}
    kept: list[torch.Tensor] = []

    def mark(*_: Any, mask_function: MaskFunction, **__: Any) -> torch.Tensor:
        kept.append(torch.zeros(1, 1, 1, 1))
        markers[id(kept[-1])] = mask_function
        return kept[-1]

    AttentionMaskInterface.register(NAME, mark)
    try:
        yield markers
    finally:
        del AttentionMaskInterface._global_mapping[NAME]


class Recorder:
    def __init__(self, model: str, markers: dict[int, MaskFunction], context_length: int) -> None:
        self.layer_windows: list[AttentionWindow] = []
        self.specs: list[LayerSpec] = []
        self._model = model
        self._markers = markers
        self._context_length = context_length
        self._fitted: dict[int, AttentionWindow] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        function = self._markers.get(id(call.mask))
        if function is None:
            raise ModelRefused(self._model, f"layer {call.layer} does not take its mask from transformers' functions")
        if id(function) not in self._fitted:
            view = fit(function, self._context_length)
            if view is None:
                raise ModelRefused(self._model, f"layer {call.layer} sees neither all, nor a window, nor a chunk")
            self._fitted[id(function)] = view
        view = self._fitted[id(function)]
        self.layer_windows.append(view)
        window = Window(view.kind, view.size)
        self.specs.append(LayerSpec(call.key.shape[1], call.key.shape[3], call.value.shape[3], window))
        _, heads, tokens, _ = call.query.shape
        return call.query.new_zeros(1, tokens, heads, call.value.shape[3])
