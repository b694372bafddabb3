from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decant.engine.cpu import model_patches
from decant.engine.cpu.model_patches import LookaheadLayer
from decant.engine.model.model import ModelDevice
from tests.engine.fused_layer.harness import STEPS, calls_of, compute_steps, device_of, equal, fused, needs_kernels

pytestmark = needs_kernels


def record_order(device: ModelDevice) -> list[LookaheadLayer]:
    done: list[LookaheadLayer] = []
    by_address = {layer._address: layer for layer in fused(device)}
    for layer in by_address.values():

        def noted(half: bool, calls: int, count: int, *more: Any, kernel: Any = layer._kernel) -> None:
            done.extend(by_address[address] for address in calls_of(calls, count)[::5])
            kernel(half, calls, count, *more)

        layer._kernel = noted
    return done


def run_alone(layers: list[LookaheadLayer]) -> None:
    for layer in layers:
        layer.follower = None


@pytest.mark.slow
@pytest.mark.parametrize("kept", [model_patches.LOOKAHEAD_BYTES, 2 * 40 * 128 * 4, 1])
def test_following_layers_are_computed_ahead_and_once(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_patches, "LOOKAHEAD_BYTES", kept)
    device = device_of(tmp_path, "llama", num_hidden_layers=5)
    layers, done = fused(device), record_order(device)
    assert len(layers) == 5
    ahead = compute_steps(device)
    assert done == layers * len(STEPS)
    assert [layer.follower for layer in layers] == [*layers[1:], None]
    run_alone(layers)
    assert equal(compute_steps(device), ahead)


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


@pytest.mark.slow
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
    found = compute_steps(device)
    assert first.follower is None
    run_alone([first, second, third])
    assert equal(found, compute_steps(device))
