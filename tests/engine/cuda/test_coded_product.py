"""Products of quantized weights against float64, in triton's interpreter if there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

pytest.importorskip("triton")

from decant.engine.checkpoint.coded_linear import CodedLinear
from decant.engine.checkpoint.quantize import quantize
from decant.engine.checkpoint.weight import CodeKind, Codes, Weight
from decant.engine.cuda import backend as cuda_backend
from decant.engine.cuda import coded_product
from decant.engine.cuda.coded_product import CodedProduct, TileShape, merge_products, tile_depth
from decant.engine.cuda.coded_weights import replace_coded
from decant.engine.cuda.fused_layer import TritonLayer
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice
from tests import gpu
from tests.engine import tiny
from tests.engine.codes import make_codes
from tests.engine.cuda.test_backend import InterpretedBackend, shorten_trials

DEVICE = torch.device(gpu.device_type())

CASES: dict[str, Callable[[], Codes]] = {
    "int8": lambda: make_codes(CodeKind.INT8, 37, 200, 200),
    "int8-groups": lambda: make_codes(CodeKind.INT8, 16, 150, 32, has_half_scales=False),
    "int8-mins": lambda: make_codes(CodeKind.INT8, 16, 96, 16, has_mins=True),
    "int4": lambda: make_codes(CodeKind.INT4, 37, 200, 200),
    "int4-groups": lambda: make_codes(CodeKind.INT4, 20, 300, 64),
    "int4-zeros": lambda: make_codes(CodeKind.INT4, 20, 90, 32, has_zeros=True),
    "int4-zeros-whole": lambda: make_codes(CodeKind.INT4, 20, 90, 90, has_zeros=True),
    "int4-mins": lambda: make_codes(CodeKind.INT4, 20, 130, 32, has_mins=True),
    "e2m1": lambda: make_codes(CodeKind.E2M1, 20, 96, 32),
    "fp8": lambda: make_codes(CodeKind.FP8, 37, 200, 200, has_half_scales=False),
    "fp8-blocks": lambda: make_codes(CodeKind.FP8, 20, 260, 128),
}

every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_product, "MANY", TileShape(32, 32, 4, 3))
    monkeypatch.setattr(coded_product, "EXACT", TileShape(16, 32, 4, 3))


def product_of(codes: Codes, dtype: torch.dtype, bias: torch.Tensor | None = None, **options: Any) -> CodedProduct:
    return CodedProduct(codes, bias, dtype, DEVICE, **{"is_exact": False, **options})


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(DEVICE, dtype)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 19])
def test_a_product_is_that_of_the_float64_weight_up_to_rounding(case: str, dtype: torch.dtype, rows: int) -> None:
    codes = CASES[case]()
    outputs, inner = codes.shape
    bias = random(outputs, dtype=dtype)
    wide = torch.full((1, rows, inner + 8), float("nan"), device=DEVICE, dtype=dtype)
    wide[..., :inner] = random(rows, inner, dtype=dtype)
    x = wide[..., :inner]
    found = product_of(codes, dtype, bias)(x)
    assert found.shape == (1, rows, outputs)
    weight = codes.dequantize(torch.float64).to(DEVICE)
    exact, sizes = (weight @ x[0].double().T).T + bias.double(), (weight.abs() @ x[0].double().abs().T).T + 1
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-23  # the interpreter cuts the bits that bfloat16 lacks
    assert bool(((found[0].double() - exact).abs() <= rounding * exact.abs() + 2.0**-19 * sizes).all())


@every_case
@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_are_multiplied_with_the_dequantized_weight(
    case: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_product, "DENSE_ROWS", 3)
    codes = CASES[case]()
    outputs, inner = codes.shape
    monkeypatch.setattr(coded_product, "DENSE_WEIGHTS", 64 * inner)
    codes = Codes(  # more columns than are dequantized at a time
        codes.kind,
        codes.codes.repeat(4, 1),
        codes.scales.repeat(1, 4),
        codes.group,
        None if codes.zeros is None else codes.zeros.repeat(1, 4),
        None,
        None if codes.mins is None else codes.mins.repeat(1, 4),
    )
    bias, x = random(4 * outputs) if has_bias else None, random(3, inner)
    product = product_of(codes, torch.bfloat16, bias)
    weight = codes.dequantize(torch.bfloat16).to(DEVICE)
    expected = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = product(x).double()
    sizes = nn.functional.linear(x.double().abs(), weight.double().abs())
    rounding = 2.0**-7 * expected.abs() + 2.0**-8 * sizes  # the interpreter cuts the bits that bfloat16 lacks
    assert bool(((found - expected).abs() <= rounding).all())
    torch.testing.assert_close(product.dequantized(1, outputs), weight[1:outputs], rtol=2.0**-7, atol=1e-6)


def test_rows_in_activation_order_are_multiplied_with_their_own_columns() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    plain = make_codes(CodeKind.INT4, 16, 64, 32, has_zeros=True)
    codes = Codes(plain.kind, plain.codes, plain.scales, plain.group, plain.zeros, order)
    x = random(3, 64, dtype=torch.float32)
    expected = x.double() @ codes.dequantize(torch.float64).to(DEVICE).T
    torch.testing.assert_close(product_of(codes, torch.float32)(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CodeKind)
def test_every_code_is_its_number(kind: CodeKind) -> None:
    every = torch.arange(256).to(torch.uint8)[:, None].expand(256, 16).contiguous()
    match kind:
        case CodeKind.INT8:
            numbers = every.view(torch.int8)
        case CodeKind.INT4 | CodeKind.E2M1:
            numbers = every % 16
        case CodeKind.FP8:
            numbers = torch.where(every & 127 == 127, 0, every).view(torch.float8_e4m3fn)
    codes = Codes(kind, numbers, torch.ones(1, 256), 16)
    found = product_of(codes, torch.bfloat16)(torch.eye(16, device=DEVICE).bfloat16())
    assert torch.equal(found.T.float().cpu(), codes.dequantize(torch.float32))


@pytest.mark.parametrize("case", ["int8", "int4-zeros", "int4-mins", "fp8-blocks", "e2m1"])
def test_a_row_has_the_same_bits_in_any_batch(case: str) -> None:
    codes = CASES[case]()
    product, rows = product_of(codes, torch.bfloat16, is_exact=True), random(35, codes.shape[1])
    together = product(rows)
    for chosen in ([3], [34, 3], [*range(16), 33, 3]):
        assert torch.equal(product(rows[chosen]), together[chosen])
    assert product(rows[:0]).shape == (0, codes.shape[0])


def test_codes_take_the_memory_of_their_bits() -> None:
    most_bytes = (
        (CodeKind.INT8, 640, 1.01),
        (CodeKind.FP8, 640, 1.01),
        (CodeKind.INT4, 64, 0.54),
        (CodeKind.E2M1, 32, 0.57),
    )
    for kind, group, most in most_bytes:
        product = product_of(make_codes(kind, 256, 640, group), torch.bfloat16)
        assert sum(each.nbytes for each in product.buffers()) < most * 256 * 640


def test_merged_products_hold_their_codes_once_and_keep_their_outputs() -> None:
    parts = [
        product_of(make_codes(CodeKind.INT4, outputs, 96, 32, has_zeros=True), torch.float32, random(outputs).float())
        for outputs in (16, 32)
    ]
    x = random(3, 96, dtype=torch.float32)
    expected = torch.cat([part(x) for part in parts], 1)
    merged = merge_products(parts)
    assert torch.equal(merged(x), expected)
    assert torch.equal(torch.cat([part(x) for part in parts], 1), expected)
    for name, buffer in merged.named_buffers():
        assert {getattr(part, name).untyped_storage().data_ptr() for part in parts} == {
            buffer.untyped_storage().data_ptr()
        }


def test_products_of_different_kinds_or_orders_are_not_merged() -> None:
    codes = make_codes(CodeKind.INT4, 16, 64, 32)
    reversed_order = Codes(codes.kind, codes.codes, codes.scales, 32, None, torch.arange(63, -1, -1))
    shuffled = Codes(codes.kind, codes.codes, codes.scales, 32, None, torch.arange(64).roll(1))
    for one, other in ((codes, make_codes(CodeKind.INT8, 16, 64, 32)), (reversed_order, shuffled)):
        with pytest.raises(LookupError, match="different kinds"):
            merge_products([product_of(one, torch.float32), product_of(other, torch.float32)])


@pytest.mark.parametrize(
    ("inner", "group", "depth"),
    [(128, 128, 128), (30, 30, 64), (576, 576, 64), (96, 48, 16), (512, 256, 128), (80, 40, 0), (90, 8, 0)],
)
def test_no_tile_has_inputs_of_two_groups(inner: int, group: int, depth: int) -> None:
    assert tile_depth(inner, group) == depth


def coded_model(*all_codes: Codes) -> nn.Sequential:
    weights = [Weight("x", (each.shape[0], each.shape[1]), each.kind, 1, each.in_order) for each in all_codes]
    return nn.Sequential(*(CodedLinear(weight, None, torch.float32) for weight in weights)).to(DEVICE)


def test_a_weight_whose_groups_the_kernel_does_not_take_is_dequantized() -> None:
    odd = make_codes(CodeKind.INT4, 16, 80, 40)
    model = coded_model(odd, make_codes(CodeKind.INT4, 16, 16, 16))
    reason = replace_coded(model, torch.float32, DEVICE, lambda trial: trial(), is_exact=False)
    assert reason is None
    assert [type(module) for module in model] == [nn.Linear, CodedProduct]
    assert torch.equal(model.get_parameter("0.weight").cpu(), odd.dequantize(torch.float32))


def test_a_product_that_differs_from_torch_has_all_weights_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    model = coded_model(make_codes(CodeKind.INT8, 16, 32, 32), make_codes(CodeKind.INT4, 16, 16, 16))
    launch = CodedProduct._launch

    def wrong(self: CodedProduct, rows: torch.Tensor, out: torch.Tensor) -> None:
        launch(self, rows, out)
        out *= 1.0 + 0.1 * (self.layout.kind is CodeKind.INT4)

    monkeypatch.setattr(CodedProduct, "_launch", wrong)
    reason = replace_coded(model, torch.float32, DEVICE, lambda trial: trial(), is_exact=False)
    assert reason is not None
    assert "int4 weights differ from torch's by 0.1" in reason
    assert [type(module) for module in model] == [nn.Linear, nn.Linear]


def zeroed(codes: Codes, outputs: int) -> Codes:
    """Return the codes with weights of zero in the first ``outputs``."""
    made = codes.codes.clone()
    made[:outputs] = 8 if codes.kind is CodeKind.INT4 else 0
    return replace(codes, codes=made)


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("outputs", [64, 96], ids=["some", "all"])
def test_weights_that_are_zero_neither_pass_nor_fail_the_trial(
    outputs: int, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = coded_model(zeroed(make_codes(CodeKind.INT8, 96, 32, 32), outputs), make_codes(CodeKind.INT8, 16, 96, 96))
    launch = CodedProduct._launch

    def doubled(self: CodedProduct, rows: torch.Tensor, out: torch.Tensor) -> None:
        launch(self, rows, out)
        out *= 1 + wrong

    monkeypatch.setattr(CodedProduct, "_launch", doubled)
    reason = replace_coded(model, torch.float32, DEVICE, lambda trial: trial(), is_exact=False)
    assert reason == ("int8 weights differ from torch's by 1" if wrong else None)
    assert [type(module) for module in model] == [nn.Linear if wrong else CodedProduct] * 2


def served(folder: Path, monkeypatch: pytest.MonkeyPatch, *, exact: bool = False, **options: Any) -> ModelDevice:
    shorten_trials(monkeypatch)
    monkeypatch.setattr(cuda_backend, "TRIAL_SAMPLING", cuda_backend.TRIAL_SAMPLING[:1])
    settings = ModelConfig(str(folder), device=DEVICE.type, context_length=64, kv_bytes=1 << 20, exact=exact, **options)
    return load(settings, backend=InterpretedBackend(DEVICE, exact=exact))


def checkpoint(folder: Path) -> Path:
    config = tiny.config("llama", num_attention_heads=2, num_key_value_heads=1)
    config.num_hidden_layers = 1
    return tiny.save(config, folder)


@pytest.mark.slow
def test_a_quantized_checkpoint_is_served_from_its_codes_and_exact_by_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors", reason="the module that makes quantized checkpoints needs it")
    from tests.engine import quantized

    folder = checkpoint(tmp_path)
    quantized.quantize(folder, quantized.LAYOUTS["gptq-4-64-act-order"])
    device = served(folder, monkeypatch, exact=True, dtype="bfloat16")
    assert isinstance(device.backend, cuda_backend.CudaBackend)
    assert device.backend.fallbacks == {}
    assert sum(isinstance(module, CodedProduct) for module in device.model.modules()) == 7
    assert sum(isinstance(module.forward, TritonLayer) for module in device.model.modules()) == 1
    assert device.equal_bits
    assert device.probe_result.exact
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    kind: Any = cuda_backend.CudaBackend.kind
    assert kind.fget(device.backend).endswith(": attention, layers, sampling, quantized weights, exact products")


def test_layers_that_are_quantized_at_load_are_multiplied_as_codes() -> None:
    config: Any = tiny.config("llama")
    model: Any = LlamaForCausalLM(config)
    quantize(model.to(DEVICE), "int4")
    reason = replace_coded(model, torch.float32, DEVICE, lambda trial: trial(), is_exact=False)
    assert reason is None
    head, layer = model.lm_head, model.model.layers[0].mlp.up_proj
    assert isinstance(head, CodedProduct)
    assert isinstance(layer, CodedProduct)
    assert (head.layout.kind, layer.layout.kind) == (CodeKind.INT8, CodeKind.INT4)
