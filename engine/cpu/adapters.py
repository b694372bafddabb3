"""Adapters on a CPU: a low-rank change beside a packed weight, whatever the weight is packed from.

A step without adapters runs the model as it is. In one with adapters, each adapted linear layer adds to its own product
the changes of the rows that have an adapter: in the kernel where its decoder layer is fused, else in a forward that the
layer gets for the step::

    rows        0    1    2    3    4    5
    adapter     -    x    y    -    x    x
    x.down, x.up     ^              ^    ^     one product of three rows
    y.down, y.up          ^                    one product of one row

All products are those of ``gemm``, so a row's bits do not depend on the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn

from decant.engine.cpu.fused_layer import StepChanges, fused_layers
from decant.engine.cpu.gemm import PANEL, NativeWeight, Product, prepare
from decant.engine.cpu.huge_pages import Arena
from decant.engine.cpu.linear import PackedLinear
from decant.engine.model.adapter_targets import AdapterTargets, positions_of, replaced, scaled
from decant.engine.model.adapters import adapters_of
from decant.engine.model.decoder_layer import Forward, find_parts
from decant.engine.model.step_batch import FlatBatch
from decant.engine.plan import PreparedAdapter

Rows = torch.Tensor
"""Flattened positions, int64."""


class _LowRank(ctypes.Structure):
    _fields_ = (*[(name, ctypes.c_void_p) for name in ("down", "up")], ("rank", ctypes.c_int64))


class _AdapterRows(ctypes.Structure):
    _fields_ = (*[(name, ctypes.c_void_p) for name in ("changes", "rows")], ("count", ctypes.c_int64))


class _StepChanges(ctypes.Structure):
    _fields_ = (("adapters", ctypes.c_void_p), ("count", ctypes.c_int64))


class Change(NamedTuple):
    """Prepared change of one layer: down [rank, in] and up [out, rank], scaled, both padded to whole panels."""

    down: Product
    up: Product
    width: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))[:, : self.width]

    @property
    def addresses(self) -> _LowRank:
        assert isinstance(self.down, NativeWeight)
        assert isinstance(self.up, NativeWeight)
        return _LowRank(self.down.addresses[0], self.up.addresses[0], self.down.outputs)


class CpuAdapter(NamedTuple):
    """``table`` has the changes of fused layers for the kernel, which the products keep in memory."""

    digest: str
    rank: int
    nbytes: int
    changes: Mapping[str, Change]
    table: ctypes.Array[_LowRank]


class AdaptedLinear:
    """Forward of a packed linear layer in steps with adapters; ``changes`` by digest, ``step`` by the rows of each."""

    def __init__(self, layer: PackedLinear, step: Mapping[str, Rows]) -> None:
        self._forward: Forward = layer.forward
        self._dtype = layer.weight.dtype
        self._step = step
        self.changes: dict[str, Change] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._forward(x)
        inputs, outputs = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        for digest, rows in self._step.items():
            if (change := self.changes.get(digest)) is not None:
                outputs.index_add_(0, rows, change(inputs[rows].to(self._dtype)).to(out.dtype))
        return out


class CpuAdapters:
    """Adapters of a prepared model, by digest."""

    def __init__(self, model: nn.Module, targets: Mapping[str, PackedLinear], kernels: ModuleType | None) -> None:
        """``targets``: the linear layers that ``find_targets`` found, by name."""
        self._kernels = kernels
        shapes = {name: (layer.weight.shape[0], layer.weight.shape[1]) for name, layer in targets.items()}
        self._fitting = AdapterTargets(model, shapes)
        self._targets = targets
        self._step: dict[str, Rows] = {}
        self._forwards = {name: AdaptedLinear(layer, self._step) for name, layer in targets.items()}
        self._layers: dict[nn.Module, Forward] = {targets[name]: each for name, each in self._forwards.items()}
        self._step_changes = StepChanges()
        self._fused_names = self._take_fused(model)
        self._adapters: dict[str, CpuAdapter] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._adapters

    def _take_fused(self, model: nn.Module) -> list[list[str]]:
        """Have the fused layers compute changes; return the names of the linear layers of each."""
        names = {module: name for name, module in model.named_modules()}
        fused = fused_layers(model)
        for number, (_, layer) in enumerate(fused):
            layer.take_changes(self._step_changes, number)
        return [[names[part] for part in find_parts(module)[1]] for module, _ in fused]

    def load(self, name: str, folder: Path) -> CpuAdapter:
        """Read an adapter and make its products, from any thread. Raises AdapterRefused."""
        adapter = self._fitting.read(name, folder)
        arena, changes, nbytes = Arena(), {}, 0
        for module, change in adapter.changes.items():
            down, up = scaled(name, module, change, self._targets[module].weight.dtype, PANEL)
            up = _padded(up)
            down_product, up_product = (prepare(each, None, self._kernels, arena) for each in (down, up))
            changes[module] = Change(down_product, up_product, len(change.up))
            nbytes += down.nbytes + up.nbytes
        return CpuAdapter(adapter.digest, adapter.rank, nbytes, changes, self._table(changes))

    def _table(self, changes: Mapping[str, Change]) -> ctypes.Array[_LowRank]:
        found = [changes.get(name) for names in self._fused_names for name in names]
        return (_LowRank * len(found))(*(_LowRank() if change is None else change.addresses for change in found))

    def add(self, prepared: PreparedAdapter) -> None:
        assert isinstance(prepared, CpuAdapter)
        for name, change in prepared.changes.items():
            self._forwards[name].changes[prepared.digest] = change
        self._adapters[prepared.digest] = prepared

    def remove(self, digest: str) -> None:
        self._adapters.pop(digest, None)
        for forward in self._forwards.values():
            forward.changes.pop(digest, None)

    def applied(self, flat: FlatBatch) -> AbstractContextManager[object]:
        return self._adapted(flat, digests) if self._adapters and (digests := adapters_of(flat)) else nullcontext()

    @contextmanager
    def _adapted(self, flat: FlatBatch, digests: Sequence[str]) -> Iterator[None]:
        self._step.update((digest, torch.from_numpy(positions_of(flat, digest))) for digest in digests)
        rows = [
            _AdapterRows(ctypes.addressof(self._adapters[digest].table), each.data_ptr(), len(each))
            for digest, each in self._step.items()
        ]
        adapters = (_AdapterRows * len(rows))(*rows)
        changes = _StepChanges(ctypes.addressof(adapters), len(rows))
        try:
            self._step_changes.address = ctypes.addressof(changes)
            with replaced(self._layers):
                yield
        finally:
            self._step_changes.address = 0
            self._step.clear()


def _padded(up: torch.Tensor) -> torch.Tensor:
    """Return up with zeros for whole panels of the outputs."""
    return nn.functional.pad(up, (0, 0, 0, -len(up) % PANEL))
