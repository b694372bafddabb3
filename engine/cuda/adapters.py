"""Adapters on a CUDA device: low-rank changes beside products, whatever the weights are made of.

A step without adapters runs the model as it is. In one with some, which runs outside of CUDA graphs, each product that
they change gets a forward that adds the changes to its output, with two kernels for all rows and adapters. A product of
a fused decoder layer has the changes of several linear layers, its parts::

    product   qkv                     out      gate and up         down
    parts     q_proj, k_proj, v_proj  o_proj   gate_proj, up_proj  down_proj

A fused layer adds them before its nonlinearity, as it runs kernels of its own only for products without a forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from decant.engine.checkpoint.coded_linear import is_plain_linear
from decant.engine.cuda import adapter_kernels as kernels
from decant.engine.cuda.coded_product import CodedProduct
from decant.engine.cuda.fused_layer import fused_layers
from decant.engine.cuda.staging import Staging
from decant.engine.errors import AdapterRefused
from decant.engine.model.adapter_targets import AdapterTargets, positions_of, replaced, scaled
from decant.engine.model.adapters import adapters_of
from decant.engine.model.decoder_layer import Forward, find_parts
from decant.engine.model.step_batch import FlatBatch, Ints
from decant.engine.plan import PreparedAdapter

TILE_ROWS, TILE_RANK, TILE_DEPTH, TILE_OUTPUTS = 16, 16, 128, 64
"""A row's bits depend on TILE_RANK and TILE_DEPTH; all are fixed so that no compiled kernel differs."""

SPLIT = 512
"""Inputs of a range of the sum. A row's bits depend on it."""

FEW_TILES = 32
"""Up to as many tiles of rows, each range has programs of its own."""

WARPS, STAGES = 2, 4
"""Of ``shrink``."""

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""Largest difference of changes in a trial, relative to the norm of torch's."""


class Change(NamedTuple):
    """down [rank, in] and up [out, rank], scaled, of a rank that is a multiple of TILE_RANK."""

    down: torch.Tensor
    up: torch.Tensor

    @property
    def entry(self) -> tuple[int, int, int]:
        return self.down.data_ptr(), self.up.data_ptr(), len(self.down)


class CudaAdapter(NamedTuple):
    """``changes`` are in the host's memory until the adapter is added, then in a copy on the device."""

    digest: str
    rank: int
    nbytes: int
    changes: Mapping[str, Change]
    name: str = ""

    @property
    def rank_tiles(self) -> int:
        return max(len(change.down) for change in self.changes.values()) // TILE_RANK


class AdapterTable:
    """Addresses and ranks of all matrices, for the kernels: a row for each of the ``parts``, a column per adapter."""

    def __init__(self, parts: Sequence[str], device: torch.device) -> None:
        self.rows = {name: row for row, name in enumerate(parts)}
        self.entries = torch.zeros(len(parts), 8, 3, dtype=torch.int64, device=device)
        self._columns: dict[str, int] = {}

    @property
    def num_columns(self) -> int:
        return self.entries.shape[1]

    def column_of(self, digest: str) -> int:
        return self._columns[digest]

    def add(self, adapter: CudaAdapter) -> None:
        used = set(self._columns.values())
        column = self._columns.setdefault(adapter.digest, min(set(range(len(used) + 1)) - used))
        if column == self.num_columns:
            self.entries = nn.functional.pad(self.entries, (0, 0, 0, column))
        changes = [adapter.changes.get(name) for name in self.rows]
        entries = [(0, 0, 0) if change is None else change.entry for change in changes]
        self.entries[:, column] = torch.tensor(entries).to(self.entries.device)

    def remove(self, digest: str) -> None:
        self._columns.pop(digest, None)


class AdapterRows(NamedTuple):
    """Rows of a step by adapter, as the kernels take them, and the tiles of the largest rank."""

    rows: torch.Tensor
    adapters: torch.Tensor
    rank_tiles: int


@dataclass
class Step:
    """The running step, for the forwards of its products."""

    rows: AdapterRows | None = None


def place_rows(rows: Mapping[int, Ints], rank_tiles: int, staging: Staging) -> AdapterRows:
    """Put flattened positions, by the column of their adapter, into tiles."""
    tiles = {column: -(-len(each) // TILE_ROWS) for column, each in rows.items()}
    places = np.full(TILE_ROWS * sum(tiles.values()), -1, np.int32)
    first = 0
    for column, each in rows.items():
        places[first : first + len(each)] = each
        first += TILE_ROWS * tiles[column]
    adapters = np.repeat(np.array(list(tiles), np.int32), list(tiles.values()))
    on_device = staging.upload(places, adapters)
    return AdapterRows(on_device[0], on_device[1], rank_tiles)


class Parts:
    """Parts of a product: consecutive rows of a table from that of ``first`` on, and their numbers of ``outputs``."""

    def __init__(self, table: AdapterTable, first: str, outputs: Sequence[int]) -> None:
        self._table = table
        self._first = table.rows[first]
        firsts = np.cumsum([0, *outputs[:-1]])
        spans = np.stack([firsts, np.array(outputs)], 1).astype(np.int32)
        self._spans = torch.from_numpy(spans).to(table.entries.device)
        self._widest = max(outputs)

    def add_changes(self, x: torch.Tensor, out: torch.Tensor, step: AdapterRows) -> None:
        """Add the changes of rows x [T, in] to out [T, outputs of all parts], both of the matrices' dtype."""
        x = x if x.stride(1) == 1 else x.contiguous()
        depth, tiles, parts = x.shape[1], len(step.adapters), len(self._spans)
        splits = -(-depth // SPLIT) if tiles <= FEW_TILES else 1
        shape = parts, splits, tiles * TILE_ROWS, step.rank_tiles * TILE_RANK
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        entries = self._table.entries[self._first :]
        sizes = self._table.num_columns, tiles, step.rank_tiles, splits
        kernels.shrink[(tiles * step.rank_tiles, splits, parts)](
            *(x, step.rows, step.adapters, entries, sums, depth, x.stride(0), *sizes),
            TILE_ROWS=TILE_ROWS,
            TILE_RANK=TILE_RANK,
            TILE_DEPTH=TILE_DEPTH,
            SPLIT=SPLIT,
            num_warps=WARPS,
            num_stages=STAGES,
        )
        kernels.expand[(tiles, -(-self._widest // TILE_OUTPUTS), parts)](
            *(sums, step.rows, step.adapters, entries, self._spans, out, out.stride(0), *sizes),
            TILE_ROWS=TILE_ROWS,
            TILE_OUTPUTS=TILE_OUTPUTS,
            TILE_RANK=TILE_RANK,
            num_warps=4,
            num_stages=3,
        )


class AdaptedProduct:
    """Forward of a product in steps with adapters that change it."""

    def __init__(self, product: nn.Module, parts: Parts, step: Step) -> None:
        self._forward: Forward = product.forward
        self._dtype = dtype_of(product)
        self._parts = parts
        self._step = step

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._dtype:
            return self(x.to(self._dtype)).to(x.dtype)
        out: torch.Tensor = self._forward(x)
        assert self._step.rows is not None
        self._parts.add_changes(x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]), self._step.rows)
        return out


class CudaAdapters:
    """Adapters of a prepared model, by digest."""

    def __init__(self, model: nn.Module, targets: Mapping[str, nn.Module], device: torch.device) -> None:
        """``targets``: the linear layers that ``find_targets`` found, by name."""
        self._device, self._staging = device, Staging(device)
        shapes = {name: shape_of(layer) for name, layer in targets.items()}
        self._fitting = AdapterTargets(model, shapes)
        self._dtypes = {name: dtype_of(layer) for name, layer in targets.items()}
        merged = _merged_products(model)
        together = [name for _, names in merged for name in names]
        self._table = AdapterTable([*together, *(name for name in targets if name not in together)], device)
        self._step = Step()
        self._products: dict[str, dict[nn.Module, AdaptedProduct]] = {name: {} for name in targets}
        for product, names in [*((layer, [name]) for name, layer in targets.items()), *merged]:
            parts = Parts(self._table, names[0], [shapes[name][0] for name in names])
            forward = AdaptedProduct(product, parts, self._step)
            for name in names:
                self._products[name][product] = forward
        self._adapters: dict[str, CudaAdapter] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._adapters

    def load(self, name: str, folder: Path) -> CudaAdapter:
        """Read an adapter into the host's memory, from any thread. Raises AdapterRefused."""
        adapter = self._fitting.read(name, folder)
        changes = {
            module: Change(*self._pinned(scaled(name, module, change, self._dtypes[module], TILE_RANK)))
            for module, change in adapter.changes.items()
        }
        nbytes = sum(each.nbytes for change in changes.values() for each in change)
        return CudaAdapter(adapter.digest, adapter.rank, nbytes, changes, name)

    def _pinned(self, parts: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        """Parts that the device copies by itself: the engine's thread does not wait for them."""
        return (each.pin_memory() for each in parts) if self._device.type == "cuda" else parts

    def add(self, prepared: PreparedAdapter) -> None:
        """Copy an adapter to the device: only now, as it takes the memory of those that have left."""
        assert isinstance(prepared, CudaAdapter)
        try:
            changes = {module: place(change, self._device) for module, change in prepared.changes.items()}
        except torch.OutOfMemoryError:
            reason = f"{self._device} has no memory left for its {prepared.nbytes} bytes"
            raise AdapterRefused(prepared.name, reason) from None
        placed = prepared._replace(changes=changes)
        self._table.add(placed)
        self._adapters[prepared.digest] = placed

    def remove(self, digest: str) -> None:
        self._table.remove(digest)
        self._adapters.pop(digest, None)

    def applied(self, flat: FlatBatch) -> AbstractContextManager[object]:
        return self._adapted(flat, digests) if self._adapters and (digests := adapters_of(flat)) else nullcontext()

    @contextmanager
    def _adapted(self, flat: FlatBatch, digests: Sequence[str]) -> Iterator[None]:
        adapters = [self._adapters[digest] for digest in digests]
        rows = {self._table.column_of(digest): positions_of(flat, digest) for digest in digests}
        forwards: dict[nn.Module, Forward] = {}
        for name in dict.fromkeys(name for adapter in adapters for name in adapter.changes):
            forwards.update(self._products[name])
        try:
            self._step.rows = place_rows(rows, max(adapter.rank_tiles for adapter in adapters), self._staging)
            with replaced(forwards):
                yield
        finally:
            self._step.rows = None


def place(change: Change, device: torch.device) -> Change:
    return Change(*(each.to(device, non_blocking=True) for each in change))


def linear_layers(model: nn.Module) -> Mapping[str, nn.Module]:
    """Linear layers of a prepared model, of any kind that ``shape_of`` knows."""
    return {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, CodedProduct | Conv1D) or is_plain_linear(each)
    }


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """Shape [out, in] of a linear layer's weight."""
    if isinstance(layer, CodedProduct):
        return layer.out_features, layer.in_features
    weight = layer.get_parameter("weight")
    outputs, inner = weight.T.shape if isinstance(layer, Conv1D) else weight.shape
    return outputs, inner


def dtype_of(layer: nn.Module) -> torch.dtype:
    return layer.dtype if isinstance(layer, CodedProduct) else layer.get_parameter("weight").dtype


def _merged_products(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Products of fused layers that are no modules of the model, with the names of their parts."""
    names = {module: name for name, module in model.named_modules()}
    merged: list[tuple[nn.Module, list[str]]] = []
    for module, layer in fused_layers(model):
        query, key, value, _, gate, up, _ = (names[part] for part in find_parts(module)[1])
        qkv, gate_up = layer.merged
        merged += [(qkv, [query, key, value]), (gate_up, [gate, up])]
    return merged


@torch.inference_mode()
def try_changes(dtype: torch.dtype, device: torch.device) -> str | None:
    """Compare the changes of a few rows with those of torch."""
    depth, outputs = SPLIT + TILE_DEPTH + 8, TILE_OUTPUTS + 8
    generator = torch.Generator().manual_seed(0)
    shapes = (3, depth), (2 * TILE_RANK, depth), (outputs, 2 * TILE_RANK)
    x, down, up = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    table = AdapterTable(["trial"], device)
    table.add(CudaAdapter("trial", len(down), 0, {"trial": Change(down, up)}))
    step = place_rows({table.column_of("trial"): np.array([2, 0])}, 2, Staging(device))
    actual = torch.zeros(3, outputs, dtype=dtype, device=device)
    Parts(table, "trial", [outputs]).add_changes(x, actual, step)
    expected = nn.functional.linear(nn.functional.linear(x, down), up).float()
    expected[1] = 0.0
    difference = float((actual.float() - expected).norm() / expected.norm())
    return None if difference < TOLERANCE[dtype] else f"changes differ from torch's by {difference:.2g}"
