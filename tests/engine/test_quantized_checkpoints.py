"""Each quantized format: what its weights are, what a model of them generates, and which files are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decant.engine.checkpoint import checkpoint as checkpoints
from decant.engine.checkpoint import weight_files
from decant.engine.checkpoint.coded_linear import CodedLinear
from decant.engine.checkpoint.quantize import quantize
from decant.engine.checkpoint.weight import CodeKind, Weight
from decant.engine.engine import Engine
from decant.engine.errors import InvalidConfig, ModelRefused
from decant.engine.model.model import ModelDevice
from decant.engine.scheduler import Limits
from tests.engine import quantized, tiny
from tests.engine.quantized import LAYOUTS, Layout
from tests.engine.served import edit, rewrite, serve

every_layout = pytest.mark.parametrize("name", LAYOUTS)

LAYER = "model.layers.0.mlp.down_proj"


def checkpoint(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    return tiny.save(tiny.config(kind, **{**sizes, **changes}), folder)


def weights(folder: Path) -> dict[str, Weight]:
    opened = checkpoints.open(str(folder)).weight_format.open([folder / "model.safetensors"])
    assert opened is not None
    return {name: each for name, each in opened.items() if isinstance(each, Weight)}


def generated(device: ModelDevice, before: Sequence[int] = ()) -> list[int]:
    """Twelve tokens, of which those ``before`` are part of the prompt."""
    engine = Engine(device, Limits(context_length=64))
    return tiny.run(engine, [tiny.greedy("r", [5, 6, 7, 8, *before], 12 - len(before))]).tokens["r"]


@every_layout
def test_a_weight_is_exactly_what_its_format_says(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    model = quantized.quantize(folder, LAYOUTS[name])
    weight_files.check(folder)
    found = weights(folder)
    assert found.keys() == {each for each in model if "_proj" in each}
    for each, weight in found.items():
        codes = weight.codes()
        assert weight.shape == model[each].shape == codes.shape
        assert torch.equal(codes.dequantize(torch.float64).float(), model[each].double().float()), each
        assert torch.equal(weight[:], codes.dequantize(torch.float32))
        assert 0 < weight.nbytes < 4 * math.prod(weight.shape)


@pytest.mark.slow
@every_layout
def test_a_model_generates_what_its_dequantized_weights_generate(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    model = quantized.quantize(folder, LAYOUTS[name])
    device = serve(folder)
    assert device.probe_result.exact
    assert device.equal_bits
    assert device.quantization == checkpoints.open(str(folder)).weight_format.quantization is not None
    tokens, layout_hash = generated(device), device.layout_hash
    assert generated(device, tokens[:5]) == tokens[5:], "another worker continues from the tokens alone"
    quantized.dequantize(folder, model)
    plain = serve(folder)
    assert generated(plain) == tokens
    assert plain.layout_hash != layout_hash


@pytest.mark.parametrize("name", ["gptq-4-64-act-order", "awq-32", "compressed-fp8-block", "compressed-int8-channel"])
def test_a_model_in_bfloat16_agrees_with_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    quantized.quantize(folder, LAYOUTS[name])
    assert serve(folder, dtype="bfloat16").probe_result.exact


@pytest.mark.slow
def test_products_that_are_one_matrix_in_the_files_stay_quantized(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "phi3", sliding_window=None)
    quantized.quantize(folder, quantized.gptq())
    read = checkpoints.open(str(folder)).read(torch.float32, torch.device("cpu"), keep_codes=True)
    coded = {name.rpartition(".")[2] for name, module in read.named_modules() if isinstance(module, CodedLinear)}
    assert coded == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert serve(folder).probe_result.exact


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_head_beside_plain_layers_is_served(tied: bool, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, tie_word_embeddings=tied)
    rewrite(folder, lambda had: had | {"lm_head.weight": had["model.embed_tokens.weight"].flip(0).clone()})
    model = quantized.quantize(folder, quantized.awq(), lambda name: name == "lm_head.weight")
    tokens = generated(serve(folder))
    quantized.dequantize(folder, model)
    assert generated(serve(folder)) == tokens


@pytest.mark.parametrize(
    ("name", "tied"),
    [("gptq-8-64", False), ("awq-32", True), ("compressed-int8-channel", True), ("compressed-fp8-block", False)],
)
def test_a_quantized_embedding_has_the_rows_of_the_dequantized_one(name: str, tied: bool, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, tie_word_embeddings=tied)
    model = quantized.quantize(folder, LAYOUTS[name], lambda each: each == "model.embed_tokens.weight")
    device = serve(folder)
    embedding: Any = device.model.get_submodule("model.embed_tokens")
    table = embedding(torch.arange(embedding.num_embeddings))
    assert torch.equal(table, model["model.embed_tokens.weight"])
    tokens = generated(device)
    quantized.dequantize(folder, model)
    assert generated(serve(folder)) == tokens


def test_a_device_without_products_of_codes_gets_dequantized_weights(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    model = quantized.quantize(folder, quantized.gptq())
    read = checkpoints.open(str(folder)).read(torch.float32, torch.device("cpu"))
    assert not any(isinstance(module, CodedLinear) for module in read.modules())
    assert torch.equal(read.get_parameter(f"{LAYER}.weight"), model[f"{LAYER}.weight"])


def a_scale(value: float) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    def change(had: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(each for each in had if each.startswith(LAYER) and "scale" in each)
        scale = had[name].clone()
        scale.view(-1)[0] = value
        return had | {name: scale}

    return change


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["gptq-4-32", "awq-32", "compressed-int8-channel", "compressed-fp8-block"])
def test_a_scale_that_is_zero_or_no_number_is_refused_by_name(name: str, value: float, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    quantized.quantize(folder, LAYOUTS[name])
    rewrite(folder, a_scale(value))
    with pytest.raises(ModelRefused, match=rf"{LAYER}\.weight: a scale is zero, infinite or not a number"):
        serve(folder)


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Any], Any]:
    def rewritten(had: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = change(had[f"{LAYER}.{part}"])
        rest = {name: each for name, each in had.items() if name != f"{LAYER}.{part}"}
        return rest if made is None else rest | {f"{LAYER}.{part}": made.contiguous()}

    return rewritten


@pytest.mark.parametrize(
    ("layout", "change", "reason"),
    [
        (quantized.gptq(), changed("scales", lambda each: each[1:]), r"down_proj\.scales is \[5, 128\].*\[6, 128\]"),
        (quantized.gptq(), changed("scales", lambda each: None), r"down_proj\.scales is missing"),
        (quantized.gptq(), changed("qzeros", lambda each: each[:, 1:]), r"down_proj\.qzeros is \[6, 15\]"),
        (quantized.gptq(), changed("qweight", lambda each: each[1:]), r"down_proj\.weight in .* is \[128, 184\]"),
        (quantized.gptq(), changed("g_idx", lambda each: each * 0), r"down_proj\.weight: its g_idx does not give"),
        (quantized.gptq(), changed("g_idx", lambda each: each[1:]), r"down_proj\.g_idx is \[191\]"),
        (quantized.gptq(), changed("qweight", lambda each: each.short()), r"I16 weights are not served yet"),
        (quantized.awq(), changed("qzeros", lambda each: None), r"down_proj\.qzeros is missing"),
        (
            LAYOUTS["compressed-int4-32"],
            changed("weight_shape", lambda each: each * 2),
            r"weight_packed is \[128, 24\]: its weight_shape \[256, 384\]",
        ),
        (LAYOUTS["compressed-int4-32"], changed("weight_scale", lambda each: each[1:]), r"weight_scale is \[127, 6\]"),
        (LAYOUTS["compressed-int8-channel"], changed("weight_scale", lambda each: None), r"weight_scale is missing"),
        (
            LAYOUTS["compressed-fp8-channel"],
            changed("weight", lambda each: (each.view(torch.uint8) | 127).view(torch.float8_e4m3fn)),
            r"down_proj\.weight: a number is not a number",
        ),
    ],
)
def test_tensors_that_do_not_fit_their_format_are_refused_by_name(
    layout: Layout, change: Callable[[Any], Any], reason: str, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path)
    quantized.quantize(folder, layout)
    rewrite(folder, change)
    with pytest.raises(ModelRefused, match=reason):
        serve(folder)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "its GPTQ weights have 3 bits; 4 and 8"),
        ({"quant_method": "gptq", "bits": 4}, "has no number group_size: None"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "its GPTQ weights have groups of 0"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
            "checkpoint_format marlin",
        ),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "its AWQ weights have 8 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "AWQ weights of the version gemv"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "the format nvfp4-pack-quantized"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "24"}}, r"sparse weights \(24\)"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}, "with transforms"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"scales for blocks of \[64, 64\]"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "none of them is"),
    ],
    ids=str,
)
def test_variants_that_are_not_served_are_refused_by_name(settings: Any, reason: str, tmp_path: Path) -> None:
    folder = edit(checkpoint(tmp_path), quantization_config=settings)
    with pytest.raises(ModelRefused, match=reason):
        serve(folder)


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_a_model_is_quantized_while_it_is_loaded(to: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    device, plain = serve(folder, quantize=to), serve(folder)
    assert device.probe_result.exact
    assert device.layout_hash != plain.layout_hash
    assert (device.quantization, plain.quantization) == (to, None)
    assert device.backend.fused_layers(device.model) == plain.backend.fused_layers(plain.model)
    assert len(generated(device)) == 12


def test_int8_of_different_formats_have_different_layout_hashes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    assert len({serve(folder, quantize=each).layout_hash for each in ("int8", "int4", None)}) == 3


def test_quantizing_a_quantized_checkpoint_or_to_something_else_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    with pytest.raises(InvalidConfig, match="quantize: one of int8, int4, got 'int3'"):
        serve(folder, quantize="int3")
    quantized.quantize(folder, quantized.gptq())
    with pytest.raises(InvalidConfig, match="quantized already"):
        serve(folder, quantize="int8")


def test_int4_keeps_the_head_in_int8(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, tie_word_embeddings=True)
    model = checkpoints.open(str(folder)).read(torch.float32, torch.device("cpu"))
    quantize(model, "int4")
    kinds = {name: each.source.kind for name, each in model.named_modules() if isinstance(each, CodedLinear)}
    assert kinds.pop("lm_head") is CodeKind.INT8
    assert set(kinds.values()) == {CodeKind.INT4}
