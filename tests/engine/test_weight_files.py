from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decant import models
from decant.engine.checkpoint import weight_files
from decant.engine.errors import ModelRefused


def make(
    folder: Path, config: Any = None, dtype: str = "BF16", tensor: str = "model.norm.weight", **header: Any
) -> Path:
    entry = {"dtype": dtype, "shape": [2], "data_offsets": [0, 4], **header}
    encoded = json.dumps({tensor: entry}).encode()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | (config or {})))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"\0" * 4)
    return folder


def test_a_good_folder_passes(tmp_path):
    weight_files.check(make(tmp_path))
    weight_files.check(models.path())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "F8_E4M3"}, "F8_E4M3 weights are not served yet"),
        ({"dtype": "U8"}, "U8 weights are not served yet"),
        ({"data_offsets": [0, 5]}, "bytes, and its header says"),
        ({"data_offsets": None}, "can't be read as safetensors"),
        ({"config": {"quantization_config": {"quant_method": "hqq"}}}, "HQQ weights are not served yet"),
        (
            {"config": {"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}}},
            "bitsandbytes weights",
        ),
        ({"config": {"transformers_weights": "other.safetensors"}}, "transformers_weights"),
    ],
    ids=str,
)
def test_unservable_files_are_refused_with_the_folder_and_the_reason(changes, reason, tmp_path):
    with pytest.raises(ModelRefused, match=reason) as refused:
        weight_files.check(make(tmp_path, **changes))
    assert str(tmp_path) in refused.value.model


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "the folder has no weights"),
        ({"pytorch_model.bin": b""}, "only pytorch_model.bin, and pickles can run code"),
        ({"model.gguf": b""}, "only model.gguf$"),
        ({"consolidated.safetensors": b""}, "no file named model.safetensors"),
        ({"model.safetensors.index.json": b"{}"}, "has no weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'}, "has no weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "x.safetensors"}}'}, "1 of 1 weight files are miss"),
        ({"model.safetensors.index.json": b"{"}, r"index\.json can't be read"),
    ],
    ids=str,
)
def test_weights_that_are_not_there_are_refused_by_name(files, reason, tmp_path):
    make(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelRefused, match=reason):
        weight_files.check(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", "I8"),
        ("model.layers.0.self_attn.q_proj.bias", "I32"),
        ("model.layers.0.self_attn.q_proj.bias", "U8"),
        ("model.layers.0.mlp.up_proj.qweight", "I32"),
    ],
)
def test_integers_in_place_of_weights_are_refused_whatever_their_name(tensor, dtype, tmp_path):
    with pytest.raises(ModelRefused, match=f"{dtype} weights are not served yet .*{tensor}"):
        weight_files.check(make(tmp_path, dtype=dtype, tensor=tensor))


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        ("gpt_neox.layers.0.attention.bias", "U8"),
        ("transformer.h.0.attn.bias", "BOOL"),
        ("vision_model.embeddings.position_ids", "I64"),
    ],
)
def test_masks_and_positions_of_older_checkpoints_pass(tensor, dtype, tmp_path):
    weight_files.check(make(tmp_path, dtype=dtype, tensor=tensor))


def test_the_check_needs_no_torch():
    loaded = "'torch' in sys.modules or 'transformers' in sys.modules"
    code = f"import sys; import decant.engine.checkpoint.weight_files; sys.exit({loaded})"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
