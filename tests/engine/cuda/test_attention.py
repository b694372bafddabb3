"""Attention against a float64 reference, in triton's interpreter if there is no GPU."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from decant.engine.cuda import attention
from decant.engine.cuda.attention import TritonAttention
from decant.engine.kv_layout import KvLayout, LayerSpec, WindowKind
from decant.engine.model.attention.interface import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request

pytestmark = pytest.mark.slow

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
BLOCK = 16


class Case(NamedTuple):
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    view: AttentionWindow = AttentionWindow()
    softcap: float | None = None
    sinks: bool = False
    spans: tuple[tuple[int, int], ...] = ((0, 37), (40, 41), (3, 22), (0, 1), (89, 90))


CASES = {
    "grouped": Case(),
    "one head per key": Case(heads=2, kv_heads=2, dtype=torch.float16),
    "group of 7": Case(heads=7, kv_heads=1, key_dim=64, value_dim=64, dtype=torch.float16),
    "wide heads": Case(heads=2, kv_heads=1, key_dim=256, value_dim=256),
    "odd widths": Case(key_dim=80, value_dim=72),
    "sliding": Case(heads=2, kv_heads=1, view=AttentionWindow(WindowKind.SLIDING, 24)),
    "chunked": Case(heads=2, kv_heads=1, view=AttentionWindow(WindowKind.CHUNKED, 24), dtype=torch.float16),
    "softcap": Case(heads=2, kv_heads=1, softcap=2.0),
    "sinks": Case(sinks=True),
    "float32": Case(dtype=torch.float32, view=AttentionWindow(WindowKind.SLIDING, 7), sinks=True, softcap=3.0),
}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


class AttentionInputs:
    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype)

        self.queries = [normal(case.heads, end - start, case.key_dim) for start, end in case.spans]
        self.keys = [normal(case.kv_heads, end, case.key_dim) for _, end in case.spans]
        self.values = [normal(case.kv_heads, end, case.value_dim) for _, end in case.spans]
        self.sinks = normal(case.heads) if case.sinks else None

    def run(self, chosen: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the output [tokens, heads, value dim] of each chosen row, in one step over blocks of NaN."""
        case = self.case
        layer = LayerSpec(case.kv_heads, case.key_dim, case.value_dim)
        layout = KvLayout((layer, layer), BLOCK, case.dtype.itemsize)
        rows, free = [], 2
        for index in reversed(chosen):
            start, end = case.spans[index]
            count = -(-end // BLOCK)
            blocks = array("i", range(free + count - 1, free - 1, -1))
            rows.append(Row(Request(str(index), (1,) * end), [1] * end, start, end, (blocks,), True))
            free += count
        store = KvStore(layout, free, case.dtype, DEVICE)
        store.blocks.fill_(float("nan"))
        _, keys, values = store._layers[1]
        for row in rows:
            index = int(row.request.id)
            for position in range(row.start):
                place = row.blocks[0][position // BLOCK], position % BLOCK
                keys[place], values[place] = self.keys[index][:, position], self.values[index][:, position]
        flat = flatten(rows, BLOCK, store.null_block)
        before = store.blocks.clone()
        order = [int(row.request.id) for row in flat.rows]
        starts = [case.spans[index][0] for index in order]
        call = AttentionCall(
            layer=1,
            query=torch.cat([self.queries[index] for index in order], 1)[None].to(DEVICE),
            key=torch.cat([self.keys[index][:, start:] for index, start in zip(order, starts, strict=True)], 1)[None],
            value=torch.cat([self.values[index][:, start:] for index, start in zip(order, starts, strict=True)], 1)[
                None
            ],
            scaling=case.key_dim**-0.5,
            softcap=case.softcap,
            sinks=self.sinks,
            mask=None,
        )
        call = call._replace(key=call.key.to(DEVICE), value=call.value.to(DEVICE))
        backend = TritonAttention(store, [case.view] * 2, flat)
        out = backend.attend(call)[0].cpu()
        self._check_written(store, before, flat.slot_mapping[0].tolist())
        lengths = [case.spans[index][1] - case.spans[index][0] for index in order]
        return dict(zip(order, out.split(lengths), strict=True))

    def _check_written(self, store: KvStore, before: torch.Tensor, slots: Sequence[int]) -> None:
        expected = before
        start = store.layout.offsets[1]
        width = self.case.kv_heads * self.case.key_dim, self.case.kv_heads * self.case.value_dim
        for slot in slots:
            block, index = divmod(slot, BLOCK)
            for at, size in ((start, width[0]), (start + BLOCK * width[0], width[1])):
                part = slice(at + index * size, at + (index + 1) * size)
                assert store.blocks[block, part].isfinite().all()
                expected[block, part] = store.blocks[block, part]
        assert torch.equal(store.blocks.nan_to_num(7.0), expected.nan_to_num(7.0))

    def reference(self, index: int) -> torch.Tensor:
        case = self.case
        start, end = case.spans[index]
        group = case.heads // case.kv_heads
        query = self.queries[index].double()
        key, value = (part[index].double().repeat_interleave(group, 0) for part in (self.keys, self.values))
        scores = query @ key.transpose(1, 2) * case.key_dim**-0.5
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        positions, at = torch.arange(start, end), torch.arange(end)
        hidden = (at > positions[:, None]) | (at < case.view.first(positions)[:, None])
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, len(positions), 1)
            return (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value).transpose(0, 1)
        expected: torch.Tensor = (scores.softmax(-1) @ value).transpose(0, 1)
        return expected


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(attention, "TILE", 16)
    monkeypatch.setattr(attention, "CHUNK_ROWS", 32)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_agrees_with_float64(case: Case) -> None:
    inputs = AttentionInputs(case)
    results = inputs.run(range(len(case.spans)))
    for index, result in results.items():
        expected = inputs.reference(index)
        assert (result.double() - expected).norm() <= TOLERANCE[case.dtype] * expected.norm()


@pytest.mark.parametrize("seed", range(3))
def test_random_ragged_batches_agree_with_float64(seed: int) -> None:
    rng = random.Random(seed)
    ends = [rng.randint(1, 100) for _ in range(4)]
    spans = tuple((rng.choice([end - 1, rng.randrange(max(0, end - 40), end)]), end) for end in ends)
    view = rng.choice(
        [
            AttentionWindow(),
            *(AttentionWindow(kind, rng.randint(1, 60)) for kind in WindowKind if kind is not WindowKind.FULL),
        ]
    )
    inputs = AttentionInputs(
        Case(heads=4, kv_heads=rng.choice([1, 2, 4]), view=view, sinks=rng.random() < 0.5, spans=spans), seed
    )
    for index, result in inputs.run(range(len(spans))).items():
        expected = inputs.reference(index)
        assert (result.double() - expected).norm() <= TOLERANCE[torch.bfloat16] * expected.norm()


@pytest.mark.parametrize("view", [AttentionWindow(), AttentionWindow(WindowKind.SLIDING, 24)], ids=["full", "sliding"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(view: AttentionWindow) -> None:
    inputs = AttentionInputs(Case(heads=2, kv_heads=1, view=view, sinks=True))
    together = inputs.run(range(5))
    for chosen in ((0,), (4,), (4, 1), (2, 0, 3)):
        for index, result in inputs.run(chosen).items():
            assert torch.equal(result, together[index])


def test_splits_in_parallel_have_the_bits_of_splits_in_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_ROWS", 16)
    case = Case(spans=((80, 90),), sinks=True)
    chunk = AttentionInputs(case)
    by_chunk = chunk.run([0])[0]
    last = AttentionInputs(case._replace(spans=((89, 90),)))
    last.keys, last.values, last.sinks = chunk.keys, chunk.values, chunk.sinks
    last.queries = [chunk.queries[0][:, -1:]]
    assert torch.equal(last.run([0])[0][0], by_chunk[-1])


def test_a_call_of_another_shape_is_refused() -> None:
    inputs = AttentionInputs(Case(spans=((0, 2),)))
    layer = LayerSpec(1, 64, 64)
    store = KvStore(KvLayout((layer,), BLOCK, 2), 1, torch.bfloat16, DEVICE)
    row = Row(Request("0", (1, 1)), [1, 1], 0, 2, (array("i", [0]),), True)
    query, key, value = (part[0][None] for part in (inputs.queries, inputs.keys, inputs.values))
    call = AttentionCall(0, query, key, value, 1.0, None, None, None)
    with pytest.raises(ValueError, match="layer 0"):
        TritonAttention(store, [AttentionWindow()], flatten([row], BLOCK, store.null_block)).attend(call)
