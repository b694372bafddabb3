from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from decant.engine.cpu.linear import PackedExperts, PackedParallelExperts, pack
from tests.engine import tiny


@pytest.mark.parametrize(("kind", "packed"), [("dbrx", PackedExperts), ("jetmoe", PackedParallelExperts)])
def test_packed_experts_hold_none_of_the_weights_that_they_were_made_of(kind: str, packed: type[nn.Module]) -> None:
    model: nn.Module = AutoModelForCausalLM.from_config(tiny.config(kind), dtype=torch.float32)
    experts = [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith((".w1", ".v1", ".w2")) or parameter.dim() == 3
    ]
    assert len(experts) >= 6
    freed = [weakref.ref(parameter) for parameter in experts]
    del experts
    with torch.inference_mode():
        pack(model, None)
    assert any(isinstance(module, packed) for module in model.modules())
    assert [weight() for weight in freed] == [None] * len(freed)
