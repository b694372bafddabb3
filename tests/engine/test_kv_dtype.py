"""A model served with its keys and values in 8 bits."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from decant.engine.errors import ModelRefused
from decant.engine.model.model import ModelDevice
from decant.engine.plan import Row
from decant.engine.request import Request
from tests.engine import tiny
from tests.engine.served import rewrite, serve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

LENGTH = 90

CACHES = {
    "windows": "gemma3",
    "chunks": "llama4_text",
    "windows and sinks": "gpt_oss",
    "latent attention, with keys and values of different widths": "deepseek_v3",
}


def logits(device: ModelDevice) -> torch.Tensor:
    count = -(-LENGTH // device.block_size)
    blocks = tuple(array("i", range(group * count, (group + 1) * count)) for group in range(len(device.windows)))
    tokens = tiny.prompt(LENGTH, 1)
    row = Row(Request("r", tokens), tokens, 0, LENGTH, blocks, True)
    with torch.inference_mode():
        return device.runner.logits([row], np.arange(LENGTH)).float()


@pytest.mark.parametrize("kind", CACHES)
def test_logits_are_near_those_with_plain_keys_in_any_kind_of_cache(kind: str, tmp_path: Path) -> None:
    folder = tiny.save(tiny.config(CACHES[kind]), tmp_path)
    plain, coded = (serve(folder, dtype="float32", kv_dtype=kv) for kv in ("auto", "int8"))
    assert coded.probe_result.exact
    assert coded.store.blocks.dtype == torch.int8
    expected, found = logits(plain), logits(coded)
    difference = (found - expected).square().mean().sqrt() / expected.std()
    assert 0 < difference < 0.1


def test_more_sequences_fit_into_the_same_memory(llama: Path) -> None:
    plain, coded = (serve(llama, dtype="float32", kv_dtype=kv) for kv in ("auto", "int8"))
    assert coded.num_blocks > 3.5 * plain.num_blocks


def test_a_model_whose_numbers_are_lost_in_8_bits_is_refused(tmp_path: Path) -> None:
    """One number of each value is a thousand times the others, and its products undo that."""

    def widen(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, weight in weights.items():
            if name.endswith("v_proj.weight"):
                weight[::16] *= 1000
            if name.endswith("o_proj.weight"):
                weight[:, ::16] /= 1000
        return weights

    folder = rewrite(tiny.save(tiny.config("llama"), tmp_path), widen)
    assert serve(folder, dtype="float32").probe_result.exact
    with pytest.raises(ModelRefused, match=r"can't be in int8: its logits differ .* set kv_dtype to auto"):
        serve(folder, dtype="float32", kv_dtype="int8")
