"""Fused decoder layers have the bits of their parts. Other layers, and other calls, are left alone."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

import decant.engine.cpu.fused_layer as fused_layer
from decant.engine.cpu import model_patches
from decant.engine.cpu.backend import CpuBackend
from decant.engine.cpu.fused_layer import FusedLayer, _Trial, unfuse
from decant.engine.cpu.gemm import _PANELS
from decant.engine.cpu.kernels import KERNELS
from decant.engine.cpu.model_patches import LookaheadLayer
from decant.engine.cpu.optimize import optimize
from decant.engine.model.attention import NAME, attending
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.model import ModelConfig, ModelDevice, load
from decant.engine.model.runner import ModelRunner
from decant.engine.plan import Row
from decant.engine.request import Request
from tests.engine import tiny

pytestmark = pytest.mark.skipif(
    KERNELS is None or _PANELS is None, reason="linear layers are not ours on this CPU, or no compiler was here"
)

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Multiples of the vector width, as in all real models."""
FUSED = ["llama", "mistral", "qwen2", "qwen3", "granite"]
"""Plain; with windows; with biases; with norms of queries and keys; with a scale of its own."""
STEPS = [[("a", 0, 33)], [("b", 0, 5)], [("a", 33, 34), ("b", 5, 40)], [("a", 34, 35), ("b", 40, 41)]]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def device_of(folder: Path, name: str, dtype: str = "float32", **changes: Any) -> ModelDevice:
    tiny.save(tiny.config(name, **{**WIDE, **changes}), folder)
    return load(ModelConfig(str(folder), dtype=dtype, device="cpu", kv_bytes=4 << 20))


def fused(device: ModelDevice) -> list[LookaheadLayer]:
    layers = [layer for _, layer in fused_layer.fused_layers(device.model)]
    assert all(isinstance(layer, LookaheadLayer) for layer in layers)
    return layers  # type: ignore[return-value]


def row(tokens: list[int], start: int, end: int, blocks: array[int]) -> Row:
    return Row(Request("r", tuple(tokens)), tokens, start, end, blocks, True)


@torch.inference_mode()
def written(device: ModelDevice) -> list[torch.Tensor]:
    """The logits of all steps, and the blocks after them."""
    device.store.blocks.zero_()
    tokens = {id: list(tiny.prompt(50, seed)) for seed, id in enumerate("ab")}
    blocks = {"a": array("i", [3, 1, 5, 7]), "b": array("i", [2, 0, 4, 6])}
    found = []
    for step in STEPS:
        rows = [
            Row(Request(id, tuple(tokens[id])), tokens[id], start, end, blocks[id], True) for id, start, end in step
        ]
        rows.sort(key=lambda row: row.end - row.start > 1)
        found.append(device.runner.logits(rows, np.arange(sum(row.end - row.start for row in rows))).clone())
    return [*found, device.store.blocks.clone()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_layer_has_the_bits_of_its_parts(name: str, dtype: str, tmp_path: Path) -> None:
    device = device_of(tmp_path, name, dtype, **({"residual_multiplier": 1.0} if name == "granite" else {}))
    assert len(fused(device)) == 2
    whole = written(device)
    assert equal(written(device), whole), "scratch memory of an earlier step is not read"
    torch.set_num_threads(3 - torch.get_num_threads())
    assert equal(written(device), whole), "with other threads"
    layers = unfuse(device.model)
    assert not fused(device)
    assert equal(written(device), whole)
    for module, layer in layers:
        module.forward = layer
    assert len(fused(device)) == 2


@pytest.mark.slow
def test_layers_as_wide_as_in_real_models_are_fused(tmp_path: Path) -> None:
    """A wider layer has more sums whose last bit can differ, so its trial is stricter."""
    wide = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "head_dim": 64}
    device = device_of(tmp_path, "qwen2", "bfloat16", **wide, num_hidden_layers=6)
    assert len(fused(device)) == 6


KEPT: tuple[list[int], ...] = ([], [3], [11], [12], [3, 11, 12, 13, 48], [13, 30, 48], [0, 4], list(range(49)))
"""Of a step of 1, 1, 2, 9 and 36 tokens: none, some of one sequence, some of several, all."""


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_the_last_layer_computes_only_tokens_whose_logits_are_used(name: str, dtype: str, tmp_path: Path) -> None:
    device = device_of(tmp_path, name, dtype)
    assert len(fused(device)) == 2
    tokens = [list(tiny.prompt(60, seed)) for seed in range(5)]
    tables = [array("i", [index, 5 + index, 10 + index, 15 + index]) for index in range(5)]
    spans = [(40, 41), (7, 8), (0, 2), (20, 29), (1, 37)]
    before = [row(tokens[n], 0, start, tables[n]) for n, (start, _) in enumerate(spans) if start]
    rows = [row(tokens[n], start, end, tables[n]) for n, (start, end) in enumerate(spans)]
    stops = np.cumsum([end - start for start, end in spans])
    device.runner.logits(sorted(before, key=lambda row: row.end == 1, reverse=True), np.arange(0))
    blocks, hidden = device.store.blocks.clone(), []
    device.model.get_submodule("model.norm").register_forward_pre_hook(
        lambda _, given: hidden.append(given[0][0].clone())
    )
    whole = device.runner.logits(rows, np.arange(49))
    written = device.store.blocks.clone()
    for kept in KEPT:
        device.store.blocks.copy_(blocks)
        logits = device.runner.logits(rows, np.array(kept, np.int64))
        assert torch.equal(logits, whole[kept]), kept
        assert torch.equal(device.store.blocks, written), kept
        read = np.zeros(49, bool)
        for stop, (start, end) in zip(stops.tolist(), spans, strict=True):
            read[min([at for at in kept if stop - end + start <= at < stop], default=stop) : stop] = True
        assert torch.equal(hidden[-1], torch.where(torch.from_numpy(read)[:, None], hidden[0], 0.0))


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
    """Scales distant tokens; the fused layer ignores positions."""

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        answer: torch.Tensor = super().forward(*given, **named)
        positions: torch.Tensor = named["position_ids"]
        return answer * (1 - 0.5 * (positions > 1000)[..., None].to(answer.dtype))


class NeedsArgument(LlamaDecoderLayer):
    """Needs an argument that the trial does not pass."""

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
    optimize(model, torch.float32)
    assert [isinstance(layer.forward, FusedLayer) for layer in model.model.layers] == [False, True]


def _more_values(layer: Any) -> None:
    layer.self_attn.v_proj = nn.Linear(128, 128, bias=False)


def _narrower_norm(layer: Any) -> None:
    layer.self_attn.q_norm = LlamaRMSNorm(16)


def _a_head_that_divides_nothing(layer: Any) -> None:
    layer.self_attn.head_dim = 24


CHANGES = [_more_values, _narrower_norm, _a_head_that_divides_nothing]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_parts_with_other_widths_are_not_tried(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes addresses: it would read outside the tensors."""
    tried: list[Any] = []
    run = _Trial.run

    def noted(trial: _Trial, forward: Any) -> Any:
        tried.append(forward)
        return run(trial, forward)

    monkeypatch.setattr(_Trial, "run", noted)
    made = tiny.config("llama", **WIDE)
    assert isinstance(made, LlamaConfig)
    model = LlamaForCausalLM(made).float()
    model.set_attn_implementation(NAME)
    change(model.model.layers[0])
    optimize(model, torch.float32)
    assert [isinstance(layer.forward, FusedLayer) for layer in model.model.layers] == [False, True]
    layer = model.model.layers[1].forward
    assert isinstance(layer, FusedLayer)
    assert tried == [layer.original_forward, layer]


@pytest.mark.parametrize("wrong", ["answer", "blocks"])
def test_a_fused_layer_with_one_other_bit_is_not_used(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bit of one number is enough."""
    assert KERNELS is not None
    right = KERNELS.layers

    def layers(*arguments: Any) -> None:
        right(*arguments)
        _flip(arguments[7] if wrong == "answer" else _first(calls_of(*arguments[1:3])[1]))

    monkeypatch.setattr(fused_layer, "KERNELS", SimpleNamespace(layers=layers, attend=KERNELS.attend))
    assert not fused(device_of(tmp_path, "llama"))


def calls_of(calls: int, count: int) -> list[int]:
    """The kernel's LayerCall structs, four addresses each: layer, cache, visible, selected."""
    return list((ctypes.c_uint64 * (4 * count)).from_address(calls))


def _first(cache: int) -> int:
    """The blocks' memory, the first field of the kernel's Cache struct."""
    return ctypes.c_int64.from_address(cache).value


def _flip(address: int) -> None:
    word = ctypes.c_uint32.from_address(address)
    word.value ^= 1


Called = tuple[tuple[Any, ...], dict[str, Any]]
PLAIN = "as in a step"


def calls(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Called]:
    """A step's call of a layer, and other calls."""
    cos, sin = angles
    return {
        PLAIN: ((x,), {"position_embeddings": angles}),
        "two at once": ((x.expand(2, -1, -1),), {"position_embeddings": angles}),
        "another dtype": ((x.double(),), {"position_embeddings": angles}),
        "angles in another dtype": ((x,), {"position_embeddings": (cos.double(), sin)}),
        "not side by side": ((x.mT.contiguous().mT,), {"position_embeddings": angles}),
        "angles that are not": ((x,), {"position_embeddings": (cos, sin.mT.contiguous().mT)}),
        "fewer angles": ((x,), {"position_embeddings": (cos[:, :1], sin[:, :1])}),
        "narrower angles": ((x,), {"position_embeddings": (cos[..., :16], sin[..., :16])}),
        "no angles": ((x,), {}),
        "in order": ((x, None), {"position_embeddings": angles}),
        "a cache": ((x,), {"position_embeddings": angles, "past_key_values": object()}),
    }


@torch.inference_mode()
def test_unsupported_calls_go_to_the_original_forward(tmp_path: Path) -> None:
    device = device_of(tmp_path, "llama")
    layer = fused(device)[0]
    seen: list[Called] = []

    def original(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "original"

    layer.original_forward = original
    flat = device.runner.flatten([row([1, 2, 3], 0, 3, array("i", [0]))])
    for name, (given, named) in calls(torch.randn(1, 3, 128), (torch.randn(1, 3, 32), torch.randn(1, 3, 32))).items():
        seen.clear()
        with attending(
            device.backend.make_attention(device.store, [AttentionWindow(), AttentionWindow()], flat, np.arange(3))
        ):
            answer = layer(*given, **named)
        assert (answer == "original") == (name != PLAIN), name
        assert seen == ([] if name == PLAIN else [(given, named)]), name


def test_without_compiled_attention_layers_run_unfused(tmp_path: Path) -> None:
    device = device_of(tmp_path, "llama")
    whole = written(device)
    device.runner = ModelRunner(device.model, device.store, device.runner._views, frozenset(), CpuBackend())
    for ours, theirs in zip(whole, written(device), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# -- lookahead --------------------------------------------------------------------------------------------------------


def record_order(device: ModelDevice) -> list[LookaheadLayer]:
    """Layers in the order in which they are computed from now on."""
    done: list[LookaheadLayer] = []
    by_address = {layer._address: layer for layer in fused(device)}
    for layer in by_address.values():

        def noted(half: bool, calls: int, count: int, *more: Any, kernel: Any = layer._kernel) -> None:
            done.extend(by_address[address] for address in calls_of(calls, count)[::4])
            kernel(half, calls, count, *more)

        layer._kernel = noted
    return done


def run_alone(layers: list[LookaheadLayer]) -> None:
    for layer in layers:
        layer.follower = None


@pytest.mark.parametrize("kept", [model_patches.LOOKAHEAD_BYTES, 2 * 40 * 128 * 4, 1])
def test_following_layers_are_computed_ahead_and_once(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_patches, "LOOKAHEAD_BYTES", kept)
    device = device_of(tmp_path, "llama", num_hidden_layers=5)
    layers, done = fused(device), record_order(device)
    assert len(layers) == 5
    ahead = written(device)
    assert done == layers * len(STEPS)
    assert [layer.follower for layer in layers] == [*layers[1:], None]
    run_alone(layers)
    assert equal(written(device), ahead)


def test_the_full_slice_of_the_layers_is_the_list_itself(tmp_path: Path) -> None:
    layers: Any = device_of(tmp_path, "llama", num_hidden_layers=3).model.get_submodule("model.layers")
    assert layers[:3] is layers
    assert list(layers[:2]) == list(layers)[:2]
    assert list(layers[1:]) == [layers[1], layers[-1]]
    assert len(layers[:9]) == 3


def write_to_input(layer: LookaheadLayer, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
    hidden[..., :3] *= 0.5
    return layer(hidden, **named)


def pass_another_input(layer: LookaheadLayer, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
    return layer(hidden * 0.5, **named)


def pass_other_sin(layer: LookaheadLayer, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
    cos, sin = named["position_embeddings"]
    return layer(hidden, **{**named, "position_embeddings": (cos, sin * 0.5)})


def pass_other_cos(layer: LookaheadLayer, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
    cos, sin = named["position_embeddings"]
    return layer(hidden, **{**named, "position_embeddings": (cos * 0.5, sin)})


def call_original(layer: LookaheadLayer, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
    return layer.original_forward(hidden, **named)


@pytest.mark.parametrize("between", [write_to_input, pass_another_input, pass_other_sin, pass_other_cos, call_original])
def test_an_unexpected_call_is_computed_and_ends_the_lookahead(
    between: Callable[[LookaheadLayer, torch.Tensor, dict[str, Any]], Any], tmp_path: Path
) -> None:
    device = device_of(tmp_path, "llama", num_hidden_layers=3)
    first, second, third = fused(device)
    record_order(device)

    def forward(hidden: torch.Tensor, **named: Any) -> Any:
        return between(second, hidden, named)

    model: Any = device.model.model
    model.layers[1].forward = forward
    found = written(device)
    assert first.follower is None
    run_alone([first, second, third])
    assert equal(found, written(device))
