"""A model with adapters computes in float32 what PEFT computes, each sequence with its own adapter."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from decant.engine.cpu.backend import CpuBackend
from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.model.model import ModelDevice
from tests.engine import peft_adapters, quantized, tiny
from tests.engine.adapted import PROMPTS, add, logits, rows_of, serve
from tests.engine.peft_adapters import ALL, ATTENTION

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "attention alone": {"target_modules": ATTENTION, "r": 16, "lora_alpha": 4},
    "rank-stabilized": {"use_rslora": True, "r": 8},
    "a pattern of targets": {"target_modules": r".*layers\.1\.self_attn\.(q|v)_proj"},
    "ranks and alphas by pattern": {
        "rank_pattern": {"q_proj": 3, r"layers\.0\.mlp\.down_proj": 9},
        "alpha_pattern": {"v_proj": 1, r"layers\.1\.mlp\.up_proj": 31},
    },
    "some layers": {"layers_to_transform": [1]},
    "without some": {"exclude_modules": ["k_proj", "model.layers.0.mlp.up_proj"]},
}

QUANTIZED = ["compressed-int8-channel", "gptq-4-64-act-order", "compressed-fp8-channel"]
"""A format for each kind of codes, one of them with an order of the inputs."""


def check_parity(device: ModelDevice, model: Path, folders: Sequence[Path]) -> None:
    """Compare a step of rows with the first adapter, the last one, none, and the first again with PEFT's logits."""
    check_rows(device, model, [folders[0], folders[-1], None, folders[0]])


def check_rows(device: ModelDevice, model: Path, chosen: Sequence[Path | None]) -> None:
    """Compare a step of rows with the adapters ``chosen`` with the logits of PEFT, and with the bits of rows alone."""
    digests = {folder: add(device, folder) for folder in chosen if folder is not None}
    rows_together = rows_of(device, ["" if folder is None else digests[folder] for folder in chosen])
    ours = logits(device, rows_together)
    for row, found in zip(rows_together, ours, strict=True):
        assert torch.equal(logits(device, [row])[0], found)
    for folder in dict.fromkeys(chosen):  # each model of PEFT is loaded once
        indexes = [index for index, each in enumerate(chosen) if each == folder]
        expected = peft_logits(model, folder, tuple(indexes))
        for index, theirs in zip(indexes, expected, strict=True):
            assert (ours[index] - theirs).abs().max() < 1e-3 * theirs.std()


@cache
def peft_logits(model: Path, folder: Path | None, rows: tuple[int, ...]) -> list[torch.Tensor]:
    return peft_adapters.logits(model, folder, [PROMPTS[row % len(PROMPTS)] for row in rows])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.config("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def device(model: Path) -> ModelDevice:
    return serve(model)


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "other"
    return peft_adapters.save(model, folder, seed=1, r=2, target_modules=["q_proj", "down_proj"])


@pytest.mark.parametrize("case", CASES)
def test_each_sequence_has_the_logits_of_peft_with_its_adapter(
    case: str, model: Path, device: ModelDevice, other: Path, tmp_path: Path
) -> None:
    one = peft_adapters.save(model, tmp_path / "one", **CASES[case])
    check_parity(device, model, [one, other])


@pytest.mark.parametrize("layout", QUANTIZED)
def test_adapters_on_a_quantized_base_have_the_logits_of_peft_on_its_dequantized_weights(
    layout: str, model: Path, other: Path, tmp_path: Path
) -> None:
    """PEFT needs another package for each format, and then rounds as that package does."""
    base, plain = (Path(shutil.copytree(model, tmp_path / name)) for name in ("base", "plain"))
    quantized.dequantize(plain, quantized.quantize(base, quantized.LAYOUTS[layout]))
    of_all = peft_adapters.save(
        plain, tmp_path / "of-all", r=16, rank_pattern={"q_proj": 3, r"layers\.0\.mlp\.down_proj": 9}
    )
    of_one = peft_adapters.save(plain, tmp_path / "of-one", seed=2, r=1, target_modules=r".*layers\.1.*(v|gate)_proj")
    device = serve(base)
    assert device.quantization
    check_rows(device, plain, [of_all, of_one, other, None, of_one, of_all, other])


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("qwen2", ALL), ("phi3", ["qkv_proj", "gate_up_proj", "o_proj"]), ("gpt2", ["c_attn", "c_fc"])],
)
def test_other_kinds_of_layers_have_the_logits_of_peft(kind: str, targets: list[str], tmp_path: Path) -> None:
    model = tiny.save(tiny.config(kind), tmp_path / "model")
    folder = peft_adapters.save(model, tmp_path / "one", target_modules=targets)
    check_parity(serve(model), model, [folder])


@pytest.mark.skipif(KERNELS is None, reason="there are no kernels to do without")
def test_torch_alone_has_the_logits_of_peft(model: Path, tmp_path: Path) -> None:
    check_parity(serve(model, CpuBackend()), model, [peft_adapters.save(model, tmp_path / "one")])
