from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

pytest.importorskip("triton")

from decant.engine.cuda import fused_layer
from decant.engine.cuda.fused_layer import Norm, NormForward, TritonLayer, fuse
from decant.engine.cuda.rotary import RotaryForward, try_rotary
from decant.engine.model.attention.interface import NAME, AttentionCall
from tests import gpu
from tests.engine import tiny

pytestmark = pytest.mark.slow

DEVICE = torch.device(gpu.device_type())


def model_of(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    saved = tiny.save(tiny.config(name), folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype, attn_implementation=NAME)
    model.to(DEVICE)  # type: ignore[arg-type]
    return model


def fused(model: nn.Module) -> list[TritonLayer]:
    return [module.forward for module in model.modules() if isinstance(module.forward, TritonLayer)]


@pytest.mark.parametrize(("name", "dtype"), [("llama_mha", torch.float32), ("qwen3", torch.bfloat16)])
def test_layers_with_the_usual_parts_are_fused(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of(name, tmp_path, dtype)
    assert fuse(model, dtype) == 2
    assert len(fused(model)) == 2
    assert isinstance(model.model.norm.forward, NormForward), "the norm behind the layers"
    assert isinstance(model.model.rotary_emb.forward, RotaryForward)


def test_weights_of_merged_products_are_held_once_and_serve_the_original_layer(tmp_path: Path) -> None:
    model = model_of("qwen2", tmp_path, torch.float32)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    layer = model.model.layers[0]
    linears = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    expected = [linear(hidden) for linear in linears]
    assert fuse(model, torch.float32) == 2
    qkv, gate_up = fused(model)[0].merged
    torch.testing.assert_close(qkv(hidden), torch.cat(expected, 1))
    for linear, one in zip(linears, expected, strict=True):
        torch.testing.assert_close(linear(hidden), one)
    for merged, parts in ((qkv, linears), (gate_up, [layer.mlp.gate_proj, layer.mlp.up_proj])):
        assert isinstance(merged, nn.Linear)
        assert {part.weight.untyped_storage().data_ptr() for part in parts} == {
            merged.weight.untyped_storage().data_ptr()
        }
    assert qkv.bias is not None


def test_products_of_different_kinds_are_not_merged() -> None:
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    with pytest.raises(LookupError, match="different kinds"):
        fused_layer.merge_linears((one, other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_angles_are_those_of_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    module = model_of("llama", tmp_path).model.rotary_emb
    forward = try_rotary(module)
    assert forward is not None
    x, positions = torch.zeros(1, device=DEVICE, dtype=dtype), torch.tensor([[3, 0, 900_000, 12]], device=DEVICE)
    for one, other in zip(forward(x, positions), module(x, positions), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, atol=1e-3 if dtype == torch.float32 else 1e-2, rtol=0.0)
    twice = positions.expand(2, -1)
    assert torch.equal(forward(x, twice)[0], module(x, twice)[0]), "another call goes to the original"


def test_angles_that_depend_on_the_longest_position_are_left_to_transformers(tmp_path: Path) -> None:
    module = model_of("llama", tmp_path).model.rotary_emb
    module.rope_type = "dynamic"
    assert try_rotary(module) is None
    module.rope_type = "default"
    module.inv_freq += 0.1
    assert try_rotary(module) is not None
    module.attention_scaling = None
    assert try_rotary(module) is None
    assert try_rotary(nn.Linear(2, 2)) is None


def test_layers_with_other_parts_are_left_alone(tmp_path: Path) -> None:
    model = model_of("gemma2", tmp_path)
    assert fuse(model, torch.bfloat16) == 0
    assert not fused(model)
    assert not isinstance(model.model.norm.forward, NormForward), "its weights are relative to one"


def test_a_layer_with_another_activation_fails_its_trial(tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    model.model.layers[1].mlp.act_fn = nn.GELU()
    assert fuse(model, torch.bfloat16) == 1
    assert isinstance(model.model.layers[0].forward, TritonLayer)


def test_no_layer_is_fused_if_a_launch_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", tmp_path)
    launches = []
    run = Norm._run

    def failing(*args: torch.Tensor) -> torch.Tensor:
        launches.append(args)
        if len(launches) > 2:
            raise RuntimeError("out of shared memory")
        return run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Norm, "_run", failing)
    with pytest.raises(RuntimeError, match="shared memory"):
        fuse(model, torch.bfloat16)
    assert not fused(model)


def test_a_call_outside_a_step_goes_to_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", tmp_path)
    layer = model.model.layers[0]
    monkeypatch.setattr(layer, "forward", lambda hidden, *args, **kwargs: "original")
    layer_of = TritonLayer(layer.forward, fused_layer.Parts(layer), tiny_call())
    hidden = torch.zeros(1, 1, 64, device=DEVICE, dtype=torch.bfloat16)
    angles = (torch.zeros(1, 1, 16, device=DEVICE, dtype=torch.bfloat16),) * 2
    assert layer_of(hidden, position_embeddings=angles) == "original"


def tiny_call() -> AttentionCall:
    part = torch.zeros(1, 2, 0, 16, dtype=torch.bfloat16)
    return AttentionCall(0, part, part, part, 1.0, None, None, None)
