from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decant.engine.backends import make_backend
from decant.engine.checkpoint import checkpoint
from decant.engine.cpu.backend import CpuBackend, NativeBackend, make_cpu_backend
from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.backend import PARTS, Backend, TorchBackend
from decant.engine.model.model import ModelConfig
from decant.engine.model.probe import learn_attention
from decant.engine.model.runner import ModelRunner
from decant.engine.scheduler import Limits
from tests.engine import tiny

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "engine"
CPU = torch.device("cpu")


def backends() -> list[Backend]:
    native = [] if KERNELS is None else [NativeBackend(KERNELS)]
    return [TorchBackend(CPU), CpuBackend(), *native]


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends(), ids=lambda backend: type(backend).__name__)
def test_each_backend_generates_what_the_loaded_device_generates(backend: Backend, tmp_path: Path) -> None:
    folder = tiny.save(tiny.config("llama"), tmp_path)
    device = load(ModelConfig(str(folder), dtype="float32", device="cpu", kv_bytes=1 << 20))
    model = checkpoint.open(str(folder)).read(torch.float32, CPU)
    layer_windows, specs = learn_attention(model, "tiny", device.context_length)
    assert specs == device.store.layout.layers
    backend.prepare(model, torch.float32)
    store = backend.make_store(device.store.layout, device.num_blocks, torch.float32)
    runner = ModelRunner(model, store, layer_windows, frozenset(), backend)
    other = replace(device, model=model, store=store, runner=runner, backend=backend)
    requests = [tiny.greedy("long", list(range(5, 45)), 12), tiny.greedy("short", [7, 8, 9], 12)]
    limits = Limits(token_budget=16, max_running=4, context_length=128)
    expected, result = (tiny.run(Engine(each, limits), requests).tokens for each in (device, other))
    assert result == expected


def test_a_cpu_gets_its_own_backend_and_promises_exact_rows() -> None:
    backend = make_backend(CPU)
    assert type(backend) is type(make_cpu_backend())
    assert isinstance(backend, CpuBackend if KERNELS is None else NativeBackend)
    assert backend.exact == PARTS
    assert TorchBackend(CPU).exact == frozenset()


def test_only_backends_ask_for_the_device_or_the_kernels() -> None:
    question = re.compile(r"\bKERNELS\b|device\.type\b|\bis_cpu\b|(from|import) decant\.engine\.cpu")
    allowed = {ENGINE / "backends.py", ENGINE / "model" / "backend.py"}
    folders = [ROOT / name for name in ("worker", "prefill_worker", "decode_worker", "handoff")]
    files = [path for path in ENGINE.rglob("*.py") if not {"cpu", "cuda"} & {*path.relative_to(ENGINE).parts}]
    files += [path for folder in folders for path in folder.rglob("*.py")]
    assert {path for path in files if question.search(path.read_text(encoding="utf-8"))} == allowed


def test_only_a_cpu_tries_numbers_of_threads(tmp_path: Path) -> None:
    device = load(ModelConfig(str(tiny.save(tiny.config("llama"), tmp_path)), device="cpu", kv_bytes=1 << 20))
    threads = torch.get_num_threads()
    try:
        assert CpuBackend().choose_threads(device, 2) == torch.get_num_threads() <= 2
    finally:
        torch.set_num_threads(threads)
    assert TorchBackend(CPU).choose_threads(device, 64) == 64
    assert torch.get_num_threads() == threads
