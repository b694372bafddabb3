"""Compiled attention over blocks in place: the same bits for a row in any batch (``engine/cpu/kernels/attention.h``).

Nothing is gathered and no scores are kept: a sequence's keys are read once for the rows that share them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from decant.engine.cpu.threads import team
from decant.engine.model.attention import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, Ints, cut_before


class _Step(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("lines", "table")],
        *[(name, ctypes.c_int64) for name in ("sequences", "width")],
    )


class _Asked(ctypes.Structure):
    _fields_ = (("places", ctypes.c_void_p), ("count", ctypes.c_int64), ("step", _Step))


class _Call(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "sinks", "visible")],
        *[(f"{name}_{apart}", ctypes.c_int64) for name in ("query", "key", "value") for apart in ("token", "head")],
        ("heads", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("tokens", ctypes.c_int64),
    )


class NativeAttention:
    """What a step makes current: writes the step's keys and values to their blocks, then attends over them.

    For a store on the CPU, in float32 or bfloat16. Without ``keep`` all of the step's logits are needed.
    """

    def __init__(
        self,
        kernels: ModuleType,
        store: KvStore,
        views: Sequence[AttentionWindow],
        flat: FlatBatch,
        keep: Ints | None = None,
    ) -> None:
        self._kernels = kernels
        self._store = store
        self._views = views
        self._visible: dict[int, torch.Tensor] = {}  # for all layers of a view, by what Python calls it
        self._flat = flat  # the step points into its arrays
        self._step = _Step(flat.row_table.ctypes.data, flat.table.ctypes.data, *flat.table.shape)
        self.step = ctypes.addressof(self._step)
        self._asked: _Asked | None = None
        if keep is not None and len(keep) < len(flat.tokens):
            self._late = lines, places = cut_before(flat, keep)
            late = _Step(lines.ctypes.data, flat.table.ctypes.data, *flat.table.shape)
            self._asked = _Asked(places.ctypes.data, len(places), late)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """-> [1, T, heads, value dim], of the query's dtype. Raises ValueError where the call does not fit the step or
        the store."""
        self._check(call)
        dtype = self._store.dtype
        query, key, value = _side_by_side(call.query), _side_by_side(call.key, dtype), _side_by_side(call.value, dtype)
        _, heads, tokens, _ = query.shape
        out = query.new_empty(1, tokens, heads, value.shape[3])
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        cache, visible, _ = self.addresses(call.layer)
        said = _Call(
            *(part.data_ptr() for part in (query, key, value, out)),
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
            *(cache, self.step, ctypes.addressof(said)),
            team(),
        )
        return out

    def _check(self, call: AttentionCall) -> None:
        """The kernel reads as many numbers as the step's tokens and the store's heads have."""
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

    def addresses(self, layer: int) -> tuple[int, int, int]:
        """Of what is a layer's own: its part of the blocks, what each token sees first, and which tokens its answer is
        needed of (0: all). Nobody attends to what the last layer answers."""
        asked = 0 if self._asked is None or layer < len(self._views) - 1 else ctypes.addressof(self._asked)
        return self._store.layer_descriptors[layer], self._first_visible(self._views[layer]), asked

    def _first_visible(self, view: AttentionWindow) -> int:
        if (known := self._visible.get(id(view))) is None:
            known = view.first(torch.from_numpy(self._flat.positions)).contiguous()
            self._visible[id(view)] = known
        return known.data_ptr()


def _check_shape(name: str, part: Any, shape: tuple[int, ...]) -> None:
    if part.shape != shape:
        raise ValueError(f"{name}: shape {shape}, got {tuple(part.shape)}")


def _side_by_side(part: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[1, heads, T, dim], with the elements of a head side by side."""
    converted: torch.Tensor = part if dtype is None or part.dtype == dtype else part.to(dtype)
    return converted if converted.stride(3) == 1 else converted.contiguous()
