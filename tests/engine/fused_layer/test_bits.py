from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decant.engine.cpu.backend import CpuBackend
from decant.engine.cpu.fused_layer import unfuse
from decant.engine.loading import load
from decant.engine.model.attention.interface import attending
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.model import ModelConfig
from decant.engine.model.runner import ModelRunner
from tests.engine import tiny
from tests.engine.fused_layer.harness import WIDE, compute_steps, device_of, equal, fused, needs_kernels, row, saved

pytestmark = needs_kernels

MIXED = {
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "windows": ("mistral", {}),
    "biases": ("qwen2", {}),
    "two cache groups": ("qwen2", MIXED),
    "norms of queries and keys": ("qwen3", {}),
    "a scale": ("granite", {"residual_multiplier": 1.0}),
    "keys in 8 bits": ("qwen3", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_layer_has_the_bits_of_its_parts(kind: str, dtype: str, tmp_path: Path) -> None:
    name, changes = FUSED[kind]
    config = saved(tmp_path, name, dtype, **changes)
    device = load(replace(config, kv_dtype="int8" if kind == "keys in 8 bits" else "auto"))
    assert len(device.windows) == (2 if kind == "two cache groups" else 1)
    assert len(fused(device)) == 2
    whole = compute_steps(device)
    assert equal(compute_steps(device), whole), "scratch memory of an earlier step is not read"
    torch.set_num_threads(3 - torch.get_num_threads())
    assert equal(compute_steps(device), whole), "with other threads"
    layers = unfuse(device.model)
    assert not fused(device)
    assert equal(compute_steps(device), whole)
    for module, layer in layers:
        module.forward = layer
    assert len(fused(device)) == 2


@pytest.mark.slow
def test_layers_as_wide_as_in_real_models_are_fused(tmp_path: Path) -> None:
    wide = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "head_dim": 64}
    made = tiny.config("qwen2", **WIDE | wide, num_hidden_layers=6)
    device = load(ModelConfig(str(tiny.save_large(made, tmp_path)), device="cpu", kv_bytes=4 << 20))
    assert len(fused(device)) == 6


KEPT: tuple[list[int], ...] = ([], [3], [11], [12], [3, 11, 12, 13, 48], [13, 30, 48], [0, 4], list(range(49)))
"""Of a step of 1, 1, 2, 9 and 36 tokens: none, some of one sequence, some of several, all."""


@pytest.mark.slow
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
    compute_steps = device.store.blocks.clone()
    for kept in KEPT:
        device.store.blocks.copy_(blocks)
        logits = device.runner.logits(rows, np.array(kept, np.int64))
        assert torch.equal(logits, whole[kept]), kept
        assert torch.equal(device.store.blocks, compute_steps), kept
        read = np.zeros(49, bool)
        for stop, (start, end) in zip(stops.tolist(), spans, strict=True):
            read[min([at for at in kept if stop - end + start <= at < stop], default=stop) : stop] = True
        assert torch.equal(hidden[-1], torch.where(torch.from_numpy(read)[:, None], hidden[0], 0.0))


Called = tuple[tuple[Any, ...], dict[str, Any]]
PLAIN = "as in a step"


def layer_calls(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Called]:
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
    for name, (given, named) in layer_calls(
        torch.randn(1, 3, 128), (torch.randn(1, 3, 32), torch.randn(1, 3, 32))
    ).items():
        seen.clear()
        with attending(
            device.backend.make_attention(device.store, [AttentionWindow(), AttentionWindow()], flat, np.arange(3))
        ):
            answer = layer(*given, **named)
        assert (answer == "original") == (name != PLAIN), name
        assert seen == ([] if name == PLAIN else [(given, named)]), name


def test_without_compiled_attention_layers_run_unfused(tmp_path: Path) -> None:
    device = device_of(tmp_path, "llama")
    whole = compute_steps(device)
    device.runner = ModelRunner(device.model, device.store, device.runner._layer_windows, frozenset(), CpuBackend())
    for ours, theirs in zip(whole, compute_steps(device), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
