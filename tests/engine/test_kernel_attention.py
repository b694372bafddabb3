from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from decant.engine.cpu.attention import NativeAttention
from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.kv_layout import INT8_KV, KvFormat, KvLayout, LayerSpec, WindowKind
from decant.engine.model.attention.interface import AttentionBackend, AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.attention.paged import PagedAttention
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, flatten
from decant.engine.plan import Row
from decant.engine.request import Request

pytestmark = pytest.mark.skipif(KERNELS is None, reason="this CPU has no AVX2, or no compiler was here")

FULL = AttentionWindow()
LENGTH = 300
BLOCK = 16
SINGLE = [*range(36), *range(60, 69), *range(124, 133), *range(252, 261), *range(296, LENGTH)]
"""First positions of pieces of one token at each offset in a block and around tiles of keys, of longer ones between."""


@dataclass(frozen=True)
class Shape:
    kv_heads: int
    heads: int
    key_dim: int
    value_dim: int
    view: AttentionWindow = FULL
    softcap: float | None = None
    sinks: bool = False


SHAPES = [
    Shape(2, 14, 64, 64),
    Shape(4, 4, 128, 128),
    Shape(2, 6, 40, 48),
    Shape(3, 3, 40, 24, AttentionWindow(WindowKind.SLIDING, 33)),
    Shape(1, 8, 16, 16, AttentionWindow(WindowKind.CHUNKED, 32), softcap=20.0, sinks=True),
    Shape(1, 160, 8, 8, sinks=True),
]
DTYPES = [torch.float32, torch.bfloat16]
CODED = pytest.mark.parametrize("is_coded", [False, True], ids=["plain", "int8"])


class AttentionInputs:
    def __init__(self, shape: Shape, dtype: torch.dtype, *, is_coded: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self.shape = shape
        spec = LayerSpec(shape.kv_heads, shape.key_dim, shape.value_dim)
        layout = KvLayout((spec,) * 2, BLOCK, INT8_KV if is_coded else KvFormat(dtype.itemsize))
        self.store = KvStore(layout, 64, dtype, torch.device("cpu"))
        self.query, self.key, self.value = (
            torch.randn(1, heads, LENGTH, dim, generator=generator).to(dtype)
            for heads, dim in (
                (shape.heads, shape.key_dim),
                (shape.kv_heads, shape.key_dim),
                (shape.kv_heads, shape.value_dim),
            )
        )
        self.sinks = torch.randn(shape.heads, generator=generator) if shape.sinks else None

    def step(self, kind: type, *pieces: tuple[int, int, int]) -> torch.Tensor:
        """Return [T, heads, value dim] of (sequence, first, end); all sequences have the same tokens."""
        rows = [
            Row(Request(f"{name}", tuple(range(end))), list(range(end)), first, end, (self._blocks(name, end),), True)
            for name, first, end in pieces
        ]
        flat = flatten(rows, BLOCK, self.store.null_block)
        at = torch.from_numpy(flat.positions)
        call = AttentionCall(
            layer=1,
            query=self.query[:, :, at],
            key=self.key[:, :, at],
            value=self.value[:, :, at],
            scaling=self.shape.key_dim**-0.5,
            softcap=self.shape.softcap,
            sinks=self.sinks,
            mask=None,
        )
        return self._attender(kind, flat).attend(call)[0]

    def _attender(self, kind: type, flat: FlatBatch) -> AttentionBackend:
        layer_windows: Sequence[AttentionWindow] = [self.shape.view] * 2
        if kind is PagedAttention:
            # It reads whole blocks, so those that are begun are cleared before, as in every step.
            self.store.clear(flat.new_blocks)
            return PagedAttention(self.store, layer_windows, flat)
        assert KERNELS is not None
        return NativeAttention(KERNELS, self.store, layer_windows, flat)

    @staticmethod
    def _blocks(sequence: int, end: int) -> array[int]:
        most = -(-LENGTH // BLOCK)
        return array("i", [sequence * most + most - 1 - index for index in range(-(-end // BLOCK))])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@CODED
def test_attention_equals_plain_products_and_writes_the_same_cache(
    is_coded: bool, shape: Shape, dtype: torch.dtype
) -> None:
    plain, native = (AttentionInputs(shape, dtype, is_coded=is_coded) for _ in range(2))
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    for pieces in ([(0, 0, 70), (1, 0, 1)], [(0, 70, 71), (1, 1, 200)], [(0, 71, LENGTH), (1, 200, 201)]):
        expected, found = plain.step(PagedAttention, *pieces), native.step(NativeAttention, *pieces)
        assert torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
    assert torch.equal(native.store.blocks, plain.store.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "is_coded"), [(NativeAttention, False), (NativeAttention, True), (PagedAttention, False)]
)
def test_a_row_has_the_same_bits_in_any_chunks_batch_and_threads(
    kind: type, is_coded: bool, shape: Shape, dtype: torch.dtype, threads: None
) -> None:
    torch.set_num_threads(1)
    inputs = AttentionInputs(shape, dtype, is_coded=is_coded)
    whole = inputs.step(kind, (0, 0, LENGTH))
    for size in (1, 7, 48, 129):
        torch.set_num_threads(1 + size % 3)
        inputs.store.blocks.view(torch.uint8).fill_(255)  # NaN: nothing depends on what was there
        starts = SINGLE if size == 1 else range(0, LENGTH, size)
        for first, end in pairwise([*starts, LENGTH]):
            both = inputs.step(kind, (0, first, end), (1, 0, 5))
            assert torch.equal(both[: end - first], whole[first:end]), (size, first)


@pytest.mark.parametrize("dtype", DTYPES)
@CODED
def test_nan_reaches_exactly_the_rows_that_see_it(is_coded: bool, dtype: torch.dtype) -> None:
    inputs = AttentionInputs(SHAPES[0], dtype, is_coded=is_coded)
    inputs.key[0, 0, 10, 3] = float("nan")
    out = inputs.step(NativeAttention, (0, 0, LENGTH))
    assert not out[:10].isnan().any()
    assert out[10:, :7].isnan().all()
    assert not out[:, 7:].isnan().any()
