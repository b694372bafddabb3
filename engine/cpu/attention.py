"""Compiled attention over KV blocks in place (``engine/cpu/kernels/attention.h``).

A row has the same bits in any batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from decant.engine.cpu.threads import num_threads
from decant.engine.model.attention.interface import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, Ints, cut_before


class _Step(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("row_table", "table")],
        *[(name, ctypes.c_int64) for name in ("sequences", "width")],
    )


class _SelectedTokens(ctypes.Structure):
    _fields_ = (("indices", ctypes.c_void_p), ("count", ctypes.c_int64), ("step", _Step))


class _Call(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "sinks", "visible")],
        *[(f"{name}_{axis}", ctypes.c_int64) for name in ("query", "key", "value") for axis in ("token", "head")],
        ("heads", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("tokens", ctypes.c_int64),
    )


class NativeAttention:
    """Attention over a CPU's ``store`` in float32 or bfloat16. ``keep``: positions of needed logits; None: all."""

    def __init__(
        self,
        kernels: ModuleType,
        store: KvStore,
        layer_windows: Sequence[AttentionWindow],
        flat: FlatBatch,
        keep: Ints | None = None,
    ) -> None:
        self._kernels = kernels
        self._store = store
        self._layer_windows = layer_windows
        self._visible: dict[int, torch.Tensor] = {}  # one for all layers with the same window, by its id()
        self._flat = flat  # keeps the arrays that the step points into
        self._steps = [self._make_step(flat.row_table, group) for group in range(len(flat.table))]
        self._selected: _SelectedTokens | None = None
        if keep is not None and len(keep) < len(flat.tokens):
            self._late = row_table, indices = cut_before(flat, keep)
            late = self._make_step(row_table, store.layout.group_of[-1])
            self._selected = _SelectedTokens(indices.ctypes.data, len(indices), late)

    def _make_step(self, row_table: Ints, group: int) -> _Step:
        table = self._flat.table[group]
        return _Step(row_table.ctypes.data, table.ctypes.data, *table.shape)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self._check(call)
        dtype = self._store.dtype
        query, key, value = (
            _with_contiguous_heads(call.query),
            _with_contiguous_heads(call.key, dtype),
            _with_contiguous_heads(call.value, dtype),
        )
        _, heads, tokens, _ = query.shape
        out = query.new_empty(1, tokens, heads, value.shape[3])
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        cache, visible, _, step = self.addresses(call.layer)
        arguments = _Call(
            *(tensor.data_ptr() for tensor in (query, key, value, out)),
            None if sinks is None else sinks.data_ptr(),
            visible,
            *query.stride()[2:0:-1],
            *key.stride()[2:0:-1],
            *value.stride()[2:0:-1],
            heads,
            call.scaling,
            call.softcap or 0.0,
            tokens,
        )
        self._kernels.attend(
            dtype == torch.bfloat16,
            query.dtype == torch.bfloat16,
            *(cache, step, ctypes.addressof(arguments)),
            num_threads(),
        )
        return out

    def _check(self, call: AttentionCall) -> None:
        spec, tokens = self._store.layout.layers[call.layer], len(self._flat.tokens)
        heads = call.query.shape[1]
        _check_shape("query", call.query, (1, heads, tokens, spec.key_dim))
        _check_shape("key", call.key, (1, spec.kv_heads, tokens, spec.key_dim))
        _check_shape("value", call.value, (1, spec.kv_heads, tokens, spec.value_dim))
        if not heads or heads % spec.kv_heads:
            raise ValueError(f"query: a multiple of {spec.kv_heads} heads, got {heads}")
        if call.query.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"query: bfloat16 or float32, got {call.query.dtype}")
        if call.sinks is not None:
            _check_shape("sinks", call.sinks, (heads,))

    def addresses(self, layer: int) -> tuple[int, int, int, int]:
        """Addresses of a layer's blocks, first visible positions, selected tokens (0: all), and the step.

        Only the last layer's output is needed for selected tokens alone.
        """
        is_last = layer == len(self._layer_windows) - 1
        selected = ctypes.addressof(self._selected) if self._selected is not None and is_last else 0
        step = ctypes.addressof(self._steps[self._store.layout.group_of[layer]])
        return self._store.layer_descriptors[layer], self._first_visible(self._layer_windows[layer]), selected, step

    def _first_visible(self, view: AttentionWindow) -> int:
        if (visible := self._visible.get(id(view))) is None:
            visible = view.first(torch.from_numpy(self._flat.positions)).contiguous()
            self._visible[id(view)] = visible
        return visible.data_ptr()


def _check_shape(name: str, part: Any, shape: tuple[int, ...]) -> None:
    if part.shape != shape:
        raise ValueError(f"{name}: shape {shape}, got {tuple(part.shape)}")


def _with_contiguous_heads(part: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    converted: torch.Tensor = part if dtype is None or part.dtype == dtype else part.to(dtype)
    return converted if converted.stride(3) == 1 else converted.contiguous()
