"""Keys and values in 8 bits: what a block stores of them, and what a read gives back."""

from __future__ import annotations

import pytest
import torch

from decant.engine.kv_layout import INT8_KV, KvFormat, KvLayout, LayerSpec
from decant.engine.model.kv_store import KvStore
from decant.engine.model.kv_vectors import encode

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def randoms(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e4, 1e37])
def test_a_number_is_within_half_a_step_of_its_vector(size: float, dtype: torch.dtype) -> None:
    vectors = (randoms(50, 3, 24) * size).to(dtype)
    codes, scales = encode(vectors)
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.int8, torch.bfloat16, (50, 3))
    steps = scales.double()[..., None]
    assert ((codes.double() * steps - vectors.double()).abs() <= 0.5001 * steps).all()
    assert (codes.abs().amax(-1) >= 126).all()
    assert (codes >= -127).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_times_their_scale_are_stored_again_as_the_same_codes(dtype: torch.dtype) -> None:
    codes, scales = encode(randoms(40, 2, 16, dtype=dtype))
    again, same = encode(codes.float() * scales.float()[..., None])
    where = codes.abs().amax(-1) == 127
    assert where.any()
    assert torch.equal(codes[where], again[where])
    assert torch.equal(scales[where], same[where])


def test_zeros_stay_zeros_and_numbers_that_are_not_finite_read_as_nan() -> None:
    vectors = randoms(4, 1, 8)
    vectors[0] = 0
    vectors[1, 0, 3] = float("nan")
    vectors[2, 0, 5] = float("-inf")
    codes, scales = encode(vectors)
    read = codes.float() * scales.float()[..., None]
    assert not read[0].any()
    assert read[1:3].isnan().all()
    assert read[3].isfinite().all()


def test_a_store_reads_what_was_put_into_slots_of_blocks_that_are_moved() -> None:
    layers = (LayerSpec(2, 8, 8), LayerSpec(3, 6, 4), LayerSpec(1, 5, 3))
    layout = KvLayout(layers, 4, INT8_KV)
    sender, receiver = KvStore(layout, 3, torch.bfloat16, CPU), KvStore(layout, 3, torch.bfloat16, CPU)
    blocks, slots = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([1, 3, 0, 1, 2])
    put = [(randoms(5, spec.kv_heads, spec.key_dim), randoms(5, spec.kv_heads, spec.value_dim) + 1) for spec in layers]
    for layer, kv in enumerate(put):
        sender.put(layer, blocks, slots, kv)
    for block in range(3):
        receiver.write(block, bytes(sender.read(block)))
    for layer, kv in enumerate(put):
        for given, read in zip(kv, receiver.gather(layer, torch.tensor([[0, 1, 2]])), strict=True):
            codes, scales = encode(given)
            there = read[0].unflatten(0, (3, 4))
            assert torch.equal(there[blocks, slots], codes.float() * scales.float()[..., None])
            assert there[blocks, slots].count_nonzero() == there.count_nonzero(), "nothing is written elsewhere"


@pytest.mark.parametrize(("dim", "share"), [(32, 1.88), (64, 1.93), (128, 1.96)])
def test_blocks_have_nearly_half_of_the_bytes_of_bfloat16(dim: int, share: float) -> None:
    layers = (LayerSpec(2, dim, dim),) * 3
    plain, coded = (KvLayout(layers, 16, form).block_bytes for form in (KvFormat(2), INT8_KV))
    assert plain > share * coded
