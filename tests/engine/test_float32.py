from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from decant.engine.model import probe
from decant.engine.model.float32 import Float32
from tests.engine import tiny, tiny_configs


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "mixtral"])
def test_probe_sequences_have_the_same_logits_in_a_batch_and_alone(kind: str, tmp_path: Path) -> None:
    changes = tiny_configs.SERVED[kind]
    folder = tiny.save(tiny.config(changes[0], **changes[1]), tmp_path, dtype=torch.bfloat16)
    model = tiny.reference(folder, torch.bfloat16)
    early = probe.probe_sequences(model, tiny.CONTEXT_LENGTH)[:-1]
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    logits = probe.reference_logits(model, kind, tiny.CONTEXT_LENGTH).logits
    assert len(passes) == 4  # two batches, each in float32 and in bfloat16
    for trial, ours in zip(early, logits, strict=False):
        with torch.inference_mode(), Float32():
            theirs = model(input_ids=torch.tensor([trial.tokens]), use_cache=False).logits[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_rows_of_a_table_are_widened_and_not_the_table() -> None:
    table = nn.Embedding(1000, 8, dtype=torch.bfloat16)
    widened: list[int] = []
    with torch.inference_mode(), _Sizes(widened), Float32():
        rows = table(torch.tensor([3, 5]))
    assert rows.dtype == torch.float32
    assert torch.equal(rows, table.weight[[3, 5]].float())
    assert max(widened) == 16


class _Sizes(TorchDispatchMode):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._sizes.append(made.numel())
        return made
