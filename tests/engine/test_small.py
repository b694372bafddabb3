"""Compiled norms and gated layers: what they stand for, the same bits for a row anywhere, and nothing else replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from engine import linears, small
from engine.native import KERNELS
from engine.small import GatedMlp, RmsNorm

pytestmark = pytest.mark.skipif(KERNELS is None, reason="this CPU has no AVX2, or no compiler was here")

DTYPES = [torch.bfloat16, torch.float32]
WIDTHS = [1, 7, 64, 65, 896]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def norm(width: int, dtype: torch.dtype) -> LlamaRMSNorm:
    made = LlamaRMSNorm(width, eps=1e-6)
    made.weight.data = torch.randn(width, generator=torch.Generator().manual_seed(width))
    return made.to(dtype)


def mlp(width: int, inner: int, dtype: torch.dtype, bias: bool = False) -> LlamaMLP:
    torch.manual_seed(width)
    config = LlamaConfig(hidden_size=width, intermediate_size=inner, mlp_bias=bias, num_attention_heads=1)
    return LlamaMLP(config).to(dtype)


def fused(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """What a model whose only part is ``module`` has in its place."""
    model = nn.ModuleDict({"part": module})
    linears.pack(model)
    small.fuse(model, dtype)
    return model["part"]


def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1, count, width, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@torch.inference_mode()
def test_a_norm_is_what_transformers_computes(width: int, dtype: torch.dtype) -> None:
    theirs = norm(width, dtype)
    x = rows(50, width, dtype) * 10
    expected, ours = theirs(x), fused(theirs, dtype)
    assert isinstance(ours, RmsNorm)
    torch.testing.assert_close(ours(x), expected, rtol=2**-7 if dtype == torch.bfloat16 else 2e-6, atol=0)
    assert ours(x).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "inner"), [(64, 128), (32, 100), (96, 7)])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_gated_layer_is_what_transformers_computes(width: int, inner: int, dtype: torch.dtype, bias: bool) -> None:
    theirs = mlp(width, inner, dtype, bias)
    x = rows(50, width, dtype) * 3
    expected, ours = theirs(x), fused(theirs, dtype)
    assert isinstance(ours, GatedMlp)
    room = 2**-6 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours(x), expected, rtol=room, atol=room * float(expected.abs().max()))


@torch.inference_mode()
def test_the_activation_is_silu_wherever_it_is_looked_at() -> None:
    """Through a gate of ones and an identity: what comes out is silu, from the smallest number to the largest."""
    theirs = mlp(1, 1, torch.float32)
    for linear in (theirs.gate_proj, theirs.up_proj, theirs.down_proj):
        linear.weight.data.fill_(1.0)
    ours = fused(theirs, torch.float32)
    assert isinstance(ours, GatedMlp)
    x = torch.cat([torch.linspace(-80, 80, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4])])[:, None]
    torch.testing.assert_close(ours(x), nn.functional.silu(x) * x, rtol=1e-6, atol=1e-30)
    assert ours(torch.tensor([[float("nan")]])).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [norm, lambda width, dtype: mlp(width, 3 * width + 1, dtype)])
@torch.inference_mode()
def test_a_row_has_the_same_bits_beside_any_others_with_any_threads(
    make: Callable[[int, torch.dtype], nn.Module], dtype: torch.dtype
) -> None:
    ours = fused(make(330, dtype), dtype)
    x = rows(301, 330, dtype)
    torch.set_num_threads(1)
    whole = ours(x)
    for first, end, count in [(0, 1, 1), (7, 9, 2), (3, 100, 2), (1, 301, 2), (0, 301, 2)]:
        torch.set_num_threads(count)
        assert torch.equal(ours(x[:, first:end]), whole[:, first:end])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@torch.inference_mode()
def test_a_row_that_is_no_number_stays_alone(value: float) -> None:
    ours = fused(norm(64, torch.bfloat16), torch.bfloat16)
    x = rows(3, 64, torch.bfloat16)
    expected = ours(x)
    x[0, 1, 5] = value
    got = ours(x)
    assert not got[0, 1].isfinite().all()
    assert torch.equal(got[0, ::2], expected[0, ::2])


class Twice(LlamaMLP):
    """Looks like a gated layer, and is another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 1.01
        return down


class Unrounded(LlamaRMSNorm):
    """Multiplies by its weight before it rounds, not after."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * wide).to(hidden_states.dtype)


def others() -> Iterator[nn.Module]:
    gemma = Gemma2Config(hidden_size=64, intermediate_size=128)
    yield Gemma2RMSNorm(64)
    yield Gemma2MLP(gemma)
    yield nn.LayerNorm(64, bias=False)
    yield Twice(LlamaConfig(hidden_size=64, intermediate_size=128))  # type: ignore[no-untyped-call]
    unrounded = Unrounded(64)
    unrounded.weight.data = torch.randn(64)
    yield unrounded


@pytest.mark.parametrize("module", list(others()), ids=lambda module: type(module).__name__)
def test_what_computes_something_else_stays(module: nn.Module) -> None:
    module = module.to(torch.bfloat16)
    assert fused(module, torch.bfloat16) is module


def test_what_is_kept_in_another_dtype_stays() -> None:
    module = norm(64, torch.float32)
    assert fused(module, torch.bfloat16) is module
