import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from decant.bench import model_shapes as shapes
from decant.engine.cpu.kernels import loader as native
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig
from tests.e2e import fork_server
from tests.engine import quantized, test_mxfp4, tiny
from tests.engine.tiny_configs import MOE

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@LINUX
def test_a_load_releases_the_file_of_its_checkpoint(tmp_path: Path) -> None:
    folder = shapes.make("tiny", tmp_path / "tiny")
    device = load(ModelConfig(str(folder), device="cpu", context_length=64, kv_bytes=1 << 20))
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert device.vocab_size == 512


@LINUX
@pytest.mark.slow
def test_a_checkpoint_that_changes_its_dtype_is_never_in_memory_twice(tmp_path: Path) -> None:
    import torch

    made = tiny.config("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=16, head_dim=64)
    folder = tiny.save(made, tmp_path, dtype=torch.bfloat16)
    weights = 2 * (folder / "model.safetensors").stat().st_size  # in float32
    run = fork_server.completed("tests.engine.measure_load", str(folder), "float32", timeout=600)
    measured = json.loads(run.stdout.splitlines()[-1])
    assert measured["peak"] < 1.6 * weights, run.stderr
    assert measured["end"] < 1.3 * weights


EXPERTS: dict[str, Any] = {**MOE, "num_experts": 16, "moe_intermediate_size": 1024, "num_hidden_layers": 2}
HEADS = {"hidden_size": 1024, "head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16}


def save_gptq(folder: Path, kind: str = "llama", **sizes: Any) -> Path:
    return quantized.save_random_gptq(tiny.config(kind, **HEADS, **sizes, tie_word_embeddings=False), folder)


def save_mxfp4(folder: Path, **sizes: Any) -> Path:
    test_mxfp4.quantize(tiny.save_large(tiny.config("gpt_oss", **HEADS, **sizes), folder))
    return folder


@LINUX
@pytest.mark.skipif(native.kind().endswith("torch"), reason="torch's products widen the weights")
@pytest.mark.slow
@pytest.mark.parametrize(
    "save",
    [
        partial(save_gptq, intermediate_size=3072, num_hidden_layers=16),
        partial(save_gptq, kind="qwen3_moe", **EXPERTS),
        partial(save_mxfp4, num_local_experts=32, intermediate_size=1024),
    ],
    ids=["gptq", "gptq experts", "mxfp4 experts"],
)
def test_a_quantized_checkpoint_takes_little_more_than_its_files(save: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = save(tmp_path)
    stored = (folder / "model.safetensors").stat().st_size
    run = fork_server.completed("tests.engine.measure_load", str(folder), "bfloat16", timeout=600)
    measured = json.loads(run.stdout.splitlines()[-1])
    fixed = 64 << 20  # what does not grow with the model
    assert measured["peak"] < 1.15 * stored + fixed, run.stderr
