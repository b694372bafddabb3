from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType

import numpy as np
import torch

from decant.engine.checkpoint.quantize import PIECE
from decant.engine.cpu import fused_layer, linear
from decant.engine.cpu.adapters import CpuAdapters
from decant.engine.cpu.attention import NativeAttention
from decant.engine.cpu.kernels.loader import KERNELS, kind
from decant.engine.cpu.kv_store import HostKvStore
from decant.engine.cpu.optimize import optimize
from decant.engine.cpu.sampler import SCORES_AT_ONCE, NativeSampler
from decant.engine.cpu.threads import all_for_torch, one_for_torch
from decant.engine.kv_layout import KvLayout
from decant.engine.model import calibration
from decant.engine.model.adapter_targets import find_targets
from decant.engine.model.adapters import ModelAdapters
from decant.engine.model.attention.interface import AttentionBackend
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.attention.paged import PagedAttention
from decant.engine.model.backend import PARTS, TorchBackend
from decant.engine.model.kv_store import KvStore
from decant.engine.model.sampler import Sampler
from decant.engine.model.step_batch import FlatBatch, Ints
from decant.engine.plan import Device, Row


class CpuBackend(TorchBackend):
    dtypes = frozenset({torch.bfloat16, torch.float32})  # float16 products are a thousand times as slow
    exact = PARTS
    keeps_codes = True
    quantize_piece = PIECE
    rounds_rows = True
    _kernels: ModuleType | None = None

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.sampler = Sampler(SCORES_AT_ONCE)

    @property
    def kind(self) -> str:
        return kind(None)

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        linear.pack(model, None)

    def make_adapters(self, model: torch.nn.Module, run: Callable[[], object], tokens: int) -> ModelAdapters:
        layers = {name: each for name, each in model.named_modules() if isinstance(each, linear.PackedLinear)}
        return CpuAdapters(model, find_targets(model, layers, run, tokens), self._kernels)

    def make_store(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype) -> KvStore:
        return HostKvStore(layout, num_blocks, dtype, self.device)

    def make_attention(
        self, store: KvStore, layer_windows: Sequence[AttentionWindow], flat: FlatBatch, keep: Ints
    ) -> AttentionBackend:
        return PagedAttention(store, layer_windows, flat, all_for_torch)

    def around_step(self) -> AbstractContextManager[object]:
        return one_for_torch()

    def choose_threads(self, device: Device, most: int) -> int:
        return calibration.choose_threads(device, most, torch.set_num_threads)


class NativeBackend(CpuBackend):
    _kernels: ModuleType

    def __init__(self, kernels: ModuleType) -> None:
        super().__init__()
        self._kernels = kernels
        self.sampler = NativeSampler(kernels)

    @property
    def kind(self) -> str:
        return kind(self._kernels)

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        optimize(model, dtype, self._kernels)

    def flatten(self, rows: Sequence[Row], block_size: int, null_block: int) -> FlatBatch:
        return flatten(self._kernels, rows, block_size, null_block)

    def make_attention(
        self, store: KvStore, layer_windows: Sequence[AttentionWindow], flat: FlatBatch, keep: Ints
    ) -> AttentionBackend:
        return NativeAttention(self._kernels, store, layer_windows, flat, keep)

    def fused_layers(self, model: torch.nn.Module) -> int:
        return len(fused_layer.fused_layers(model))


def flatten(kernels: ModuleType, rows: Sequence[Row], block_size: int, null_block: int) -> FlatBatch:
    ordered, row_table, flattened, new_blocks, table, groups, width = kernels.flatten(rows, block_size, null_block)
    return FlatBatch(
        ordered,
        np.frombuffer(row_table, np.int64).reshape(6, -1),
        np.frombuffer(flattened, np.int64).reshape(2 + groups, -1),
        np.frombuffer(new_blocks, np.int64),
        np.frombuffer(table, np.int32).reshape(groups, -1, width),
    )


def make_cpu_backend() -> CpuBackend:
    return CpuBackend() if KERNELS is None else NativeBackend(KERNELS)
