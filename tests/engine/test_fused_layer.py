"""Decoder layers in one call: the bits of their parts. What is another layer, or is called otherwise, is left alone."""

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
from decant.engine.cpu import fused_ops as small
from decant.engine.cpu import linear as linears
from decant.engine.cpu.backend import CpuBackend
from decant.engine.cpu.fused_layer import FusedLayer, _Trial, apart
from decant.engine.cpu.gemm import _PANELS
from decant.engine.cpu.kernels import KERNELS
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
"""As wide as vector loops want it; all real models are."""
JOINED = ["llama", "mistral", "qwen2", "qwen3", "granite"]
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


def joined(device: ModelDevice) -> list[FusedLayer]:
    return [layer for _, layer in fused_layer.joined(device.model)]


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
@pytest.mark.parametrize("name", JOINED)
def test_a_layer_in_one_call_has_the_bits_of_its_parts(name: str, dtype: str, tmp_path: Path) -> None:
    device = device_of(tmp_path, name, dtype, **({"residual_multiplier": 1.0} if name == "granite" else {}))
    assert len(joined(device)) == 2
    whole = written(device)
    assert equal(written(device), whole), "what lies in its memory from before is not seen"
    torch.set_num_threads(3 - torch.get_num_threads())
    assert equal(written(device), whole), "with other threads"
    layers = apart(device.model)
    assert not joined(device)
    assert equal(written(device), whole)
    for module, layer in layers:
        module.forward = layer
    assert len(joined(device)) == 2


@pytest.mark.slow
def test_layers_as_wide_as_those_of_real_models_are_taken(tmp_path: Path) -> None:
    """The wider a layer, the more of its numbers a last bit can turn, and the easier it is refused."""
    wide = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "head_dim": 64}
    device = device_of(tmp_path, "qwen2", "bfloat16", **wide, num_hidden_layers=6)
    assert len(joined(device)) == 6


KEPT: tuple[list[int], ...] = ([], [3], [11], [12], [3, 11, 12, 13, 48], [13, 30, 48], [0, 4], list(range(49)))
"""Of a step of 1, 1, 2, 9 and 36 tokens: nobody's, some of one sequence's, some of several's, all."""


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_after_the_last_layer_only_what_is_read_is_there(name: str, dtype: str, tmp_path: Path) -> None:
    device = device_of(tmp_path, name, dtype)
    assert len(joined(device)) == 2
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
def test_another_layer_stays_as_it_is(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    made = tiny.config(name)
    known = {key: value for key, value in {**WIDE, **changes}.items() if hasattr(made, key)}
    tiny.save(tiny.config(name, **known), tmp_path)
    assert not joined(load(ModelConfig(str(tmp_path), dtype="float32", device="cpu", kv_bytes=4 << 20)))


class Fading(LlamaDecoderLayer):
    """What is far away counts less; our layer knows of no positions."""

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        answer: torch.Tensor = super().forward(*given, **named)
        positions: torch.Tensor = named["position_ids"]
        return answer * (1 - 0.5 * (positions > 1000)[..., None].to(answer.dtype))


class Asking(LlamaDecoderLayer):
    """Wants what no trial gives."""

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        answer: torch.Tensor = super().forward(*given, **named)
        factor: torch.Tensor = named["something"]
        return answer * factor


@pytest.mark.parametrize("other", [Fading, Asking])
def test_a_similar_layer_is_not_fused_beside_one_that_is(other: type[LlamaDecoderLayer]) -> None:
    made = tiny.config("llama", **WIDE)
    assert isinstance(made, LlamaConfig)
    model = LlamaForCausalLM(made).float()
    model.set_attn_implementation(NAME)
    model.model.layers[0].__class__ = other
    linears.pack(model)
    small.fuse(model, torch.float32)
    fused_layer.fuse(model, torch.float32)
    assert [isinstance(layer.forward, FusedLayer) for layer in model.model.layers] == [False, True]


def _more_values(layer: Any) -> None:
    layer.self_attn.v_proj = nn.Linear(128, 128, bias=False)


def _narrower_norm(layer: Any) -> None:
    layer.self_attn.q_norm = LlamaRMSNorm(16)


def _a_head_that_divides_nothing(layer: Any) -> None:
    layer.self_attn.head_dim = 24


CHANGES = [_more_values, _narrower_norm, _a_head_that_divides_nothing]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_parts_that_do_not_fit_are_not_even_tried(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes addresses: it would read what is not there."""
    tried: list[Any] = []
    of = _Trial.of

    def noted(trial: _Trial, forward: Any) -> Any:
        tried.append(forward)
        return of(trial, forward)

    monkeypatch.setattr(_Trial, "of", noted)
    made = tiny.config("llama", **WIDE)
    assert isinstance(made, LlamaConfig)
    model = LlamaForCausalLM(made).float()
    model.set_attn_implementation(NAME)
    change(model.model.layers[0])
    linears.pack(model)
    small.fuse(model, torch.float32)
    fused_layer.fuse(model, torch.float32)
    assert [isinstance(layer.forward, FusedLayer) for layer in model.model.layers] == [False, True]
    layer = model.model.layers[1].forward
    assert isinstance(layer, FusedLayer)
    assert tried == [layer.theirs, layer]


@pytest.mark.parametrize("wrong", ["answer", "blocks"])
def test_a_layer_that_would_answer_otherwise_is_not_taken(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bit of one number is enough."""
    assert KERNELS is not None
    right = KERNELS.layers

    def layers(*arguments: Any) -> None:
        right(*arguments)
        _flip(arguments[7] if wrong == "answer" else _first(turns_of(*arguments[1:3])[1]))

    monkeypatch.setattr(fused_layer, "KERNELS", SimpleNamespace(layers=layers, attend=KERNELS.attend))
    assert not joined(device_of(tmp_path, "llama"))


def turns_of(turns: int, count: int) -> list[int]:
    """What the kernel is told of each layer, four addresses after another: its own, cache, visible, asked."""
    return list((ctypes.c_uint64 * (4 * count)).from_address(turns))


def _first(cache: int) -> int:
    """Where the memory of the blocks begins, by what the kernel is told of them."""
    return ctypes.c_int64.from_address(cache).value


def _flip(address: int) -> None:
    word = ctypes.c_uint32.from_address(address)
    word.value ^= 1


Called = tuple[tuple[Any, ...], dict[str, Any]]
PLAIN = "as in a step"


def calls(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Called]:
    """As a step calls a layer, and otherwise."""
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
def test_what_it_is_not_made_for_goes_to_the_layers_own(tmp_path: Path) -> None:
    device = device_of(tmp_path, "llama")
    layer = joined(device)[0]
    seen: list[Called] = []

    def theirs(*given: Any, **named: Any) -> str:
        seen.append((given, named))
        return "theirs"

    layer.theirs = theirs
    flat = device.runner.flatten([row([1, 2, 3], 0, 3, array("i", [0]))])
    for name, (given, named) in calls(torch.randn(1, 3, 128), (torch.randn(1, 3, 32), torch.randn(1, 3, 32))).items():
        seen.clear()
        with attending(
            device.backend.make_attention(device.store, [AttentionWindow(), AttentionWindow()], flat, np.arange(3))
        ):
            answer = layer(*given, **named)
        assert (answer == "theirs") == (name != PLAIN), name
        assert seen == ([] if name == PLAIN else [(given, named)]), name


def test_where_attention_is_not_compiled_layers_go_by_parts(tmp_path: Path) -> None:
    device = device_of(tmp_path, "llama")
    whole = written(device)
    device.runner = ModelRunner(device.model, device.store, device.runner._views, frozenset(), CpuBackend())
    for ours, theirs in zip(whole, written(device), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# -- layers that follow one another ---------------------------------------------------------------------------------


def counted(device: ModelDevice) -> list[FusedLayer]:
    """Layers, in the order in which they will be computed from now on."""
    done: list[FusedLayer] = []
    by_address = {layer._address: layer for layer in joined(device)}
    for layer in by_address.values():

        def noted(half: bool, turns: int, count: int, *more: Any, kernel: Any = layer._kernel) -> None:
            done.extend(by_address[address] for address in turns_of(turns, count)[::4])
            kernel(half, turns, count, *more)

        layer._kernel = noted
    return done


def run_alone(layers: list[FusedLayer]) -> None:
    for layer in layers:
        layer.follower = None


@pytest.mark.parametrize("kept", [fused_layer.AHEAD, 2 * 40 * 128 * 4, 1])
def test_layers_are_computed_ahead_and_once(kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layer, "AHEAD", kept)
    device = device_of(tmp_path, "llama", num_hidden_layers=5)
    layers, done = joined(device), counted(device)
    assert len(layers) == 5
    ahead = written(device)
    assert done == layers * len(STEPS)
    assert [layer.follower for layer in layers] == [*layers[1:], None]
    run_alone(layers)
    assert equal(written(device), ahead)


def test_all_of_the_layers_are_no_new_list(tmp_path: Path) -> None:
    layers: Any = device_of(tmp_path, "llama", num_hidden_layers=3).model.get_submodule("model.layers")
    assert layers[:3] is layers
    assert list(layers[:2]) == list(layers)[:2]
    assert list(layers[1:]) == [layers[1], layers[-1]]
    assert len(layers[:9]) == 3


def write_to_it(layer: FusedLayer, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
    hidden[..., :3] *= 0.5
    return layer(hidden, **named)


def give_another(layer: FusedLayer, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
    return layer(hidden * 0.5, **named)


def turn_less(layer: FusedLayer, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
    cos, sin = named["position_embeddings"]
    return layer(hidden, **{**named, "position_embeddings": (cos, sin * 0.5)})


def turn_more(layer: FusedLayer, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
    cos, sin = named["position_embeddings"]
    return layer(hidden, **{**named, "position_embeddings": (cos * 0.5, sin)})


def leave_it_out(layer: FusedLayer, hidden: torch.Tensor, named: dict[str, Any]) -> Any:
    return layer.theirs(hidden, **named)


@pytest.mark.parametrize("between", [write_to_it, give_another, turn_less, turn_more, leave_it_out])
def test_what_was_not_foreseen_is_computed_and_not_foreseen_again(
    between: Callable[[FusedLayer, torch.Tensor, dict[str, Any]], Any], tmp_path: Path
) -> None:
    device = device_of(tmp_path, "llama", num_hidden_layers=3)
    first, second, third = joined(device)
    counted(device)

    def forward(hidden: torch.Tensor, **named: Any) -> Any:
        return between(second, hidden, named)

    model: Any = device.model.model
    model.layers[1].forward = forward
    found = written(device)
    assert first.follower is None
    run_alone([first, second, third])
    assert equal(found, written(device))
