"""Weights are in memory once: in the order that products want, and not in the file that they were read from too."""

import gc
import sys
from pathlib import Path

import pytest

from bench import shapes
from engine.model import ModelConfig, load


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what is mapped")
def test_the_file_of_a_loaded_checkpoint_is_let_go(tmp_path: Path) -> None:
    folder = shapes.make("tiny", tmp_path / "tiny")
    device = load(ModelConfig(str(folder), device="cpu", window=64, kv_bytes=1 << 20))
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert device.vocab_size == 512
