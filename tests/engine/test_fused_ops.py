from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import CohereConfig, Gemma2Config, GlmConfig, LlamaConfig, PreTrainedConfig
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)

from decant.engine.cpu import fused_ops
from decant.engine.cpu.fused_ops import GatedMlp, RmsNorm, Rotation
from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.cpu.linear import pack
from decant.engine.cpu.model_patches import ROTATION, patch_rotation

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
    model = nn.ModuleDict({"part": module})
    pack(model, _kernels())
    fused_ops.fuse(model, dtype, _kernels())
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
    tolerance = 2**-6 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours(x), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@torch.inference_mode()
def test_silu_is_recognised_in_every_form_of_the_activation() -> None:
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
def test_a_row_with_nan_does_not_affect_others(value: float) -> None:
    ours = fused(norm(64, torch.bfloat16), torch.bfloat16)
    x = rows(3, 64, torch.bfloat16)
    expected = ours(x)
    x[0, 1, 5] = value
    got = ours(x)
    assert not got[0, 1].isfinite().all()
    assert torch.equal(got[0, ::2], expected[0, ::2])


class Twice(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 1.01
        return down


class Unrounded(LlamaRMSNorm):
    """Norm that multiplies by its weight before it rounds, not after."""

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
def test_modules_that_compute_something_else_are_left_alone(module: nn.Module) -> None:
    module = module.to(torch.bfloat16)
    assert fused(module, torch.bfloat16) is module


def test_modules_of_another_dtype_are_left_alone() -> None:
    module = norm(64, torch.float32)
    assert fused(module, torch.bfloat16) is module


# ------------------------------------------------------------------------------------------------- rotations


def attention(dtype: torch.dtype, heads: int = 4, head_dim: int = 64) -> LlamaAttention:
    torch.manual_seed(head_dim)
    config = LlamaConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_dim,
    )
    config._attn_implementation = "eager"
    return LlamaAttention(config, layer_idx=0).to(dtype)


def angles(tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    position = torch.arange(tokens)[:, None] * torch.rand(width, generator=torch.Generator().manual_seed(1))
    return position.cos()[None].to(dtype), position.sin()[None].to(dtype)


def laid_out(heads: int, tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return rows(tokens, heads * width, dtype).view(1, tokens, heads, width).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 6, 64, 80, 128])
@pytest.mark.parametrize("tokens", [1, 33])
@torch.inference_mode()
def test_a_rotation_has_the_bits_of_transformers(tokens: int, width: int, dtype: torch.dtype) -> None:
    query, key = laid_out(6, tokens, width, dtype), laid_out(2, tokens, width, dtype)
    ours = Rotation(_kernels(), never)
    for x in (query, query.contiguous()):
        expected, got = (turn(x, key, *angles(tokens, width, dtype)) for turn in (apply_rotary_pos_emb, ours))
        for one, other in zip(expected, got, strict=True):
            assert torch.equal(one, other)


@torch.inference_mode()
def test_other_layouts_are_rotated_by_transformers() -> None:
    result = list[torch.Size]()

    def theirs(query: torch.Tensor, key: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        result.append(query.shape)
        return query, key

    ours, dtype = Rotation(_kernels(), theirs), torch.bfloat16
    x = laid_out(2, 5, 64, dtype)
    ours(x, x, *angles(5, 32, dtype))
    ours(x, x, *angles(5, 64, torch.float32))
    both, (cos, sin) = torch.cat([x, x]), angles(5, 64, dtype)
    ours(both, both, cos, sin)
    ours(both, both, torch.cat([cos, cos]), torch.cat([sin, sin]))
    ours(x, x, cos[:, :, :63], sin[:, :, :63])
    ours(x[..., :63], x[..., :63], cos[..., :63].contiguous(), sin[..., :63].contiguous())
    ours(x, x, cos.mT.contiguous().mT, sin)
    ours(x[..., ::2], x[..., ::2], cos[..., :32].contiguous(), sin[..., :32].contiguous())
    ours(x.double(), x.double(), cos.double(), sin.double())
    ours(x, x, cos, sin, unsqueeze_dim=2)
    assert len(result) == 10


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_attention_calls_the_fused_rotation_with_the_same_result(dtype: torch.dtype) -> None:
    module = attention(dtype)
    x, where = rows(9, 256, dtype), angles(9, 64, dtype)
    expected, _ = module(x, where, None)
    patch_rotation(module, dtype, _kernels())
    assert isinstance(vars(module)["forward"].__globals__[ROTATION], Rotation)
    got, _ = module(x, where, None)
    assert torch.equal(got, expected)
    assert modeling_llama.apply_rotary_pos_emb is apply_rotary_pos_emb  # not replaced


@pytest.mark.parametrize(
    ("kind", "config"),
    [(CohereAttention, CohereConfig), (GlmAttention, GlmConfig)],  # neighbours are pairs; only a part is turned
)
def test_another_rotation_is_left_alone(kind: type[nn.Module], config: Callable[..., PreTrainedConfig]) -> None:
    module = kind(config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16), layer_idx=0)
    patch_rotation(module, torch.float32, _kernels())
    assert "forward" not in vars(module)


def never(*_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("theirs was called")


def _kernels() -> ModuleType:
    assert KERNELS is not None
    return KERNELS
