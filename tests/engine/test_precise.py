"""A model in bfloat16 computes in float32 as its copy in float32 does, and is left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine.precise import Float32
from tests.engine import tiny


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3"])
def test_a_model_computes_what_its_float32_copy_does(kind: str, tmp_path: Path) -> None:
    model = tiny.reference(tiny.save(tiny.config(kind), tmp_path, dtype=torch.bfloat16), torch.bfloat16)
    tokens = torch.tensor([tiny.prompt(20, 1)])
    with torch.inference_mode(), Float32():
        precise = model(input_ids=tokens, use_cache=False).logits
    assert precise.dtype == torch.float32
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters() if parameter.dim() > 1)
    with torch.inference_mode():
        rounded = model(input_ids=tokens, use_cache=False).logits
        copied = model.float()(input_ids=tokens, use_cache=False).logits
    assert torch.equal(precise, copied)
    assert not torch.equal(precise, rounded.float())


def test_a_narrow_tensor_is_written_and_conversions_stay_wide() -> None:
    buffer, weight = torch.zeros(4, dtype=torch.bfloat16), nn.Linear(4, 4, dtype=torch.float16)
    with torch.inference_mode(), Float32():
        buffer[1:] = 2.0
        assert weight(torch.ones(1, 4)).to(weight.weight.dtype).dtype == torch.float32
        assert weight.weight.T.dtype == torch.float16  # a view is not widened
        assert torch.zeros(2, dtype=torch.bfloat16).dtype == torch.float32
    assert buffer.tolist() == [0.0, 2.0, 2.0, 2.0]
