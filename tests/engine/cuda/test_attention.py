"""Attention against a float64 reference, in triton's interpreter if there is no GPU."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from decant.engine.cuda import attention
from decant.engine.cuda.attention import TritonAttention
from decant.engine.cuda.graph_sizes import GraphSize, PaddingLayout, most_items, pad
from decant.engine.cuda.static_attention import GraphMemory, StateBuffers, StaticAttention
from decant.engine.kv_layout import INT8_KV, KvFormat, KvLayout, LayerSpec, WindowKind
from decant.engine.model.attention.interface import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.kv_vectors import encode
from decant.engine.model.step_batch import FlatBatch, flatten
from decant.engine.plan import Row
from decant.engine.request import Request
from tests import gpu

pytestmark = pytest.mark.slow

DEVICE = torch.device(gpu.device_type())
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
    block: int = BLOCK
    is_coded: bool = False


CASES = {
    "grouped": Case(),
    "keys of a tile in several blocks": Case(block=4),
    "keys of a tile in one block": Case(block=64),
    "one head per key": Case(heads=2, kv_heads=2, dtype=torch.float16),
    "group of 7": Case(heads=7, kv_heads=1, key_dim=64, value_dim=64, dtype=torch.float16),
    "wide heads": Case(heads=2, kv_heads=1, key_dim=256, value_dim=256),
    "odd widths": Case(key_dim=80, value_dim=72),
    "sliding": Case(heads=2, kv_heads=1, view=AttentionWindow(WindowKind.SLIDING, 24)),
    "chunked": Case(heads=2, kv_heads=1, view=AttentionWindow(WindowKind.CHUNKED, 24), dtype=torch.float16),
    "softcap": Case(heads=2, kv_heads=1, softcap=2.0),
    "sinks": Case(sinks=True),
    "codes": Case(is_coded=True),
    "codes of odd widths in several blocks": Case(key_dim=80, value_dim=72, block=4, is_coded=True, softcap=2.0),
    "codes in float16": Case(heads=7, kv_heads=1, dtype=torch.float16, sinks=True, is_coded=True),
    "codes in float32": Case(
        heads=2, kv_heads=1, dtype=torch.float32, view=AttentionWindow(WindowKind.SLIDING, 24), is_coded=True
    ),
    "float32": Case(dtype=torch.float32, view=AttentionWindow(WindowKind.SLIDING, 7), sinks=True, softcap=3.0),
}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def decoded(part: torch.Tensor) -> torch.Tensor:
    codes, scales = encode(part)
    return codes.double() * scales.double()[..., None]


class AttentionInputs:
    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype)

        self.queries = [normal(case.heads, end - start, case.key_dim) for start, end in case.spans]
        self.keys = [normal(case.kv_heads, end, case.key_dim) for _, end in case.spans]
        self.values = [normal(case.kv_heads, end, case.value_dim) for _, end in case.spans]
        self.read_keys, self.read_values = (
            [decoded(part) for part in parts] if case.is_coded else parts for parts in (self.keys, self.values)
        )
        self.sinks = normal(case.heads) if case.sinks else None

    def run(self, chosen: Sequence[int], *, is_exact: bool = False) -> dict[int, torch.Tensor]:
        """Return the output [tokens, heads, value dim] of each chosen row, in one step over blocks of NaN."""
        case = self.case
        layer = LayerSpec(case.kv_heads, case.key_dim, case.value_dim)
        form = INT8_KV if case.is_coded else KvFormat(case.dtype.itemsize)
        layout = KvLayout((layer, layer), case.block, form)
        rows, free = [], 2
        for index in reversed(chosen):
            start, end = case.spans[index]
            count = -(-end // case.block)
            blocks = array("i", range(free + count - 1, free - 1, -1))
            rows.append(Row(Request(str(index), (1,) * end), [1] * end, start, end, (blocks,), True))
            free += count
        store = KvStore(layout, free, case.dtype, DEVICE)
        store.blocks.view(torch.uint8).fill_(255)  # NaN
        for row in rows:
            earlier = torch.arange(row.start)
            places = torch.tensor(row.blocks[0])[earlier // case.block].to(DEVICE)
            key, value = (
                part[int(row.request.id)][:, : row.start].transpose(0, 1).to(DEVICE)
                for part in (self.keys, self.values)
            )
            store.put(1, places, (earlier % case.block).to(DEVICE), (key, value))
        flat = flatten(rows, case.block, store.null_block)
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
            sinks=None if self.sinks is None else self.sinks.to(DEVICE),
            mask=None,
        )
        call = call._replace(key=call.key.to(DEVICE), value=call.value.to(DEVICE))
        backend = TritonAttention(store, [case.view] * 2, flat, is_exact)
        out = backend.attend(call)[0].cpu()
        if case.is_coded:
            self._check_codes(store, before, call, torch.from_numpy(flat.slot_mapping[0]).to(DEVICE))
        else:
            self._check_written(store, before, flat.slot_mapping[0].tolist())
        lengths = [case.spans[index][1] - case.spans[index][0] for index in order]
        return dict(zip(order, out.split(lengths), strict=True))

    def _check_written(self, store: KvStore, before: torch.Tensor, slots: Sequence[int]) -> None:
        expected = before
        start = store.layout.offsets[1]
        width = self.case.kv_heads * self.case.key_dim, self.case.kv_heads * self.case.value_dim
        for slot in slots:
            block, index = divmod(slot, self.case.block)
            for at, size in ((start, width[0]), (start + self.case.block * width[0], width[1])):
                part = slice(at + index * size, at + (index + 1) * size)
                assert store.blocks[block, part].isfinite().all()
                expected[block, part] = store.blocks[block, part]
        assert torch.equal(store.blocks.nan_to_num(7.0), expected.nan_to_num(7.0))

    def _check_codes(self, store: KvStore, before: torch.Tensor, call: AttentionCall, slots: torch.Tensor) -> None:
        found = store.blocks.clone()
        store.blocks.copy_(before)
        at = slots // self.case.block, slots % self.case.block
        store.put(1, *at, (call.key[0].transpose(0, 1), call.value[0].transpose(0, 1)))
        assert torch.equal(found, store.blocks)

    def reference(self, index: int) -> torch.Tensor:
        case = self.case
        start, end = case.spans[index]
        group = case.heads // case.kv_heads
        query = self.queries[index].double()
        key, value = (part[index].double().repeat_interleave(group, 0) for part in (self.read_keys, self.read_values))
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
    for name, size in {"SPLIT": 32, "TILE": 32, "NARROW_TILE": 16, "CHUNK_ROWS": 32}.items():
        monkeypatch.setattr(attention, name, size)


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
def test_an_exact_row_has_the_same_bits_alone_and_in_any_batch(
    view: AttentionWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = AttentionInputs(Case(heads=2, kv_heads=1, view=view, sinks=True))
    together = inputs.run(range(5), is_exact=True)
    for index, expected in together.items():
        reference = inputs.reference(index)
        assert (expected.double() - reference).norm() <= TOLERANCE[torch.bfloat16] * reference.norm()
    for most, chosen in ((99, (0,)), (99, (4,)), (3, (4, 1)), (1, (2, 0, 3, 4))):
        monkeypatch.setattr(attention, "most_items", lambda rows, most=most: most)
        for index, result in inputs.run(chosen, is_exact=True).items():
            assert torch.equal(result, together[index])


def test_an_exact_token_has_the_same_bits_in_a_chunk() -> None:
    case = Case(spans=((80, 90),), sinks=True)
    chunk = AttentionInputs(case)
    by_chunk = chunk.run([0], is_exact=True)[0]
    last = AttentionInputs(case._replace(spans=((89, 90),)))
    last.keys, last.values, last.sinks = chunk.keys, chunk.values, chunk.sinks
    last.queries = [chunk.queries[0][:, -1:]]
    assert torch.equal(last.run([0], is_exact=True)[0][0], by_chunk[-1])


def tokens_of(ends: Sequence[int]) -> FlatBatch:
    rows = [
        Row(Request(str(index), (1,)), [1] * end, end - 1, end, (array("i", range(-(-end // 64))),), True)
        for index, end in enumerate(ends)
    ]
    return flatten(rows, 64, 99)


@pytest.mark.parametrize("split", [0, 512])
@pytest.mark.parametrize(
    ("ends", "most"), [((1024,), 65), ((2048,) * 64, 256), ((1024,) * 256, 448), ((99_000, 3), 66)]
)
def test_items_of_single_tokens_cover_all_keys_once_and_are_at_most_as_many_as_allowed(
    ends: tuple[int, ...], most: int, split: int
) -> None:
    flat, shape = tokens_of(ends), attention.LaunchShape(16, 64, is_chunk=False, split=split)
    visible = np.zeros(len(ends), np.int32)
    assert most == most_items(len(ends))
    tables = attention.single_tokens(flat, np.arange(len(ends)), visible, shape, most)
    assert len(ends) <= len(tables.items) <= most
    for row, end in enumerate(flat.ends.tolist()):
        own = tables.items[tables.items[:, 0] == row]
        assert own[0, 2] == 0
        assert own[-1, 3] == end
        assert own[1:, 2].tolist() == own[:-1, 3].tolist()
        assert not (own[:, 2] % (split or 64)).any()
        if len(own) == 1:
            assert own[0, 4] == attention.NO_STATE
        else:
            (merge,) = set(own[:, 5].tolist())
            first, count, num_items = tables.merges[merge].tolist()
            assert num_items == len(own)
            keys = split or int(own[0, 3])
            assert own[:, 4].tolist() == [first + begin // keys for begin in own[:, 2].tolist()]
            assert count == -(-end // keys)
    assert tables.num_states == tables.merges[:, 1].sum()


def test_few_rows_have_items_of_few_keys_and_a_full_batch_one_each() -> None:
    shape = attention.LaunchShape(16, 64, is_chunk=False, split=0)
    for rows, context, items in ((1, 1024, 16), (64, 2048, 256), (256, 1024, 256)):
        flat = tokens_of((context,) * rows)
        visible = np.zeros(rows, np.int32)
        assert len(attention.single_tokens(flat, np.arange(rows), visible, shape, most_items(rows)).items) == items


def test_tiles_of_chunks_with_most_keys_come_first() -> None:
    spans = ((0, 70), (5, 9), (200, 240))
    rows = [
        Row(Request(str(index), (1,)), [1] * end, start, end, (array("i", range(4)),), True)
        for index, (start, end) in enumerate(spans)
    ]
    flat, shape = flatten(rows, 64, 99), attention.LaunchShape(32, 16, is_chunk=True, split=0)
    items = attention.chunks(flat, np.arange(3), np.zeros(len(flat.tokens), np.int32), shape, 4).items
    keys = (items[:, 3] - items[:, 2]).tolist()
    assert keys == sorted(keys, reverse=True)
    covered = sorted((row, at) for row, first, _, end, *_ in items.tolist() for at in range(first, end))
    assert covered == [(row, at) for row, (start, end) in enumerate(spans) for at in range(start, end)]


def test_a_scaling_that_is_not_positive_is_refused() -> None:
    inputs = AttentionInputs(Case(spans=((0, 2),)))
    store = KvStore(KvLayout((LayerSpec(2, 64, 64),), BLOCK, KvFormat(2)), 1, torch.bfloat16, DEVICE)
    row = Row(Request("0", (1, 1)), [1, 1], 0, 2, (array("i", [0]),), True)
    query, key, value = (part[0][None] for part in (inputs.queries, inputs.keys, inputs.values))
    with pytest.raises(ValueError, match=r"layer 0: scaling above 0, got 0\.0"):
        TritonAttention(store, [AttentionWindow()], flatten([row], BLOCK, store.null_block)).attend(
            AttentionCall(0, query, key, value, 0.0, None, None, None)
        )


def test_a_call_of_another_shape_is_refused() -> None:
    inputs = AttentionInputs(Case(spans=((0, 2),)))
    layer = LayerSpec(1, 64, 64)
    store = KvStore(KvLayout((layer,), BLOCK, KvFormat(2)), 1, torch.bfloat16, DEVICE)
    row = Row(Request("0", (1, 1)), [1, 1], 0, 2, (array("i", [0]),), True)
    query, key, value = (part[0][None] for part in (inputs.queries, inputs.keys, inputs.values))
    call = AttentionCall(0, query, key, value, 1.0, None, None, None)
    with pytest.raises(ValueError, match="layer 0"):
        TritonAttention(store, [AttentionWindow()], flatten([row], BLOCK, store.null_block)).attend(call)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("view", [AttentionWindow(), AttentionWindow(WindowKind.SLIDING, 24)], ids=["full", "sliding"])
@pytest.mark.parametrize("spans", [((0, 37), (40, 41), (89, 90)), ((0, 5), (20, 23)), ((7, 8), (60, 61))])
def test_a_padded_batch_in_the_buffers_of_a_graph_has_the_outputs_of_the_batch(
    spans: tuple[tuple[int, int], ...], view: AttentionWindow, is_exact: bool
) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)

    rows = [
        Row(Request(str(at), (1,)), [1] * end, start, end, (array("i", range(6 * at, 6 * at + 6)),), True)
        for at, (start, end) in enumerate(spans)
    ]
    layout = KvLayout((LayerSpec(1, 16, 16),), BLOCK, KvFormat(2))
    stores = [KvStore(layout, 18, torch.bfloat16, DEVICE) for _ in range(2)]
    for store in stores:
        store.blocks_with_null.copy_(random(*store.blocks_with_null.shape))
    flat, padding = flatten(rows, BLOCK, 18), PaddingLayout(18, BLOCK)
    tokens, is_mixed = len(flat.tokens), len(flat.tokens) != len(rows)
    size = GraphSize(tokens + 9, 6) if is_mixed else GraphSize(4, 4)

    def call(count: int) -> AttentionCall:
        parts = [torch.zeros(1, heads, count, 16, device=DEVICE, dtype=torch.bfloat16) for heads in (2, 1, 1)]
        for part in parts:
            part[:, :, :tokens] = random(*part[:, :, :tokens].shape)
        query, key, value = parts
        return AttentionCall(0, query, key, value, 0.25, None, None, None)

    expected = TritonAttention(stores[0], [view], flat, is_exact).attend(call(tokens))[0]
    memory = GraphMemory(size, 6, StateBuffers(99, DEVICE))
    captured = flatten(pad([], size, padding), BLOCK, 18)
    static = StaticAttention(stores[1], [view], captured, memory, is_exact)
    static.attend(call(size.tokens))
    assert static.prepare(flatten(pad(rows, size, padding), BLOCK, 18))
    static.fill([], [])
    found = static.attend(call(size.tokens))[0, :tokens]
    assert torch.equal(stores[0].blocks, stores[1].blocks)
    ended = [part.ended for step in static._lists.values() for part in step.lists]
    assert not any(bool(part.any()) for part in ended), "the next layer counts from 0"
    if is_exact:
        assert torch.equal(found, expected)
    assert (found.double() - expected.double()).norm() <= TOLERANCE[torch.bfloat16] * expected.double().norm()
