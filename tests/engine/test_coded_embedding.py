"""Quantized embeddings give exactly the rows of their dequantized weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decant.engine.checkpoint import checkpoint as checkpoints
from decant.engine.checkpoint.coded_embedding import CodedEmbedding
from decant.engine.checkpoint.coded_linear import CodedLinear, check_replaced, placeholder
from decant.engine.checkpoint.weight import CodeKind, Codes, Weight
from tests.engine import tiny
from tests.engine.codes import make_codes
from tests.engine.quantized import LAYOUTS, dequantize, quantize
from tests.engine.served import edit, serve
from tests.engine.test_coded_experts import generated

CASES: dict[str, Callable[[], Codes]] = {
    "int8": lambda: make_codes(CodeKind.INT8, 37, 21, 21),
    "int8-groups": lambda: make_codes(CodeKind.INT8, 37, 50, 16, has_half_scales=False),
    "int8-mins": lambda: make_codes(CodeKind.INT8, 37, 48, 16, has_mins=True),
    "int4": lambda: make_codes(CodeKind.INT4, 37, 21, 21),
    "int4-zeros": lambda: make_codes(CodeKind.INT4, 37, 50, 16, has_zeros=True),
    "int4-mins": lambda: make_codes(CodeKind.INT4, 37, 48, 16, has_mins=True, has_half_scales=False),
    "int4-order": lambda: replace(make_codes(CodeKind.INT4, 37, 48, 16), order=torch.arange(48).roll(5)),
    "fp8": lambda: make_codes(CodeKind.FP8, 37, 48, 48),
}


def embedding_of(codes: Codes, dtype: torch.dtype) -> CodedEmbedding:
    rows, width = codes.shape
    return CodedEmbedding(Weight("x", (rows, width), codes.kind, 1, lambda: codes), None, dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_are_those_of_the_dequantized_weight(case: str, dtype: torch.dtype) -> None:
    codes = CASES[case]()
    found = embedding_of(codes, dtype)
    ids = torch.tensor([[0, 36, 5], [5, 1, 20]])
    assert torch.equal(found(ids), codes.dequantize(dtype)[ids])
    assert (found.num_embeddings, found.embedding_dim, found.weight.dtype) == (37, codes.shape[1], dtype)
    assert not list(found.parameters())


def test_codes_take_the_memory_of_their_bits() -> None:
    for kind, most in ((CodeKind.INT8, 1.1), (CodeKind.INT4, 0.6), (CodeKind.FP8, 1.1)):
        made = embedding_of(make_codes(kind, 64, 512, 64), torch.bfloat16)
        assert sum(each.nbytes for each in made.buffers()) < most * 64 * 512


def test_the_weight_is_on_the_device_of_the_codes_and_is_no_number() -> None:
    """Some models send their ids there; one that multiplies by it would not serve wrong numbers."""
    weight = embedding_of(CASES["int8"](), torch.bfloat16).weight
    assert (weight.device.type, weight.shape, weight.dtype) == ("cpu", (37, 21), torch.bfloat16)
    assert bool(weight.isnan().all())


@pytest.mark.parametrize("case", ["int8-groups", "int8", "int4-zeros"])
def test_no_part_is_a_view_of_what_was_read(case: str) -> None:
    read = CASES[case]()
    parts = [read.codes, read.scales] + [each for each in (read.zeros, read.mins) if each is not None]
    owned = {each.untyped_storage().data_ptr() for each in embedding_of(read, torch.float32).buffers()}
    assert owned.isdisjoint(each.untyped_storage().data_ptr() for each in parts)


def is_embedding(name: str) -> bool:
    return "embed_tokens" in name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "llama4_text", "gemma2"])
def test_a_model_whose_embedding_is_quantized_generates_what_its_dequantized_embedding_generates(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    """Embeddings that do more than to look up rows, such as gemma's, are dequantized."""
    folder = tiny.save(tiny.config(kind, tie_word_embeddings=tied), tmp_path)
    model = quantize(folder, LAYOUTS["compressed-int8-channel"], is_embedding)
    read: Any = checkpoints.open(str(folder)).read(torch.float32, torch.device("cpu"), keep_codes=True)
    assert isinstance(read.get_input_embeddings(), CodedEmbedding) == (kind != "gemma2")
    head = read.get_output_embeddings()
    assert isinstance(head, CodedLinear) == (tied and kind != "gemma2")
    tokens = generated(serve(folder))
    dequantize(folder, model)
    assert tokens == generated(serve(folder))


def test_a_head_of_its_own_in_the_file_is_used_whatever_the_configuration_says(tmp_path: Path) -> None:
    folder = tiny.save(tiny.config("llama", tie_word_embeddings=False), tmp_path)
    quantize(folder, LAYOUTS["compressed-int8-channel"], is_embedding)
    tokens = generated(serve(folder))
    edit(folder, tie_word_embeddings=True)
    assert generated(serve(folder)) == tokens


def test_a_placeholder_that_is_left_is_refused_by_name() -> None:
    layer = torch.nn.Linear(4, 3)
    check_replaced(layer)
    for shape in ((3, 4), (1, 4)):
        layer.weight = torch.nn.Parameter(placeholder(shape, torch.float32), requires_grad=False)
        with pytest.raises(ValueError, match="weight shares a quantized weight"):
            check_replaced(layer)
