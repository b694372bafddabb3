"""Compiled kernels compute correctly or raise: no arguments from Python end the process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decant.engine.backends import make_backend
from decant.engine.cpu.attention import NativeAttention
from decant.engine.cpu.backend import flatten
from decant.engine.cpu.fused_ops import RmsNorm
from decant.engine.cpu.gemm import PackedWeight
from decant.engine.cpu.kernels import loader as native
from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.kv_layout import INT8_KV, KvFormat, KvLayout, LayerSpec, WindowKind
from decant.engine.model.attention.interface import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.attention.paged import PagedAttention
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import flatten as flatten_in_numpy
from decant.engine.plan import Row
from decant.engine.request import Request
from decant.engine.sampler_state import SamplerState
from tests.e2e import fork_server
from tests.engine.sampler.harness import MIXES
from tests.engine.sampler.harness import row as sampled_row

pytestmark = pytest.mark.skipif(KERNELS is None, reason="this CPU has no AVX2, or no compiler was here")

REFUSED = (ValueError, TypeError)
DTYPES = [torch.float32, torch.bfloat16]
ODD = [*DTYPES, torch.float16, torch.float64, torch.int32]
SIZES = st.sampled_from([0, 1, 2, 7, 8, 15, 16, 17, 32, 48, 97])

every_build = pytest.mark.parametrize("kernels", native.supported_modules())


def build(name: str) -> ModuleType:
    module: ModuleType = pytest.importorskip(f"decant.engine.cpu.kernels.{name}")
    return module


@st.composite
def tensors(draw: st.DrawFn, *shape: int, dtypes: list[torch.dtype] = ODD) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    dtype = draw(st.sampled_from(dtypes))
    match draw(st.sampled_from(["contiguous", "part", "transposed"])):
        case "part":
            return torch.randn(*shape[:-1], shape[-1] + 3, generator=generator).to(dtype)[..., 1 : shape[-1] + 1]
        case "transposed":
            return torch.randn(*shape[::-1], generator=generator).to(dtype).permute(*reversed(range(len(shape))))
    return torch.randn(*shape, generator=generator).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = 1e-4 if found.dtype == torch.float32 else 2**-5
    return torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@every_build
@given(data=st.data())
def test_a_product_is_right_or_refused(kernels: str, data: st.DataObject) -> None:
    outputs, inner = data.draw(st.sampled_from([16, 32, 48, 17])), data.draw(SIZES.filter(bool))
    weight = data.draw(tensors(outputs, inner, dtypes=[*DTYPES, *DTYPES, *ODD]))
    shape = data.draw(SIZES), data.draw(st.one_of(st.just(inner), SIZES))
    x = data.draw(tensors(*shape, dtypes=[weight.dtype] * 8 + ODD))
    bias = torch.randn(data.draw(st.one_of(st.just(outputs), SIZES))) if data.draw(st.booleans()) else None
    try:
        found = PackedWeight(build(kernels), weight, bias)(x)
    except REFUSED:
        fits = outputs % 16 == 0 and x.dtype == weight.dtype in DTYPES and shape[1] == inner
        assert not fits or (bias is not None and len(bias) != outputs)
        return
    expected = x.double() @ weight.double().T
    assert close(found, expected if bias is None else expected + bias.double())


@every_build
@given(data=st.data())
def test_a_norm_is_right_or_refused(kernels: str, data: st.DataObject) -> None:
    width = data.draw(SIZES.filter(bool))
    weight = data.draw(tensors(width, dtypes=DTYPES))
    x = data.draw(tensors(data.draw(SIZES), data.draw(st.one_of(st.just(width), SIZES))))
    try:
        found = RmsNorm(build(kernels), weight, 1e-5)(x)
    except REFUSED:
        assert x.shape[1] != width or x.dtype not in DTYPES
        return
    wide = x.double()
    assert close(found, wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double())


BLOCK, BLOCKS = 4, 12


@st.composite
def any_row(draw: st.DrawFn) -> Row:
    written = draw(st.integers(1, 20))
    end = draw(st.integers(1, written)) if draw(st.integers(0, 19)) < 19 else draw(st.integers(-2, 2**62))
    start = (
        draw(st.integers(0, max(end - 1, 0))) if draw(st.integers(0, 19)) < 19 else draw(st.integers(-(2**62), 2**62))
    )
    count = min(-(-max(end, 1) // BLOCK), 9) - (draw(st.integers(0, 19)) == 19)
    ids = st.integers(0, BLOCKS - 1) if draw(st.integers(0, 19)) < 19 else st.integers(-(2**31), 2**31 - 1)
    blocks = array("i", draw(st.lists(ids, min_size=count, max_size=count, unique=True)))
    return Row(Request("r", (1,)), list(range(written)), start, end, (blocks,), True)


@every_build
@given(rows=st.lists(any_row(), min_size=1, max_size=3), size=st.sampled_from([4, 4, 4, 1, 0, -3, 2**60]))
def test_rows_are_laid_out_right_or_refused(kernels: str, rows: list[Row], size: int) -> None:
    try:
        found = flatten(build(kernels), rows, size, 99)
    except REFUSED:
        return
    expected = flatten_in_numpy(rows, size, 99)
    assert (found.row_table == expected.row_table).all()
    assert (found.flattened == expected.flattened).all()
    assert (found.table == expected.table).all()


@pytest.mark.slow
@every_build
@given(data=st.data())
def test_attention_is_right_or_refused(kernels: str, data: st.DataObject) -> None:
    draw = data.draw
    kv_heads, group, dims = draw(st.integers(1, 3)), draw(st.integers(1, 3)), st.sampled_from([2, 5, 8, 16, 24])
    key_dim, value_dim, dtype = draw(dims), draw(dims), draw(st.sampled_from(DTYPES))
    rows = draw(st.lists(any_row(), min_size=1, max_size=2))
    form = INT8_KV if draw(st.booleans()) else KvFormat(dtype.itemsize)
    store = KvStore(KvLayout((LayerSpec(kv_heads, key_dim, value_dim),), BLOCK, form), BLOCKS, dtype, CPU)
    try:
        flat = flatten(build(kernels), rows, BLOCK, store.null_block)
    except REFUSED:
        return
    other = draw(st.booleans())

    def part(*shape: int) -> torch.Tensor:
        if other:
            shape = tuple(draw(st.one_of(st.just(size), st.sampled_from([0, 1, size + 1, 40]))) for size in shape)
        made: torch.Tensor = draw(tensors(1, *shape, dtypes=ODD if other else [dtype]))
        return made

    count = len(flat.tokens)
    query, key, value = part(kv_heads * group, count, key_dim), part(kv_heads, count, key_dim), None
    value = part(kv_heads, count, value_dim)
    sinks = part(kv_heads * group)[0] if draw(st.booleans()) else None
    view = draw(
        st.sampled_from(
            [AttentionWindow(), AttentionWindow(WindowKind.SLIDING, 3), AttentionWindow(WindowKind.CHUNKED, 4)]
        )
    )
    call = AttentionCall(0, query, key, value, 0.3, draw(st.sampled_from([None, 2.0])), sinks, None)
    try:
        found = NativeAttention(build(kernels), store, [view], flat).attend(call)
    except REFUSED:
        assert other or not all(0 <= block < BLOCKS for row in rows for block in row.blocks[0])
        return
    assert found.shape == (1, count, query.shape[1], value_dim)  # any multiple of the KV heads may attend
    used = [block for row in rows for block in row.blocks[0]]
    if other or any(row.start for row in rows) or len(set(used)) < len(used):
        return  # another dtype; blocks that nothing wrote, or that two sequences write
    plain = KvStore(store.layout, BLOCKS, dtype, CPU)
    assert close(found, PagedAttention(plain, [view], flat).attend(call))


CPU = torch.device("cpu")
sampler = make_backend(CPU).sampler


@every_build
@pytest.mark.parametrize(
    ("part", "shape", "dtype"),
    [
        ("query", (1, 4, 2, 8), torch.float32),
        ("query", (1, 3, 3, 8), torch.float32),
        ("query", (1, 4, 3, 9), torch.float32),
        ("query", (1, 4, 3, 8), torch.float16),
        ("key", (1, 1, 3, 8), torch.float32),
        ("key", (1, 2, 2, 8), torch.float32),
        ("value", (1, 2, 3, 4), torch.float32),
        ("sinks", (3,), torch.float32),
    ],
)
def test_attention_names_the_operand_that_does_not_fit(
    kernels: str, part: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    store = KvStore(KvLayout((LayerSpec(2, 8, 8),), BLOCK, KvFormat(4)), BLOCKS, torch.float32, CPU)
    row = Row(Request("r", (1,)), [1, 2, 3], 0, 3, (array("i", [0]),), True)
    attention = NativeAttention(build(kernels), store, [AttentionWindow()], flatten(build(kernels), [row], BLOCK, 99))
    parts = {"query": torch.zeros(1, 4, 3, 8), "key": torch.zeros(1, 2, 3, 8), "value": torch.zeros(1, 2, 3, 8)}
    parts["sinks"] = torch.zeros(4)
    fitting = AttentionCall(0, parts["query"], parts["key"], parts["value"], 1.0, None, parts["sinks"], None)
    assert attention.attend(fitting).shape == (1, 3, 4, 8)
    parts[part] = torch.zeros(shape, dtype=dtype)
    call = AttentionCall(0, parts["query"], parts["key"], parts["value"], 1.0, None, parts["sinks"], None)
    with pytest.raises(ValueError, match=part):
        attention.attend(call)


@pytest.mark.slow
@given(data=st.data())
def test_drawing_is_right_or_refused(data: st.DataObject) -> None:
    count, vocabulary = data.draw(st.integers(0, 5)), data.draw(st.sampled_from([0, 1, 7, 48, 1030]))
    logits = data.draw(tensors(count, vocabulary))
    if vocabulary and count and data.draw(st.integers(0, 3)) == 0:
        bad = data.draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
        if logits.is_floating_point():
            logits[data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, vocabulary - 1))] = bad
    rows = [sampled_row(data.draw(st.sampled_from(list(MIXES.values()))), seed=seed) for seed in range(count)]
    if vocabulary < 48:  # their tokens and biases are not of this vocabulary
        requests = [Request("r", (0,), sampling=MIXED) for _ in rows]
        rows = [Row(one, [0], 0, 1, (array("i"),), True, SamplerState(one)) for one in requests]
    try:
        found, tokens = sampler.top_tokens(logits), sampler.sample(rows, logits, frozenset())
    except (*REFUSED, RuntimeError, IndexError):
        assert not vocabulary or not logits.is_floating_point() or not logits.isfinite().all()
        return
    assert len(tokens) == count
    assert all(0 <= token < vocabulary for token in tokens)
    if logits.is_floating_point() and logits.isfinite().all():
        assert found.finite
        assert torch.equal(found.scores.to(logits.dtype), logits.amax(-1))


MIXED = sampled_row({"top_k": 5, "top_p": 0.9}).request.sampling


@every_build
@given(data=st.data())
def test_invalid_sizes_are_refused(kernels: str, data: st.DataObject) -> None:
    """The memory is enough for sizes up to 4."""
    module = build(kernels)
    memory = torch.zeros(1 << 14, dtype=torch.uint8)
    at = -(-memory.data_ptr() // 64) * 64
    half = data.draw(st.booleans())
    where = st.sampled_from([at, at, at, 0])
    size, threads = st.integers(-3, 4), st.sampled_from([1, 2, 0, -1, 2**31 - 1])
    one: dict[str, Callable[[], Any]] = {
        "pack": lambda: module.pack(half, at, 0, data.draw(size), data.draw(size)),
        "pack_codes": lambda: module.pack_codes(
            half,
            data.draw(st.booleans()),
            data.draw(size),
            at,
            at,
            *(data.draw(where) for _ in "zm"),
            half,
            0,
            *sizes(3),
        ),
        "multiply": lambda: module.multiply(
            half, data.draw(size), data.draw(where), at, 0, at, *sizes(3), data.draw(threads)
        ),
        "attend": lambda: module.attend(half, half, 0, at, at, data.draw(threads)),
        "layers": lambda: module.layers(half, at, data.draw(size), at, at, at, at, 1, 0, data.draw(threads)),
        "rms_norm": lambda: module.rms_norm(half, data.draw(where), at, at, *sizes(2), 1e-5, data.draw(threads)),
        "gate": lambda: module.gate(half, data.draw(where), at, at, *sizes(3), data.draw(threads)),
        "rotate": lambda: module.rotate(half, data.draw(where), at, at, at, *sizes(5), data.draw(threads)),
        "highest": lambda: module.highest(half, data.draw(where), at, at + 64, *sizes(3), data.draw(threads)),
        "draw": lambda: module.draw(data.draw(where), at, *sizes(2), data.draw(threads)),
    }

    def sizes(count: int) -> list[int]:
        return [data.draw(size) for _ in range(count)]

    name = data.draw(st.sampled_from(list(one)))
    with contextlib.suppress(ValueError):
        one[name]()


@pytest.mark.slow
@every_build
def test_no_memory_within_a_parallel_region_is_a_memory_error(kernels: str) -> None:
    module = "tests.engine.little_memory"
    if os.environ.get("LD_PRELOAD"):  # a sanitizer maps terabytes
        command, plain = [sys.executable, "-m", module, kernels], {**os.environ, "LD_PRELOAD": ""}
        done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=600, check=False)
    else:
        done = fork_server.completed(module, kernels, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["multiplying", "True", "drawing", "True", "attending", "True"]
