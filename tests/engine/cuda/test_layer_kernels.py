from __future__ import annotations

from array import array

import pytest
import torch

pytest.importorskip("triton")

from decant.engine.cuda import layer_kernels
from decant.engine.cuda.attention import TritonAttention
from decant.engine.cuda.fused_layer import Norm, gated
from decant.engine.kv_layout import INT8_KV, KvFormat, KvLayout, LayerSpec
from decant.engine.model.attention.interface import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request
from tests import gpu

pytestmark = pytest.mark.slow

DEVICE = torch.device(gpu.device_type())
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
NAN = float("nan")


def random(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (result.double() - expected).norm(dim=-1)
    assert bool((difference <= TOLERANCE[result.dtype] * expected.norm(dim=-1)).all())


def normalized(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = rows.double()
    return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 48, 129])
def test_a_norm_with_residual_agrees_with_float64(width: int, dtype: torch.dtype) -> None:
    norm = Norm(random(dtype, width, seed=1), 1e-5)
    rows, addend = random(dtype, 5, width), random(dtype, 5, width, seed=2)
    rows *= torch.tensor([1e-3, 1.0, 30.0, 1.0, 0.0], device=DEVICE, dtype=dtype)[:, None]
    total, result = norm.add(rows, addend)
    assert_close(total, rows.double() + addend.double())  # the interpreter truncates to bfloat16
    assert_close(result, normalized(total, norm.weight, norm.eps))
    assert_close(norm(rows), normalized(rows, norm.weight, norm.eps))
    alone = norm.add(rows[2:3], addend[2:3])
    assert torch.equal(alone[1][0], result[2]), "a row has the same bits in any batch"


def test_a_norm_writes_its_rows_alone() -> None:
    memory = torch.full((4, 7), NAN, device=DEVICE)
    total, rows = memory.clone(), torch.ones(2, 7, device=DEVICE)
    layer_kernels.add_rms_norm[(2,)](rows, rows, rows[0], total[1:], memory[1:], 7, 1, 7, 0.0, ADD=True, PAD=8)
    for written, expected in ((memory, 1.0), (total, 2.0)):
        assert torch.equal(written[1:3], torch.full((2, 7), expected, device=DEVICE))
        assert written[[0, 3]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_of_heads_reads_them_between_others(dtype: torch.dtype) -> None:
    norm = Norm(random(dtype, 16, seed=1), 1e-5)
    together = random(dtype, 5, 6, 16)
    for heads in (together[:, :4], together[:, 4:]):
        assert_close(norm.heads(heads), normalized(heads, norm.weight, norm.eps))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_activation_agrees_with_float64(dtype: torch.dtype) -> None:
    gates, up = random(dtype, 7, 301) * 4, random(dtype, 7, 301, seed=1)
    assert_close(gated(torch.cat([gates, up], 1)), torch.nn.functional.silu(gates.double()) * up.double())
    extremes = torch.tensor([[-3e4, -100.0, -0.0, 0.0, 100.0, 3e4]], device=DEVICE, dtype=dtype)
    assert torch.equal(gated(torch.cat([extremes, torch.ones_like(extremes)], 1)), extremes.clamp(min=0.0))


def test_a_gated_activation_writes_its_numbers_alone() -> None:
    out = torch.full((2052,), NAN, device=DEVICE)
    ones = torch.ones(2050, device=DEVICE)
    layer_kernels.gate[(1, 2)](ones, out[1:], 1025, TILE=1024)
    assert out[1:1026].isfinite().all()
    assert out[0].isnan()
    assert out[1026:].isnan().all()


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.double().chunk(2, -1)
    return heads.double() * cos.double() + torch.cat([-second, first], -1) * sin.double()


def test_rotated_keys_and_values_are_stored_as_codes() -> None:
    count, kv_heads, width, dtype = 5, 3, 20, torch.bfloat16
    layout = KvLayout((LayerSpec(kv_heads, width, width),), 8, INT8_KV)
    found, expected = (KvStore(layout, 1, dtype, DEVICE) for _ in range(2))
    row = Row(Request("r", (1,) * count), [1] * count, 0, count, (array("i", [0]),), True)
    query, key, value = (random(dtype, 1, kv_heads, count, width, seed=seed) for seed in range(3))
    key[0, 1, 2, 3], value[0, 0, 1, 0], value[0, 2, 4] = NAN, float("inf"), 0
    cos, sin = (random(dtype, 1, count, width, seed=seed) for seed in (7, 8))
    attention = TritonAttention(found, [AttentionWindow()], flatten([row], 8, found.null_block))
    attention.attend_rotated(AttentionCall(0, query, key, value, 1.0, None, None, None), cos, sin)
    rotated = rotate(key[0], cos[0], sin[0]).to(dtype)
    slots = torch.arange(count, device=DEVICE)
    expected.put(0, slots * 0, slots, (rotated.transpose(0, 1), value[0].transpose(0, 1)))
    (key, value), (own_key, own_value) = (store.gather(0, slots[:1, None] * 0) for store in (expected, found))
    assert torch.equal(own_value.nan_to_num(7.0), value.nan_to_num(7.0))
    assert torch.equal(own_key.isnan(), key.isnan())
    steps = key.abs().amax(-1, keepdim=True) / 127
    assert ((own_key - key).abs() <= 2 * steps)[~key.isnan()].all(), "rotations may round another way"


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 64), (torch.float16, 20), (torch.float32, 64)])
def test_attention_after_rotation_agrees_with_float64(dtype: torch.dtype, width: int) -> None:
    heads, kv_heads, spans = 4, 2, ((0, 9), (0, 1), (0, 5))
    layer = LayerSpec(kv_heads, width, width)
    store = KvStore(KvLayout((layer, layer), 8, KvFormat(dtype.itemsize)), 6, dtype, DEVICE)
    store.blocks.fill_(NAN)
    rows = [
        Row(Request(str(index), (1,) * end), [1] * end, start, end, (array("i", [2 * index, 2 * index + 1]),), True)
        for index, (start, end) in enumerate(spans)
    ]
    flat = flatten(rows, 8, store.null_block)
    tokens = len(flat.tokens)
    query, key, value = (random(dtype, 1, count, tokens, width, seed=count) for count in (heads, kv_heads, kv_heads))
    value = value + 1
    cos, sin = (random(dtype, 1, tokens, width, seed=seed) for seed in (7, 8))
    call = AttentionCall(1, query, key, value, width**-0.5, None, None, None)
    attention = TritonAttention(store, [AttentionWindow()] * 2, flat)
    result = attention.attend_rotated(call, cos, sin)
    expected_query, expected_key = rotate(query[0], cos[0], sin[0]), rotate(key[0], cos[0], sin[0])
    slots = torch.from_numpy(flat.slot_mapping[0]).to(DEVICE)
    keys, values = (part[0] for part in store.gather(1, torch.arange(store.num_blocks, device=DEVICE)[None]))
    assert_close(keys[slots], expected_key.transpose(0, 1))
    assert torch.equal(values[slots], value[0].transpose(0, 1))
    nothing = torch.full_like(keys[slots], NAN)
    store.put(1, slots // 8, slots % 8, (nothing, nothing))
    assert store.blocks.isnan().all()
    for at, stop in zip(flat.firsts.tolist(), flat.stops.tolist(), strict=True):
        for head in range(heads):
            kv = head * kv_heads // heads
            scores = expected_query[head, at:stop] @ expected_key[kv, at:stop].T * width**-0.5
            scores += torch.full_like(scores, float("-inf")).triu(1)
            assert_close(result[0, at:stop, head], scores.softmax(-1) @ value[0, kv, at:stop].double())
