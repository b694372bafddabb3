from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from decant.engine.cpu.backend import NativeBackend
from decant.engine.cpu.fused_layer import NativeLayer
from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.cpu.optimize import optimize
from decant.engine.loading import load
from decant.engine.model.attention.interface import NAME
from decant.engine.model.decoder_layer import Trial
from decant.engine.model.model import ModelConfig
from tests.engine import tiny
from tests.engine.fused_layer.harness import WIDE, calls_of, fused, needs_kernels, saved

pytestmark = needs_kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("granite", {"residual_multiplier": 0.5}),  # the same parts, another sum
        ("gemma2", {}),  # norms of another kind, and more of them
        ("phi3", {}),  # queries, keys and values in one
        ("gpt2", {}),
        ("mixtral", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"intermediate_size": 100}),  # its rows are wider than it
    ],
)
def test_other_layers_are_not_fused(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    made = tiny.config(name)
    known = {key: value for key, value in {**WIDE, **changes}.items() if hasattr(made, key)}
    tiny.save(tiny.config(name, **known), tmp_path)
    assert not fused(load(ModelConfig(str(tmp_path), dtype="float32", device="cpu", kv_bytes=4 << 20)))


class DistanceScaled(LlamaDecoderLayer):
    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        answer: torch.Tensor = super().forward(*given, **named)
        positions: torch.Tensor = named["position_ids"]
        return answer * (1 - 0.5 * (positions > 1000)[..., None].to(answer.dtype))


class NeedsArgument(LlamaDecoderLayer):
    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        answer: torch.Tensor = super().forward(*given, **named)
        factor: torch.Tensor = named["something"]
        return answer * factor


@pytest.mark.parametrize("other", [DistanceScaled, NeedsArgument])
def test_a_similar_layer_is_not_fused_beside_one_that_is(other: type[LlamaDecoderLayer]) -> None:
    made = tiny.config("llama", **WIDE)
    assert isinstance(made, LlamaConfig)
    model = LlamaForCausalLM(made).float()
    model.set_attn_implementation(NAME)
    model.model.layers[0].__class__ = other
    assert KERNELS is not None
    optimize(model, torch.float32, KERNELS)
    assert [isinstance(layer.forward, NativeLayer) for layer in model.model.layers] == [False, True]


def _more_values(layer: Any) -> None:
    layer.self_attn.v_proj = nn.Linear(128, 128, bias=False)


def _narrower_norm(layer: Any) -> None:
    layer.self_attn.q_norm = LlamaRMSNorm(16)


def _head_width_that_does_not_divide(layer: Any) -> None:
    layer.self_attn.head_dim = 24


CHANGES = [_more_values, _narrower_norm, _head_width_that_does_not_divide]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_parts_with_other_widths_are_not_tried(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    run = Trial.run

    def noted(trial: Trial, forward: Any) -> Any:
        tried.append(forward)
        return run(trial, forward)

    monkeypatch.setattr(Trial, "run", noted)
    made = tiny.config("llama", **WIDE)
    assert isinstance(made, LlamaConfig)
    model = LlamaForCausalLM(made).float()
    model.set_attn_implementation(NAME)
    change(model.model.layers[0])
    assert KERNELS is not None
    optimize(model, torch.float32, KERNELS)
    assert [isinstance(layer.forward, NativeLayer) for layer in model.model.layers] == [False, True]
    layer = model.model.layers[1].forward
    assert isinstance(layer, NativeLayer)
    assert tried == [layer.original_forward, layer]


@pytest.mark.parametrize("wrong", ["answer", "blocks"])
def test_a_fused_layer_with_one_other_bit_is_not_used(wrong: str, tmp_path: Path) -> None:
    assert KERNELS is not None
    right, kernels = KERNELS.layers, ModuleType(KERNELS.__name__)

    def layers(*arguments: Any) -> None:
        right(*arguments)
        _flip(arguments[6] if wrong == "answer" else _first(calls_of(*arguments[1:3])[1]))

    vars(kernels).update(vars(KERNELS), layers=layers)
    assert not fused(load(saved(tmp_path, "llama"), backend=NativeBackend(kernels)))


def _first(cache: int) -> int:
    """The blocks' memory, the first field of the kernel's Cache struct."""
    return ctypes.c_int64.from_address(cache).value


def _flip(address: int) -> None:
    word = ctypes.c_uint32.from_address(address)
    word.value ^= 1
