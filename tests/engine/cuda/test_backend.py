"""The CUDA backend, on CPU tensors in triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from decant.engine.cuda import attention
from decant.engine.cuda import backend as cuda_backend
from decant.engine.cuda.attention import TritonAttention
from decant.engine.cuda.backend import CudaBackend
from decant.engine.engine import Engine
from decant.engine.errors import InvalidConfig
from decant.engine.kv_layout import KvLayout, LayerSpec
from decant.engine.model import backend as model_backend
from decant.engine.model import model as model_module
from decant.engine.model.attention import AttentionCall
from decant.engine.model.model import ModelConfig, load
from decant.engine.scheduler import Limits
from tests.engine import tiny

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
LAYOUT = KvLayout((LayerSpec(1, 16, 16),), 16, 4)


class InterpretedBackend(CudaBackend):
    """The backend, whatever device the tensors are on."""

    @property
    def kind(self) -> str:
        return "interpreted" if self.device.type == "cpu" else super().kind


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_model_generates_what_transformers_generates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside decodes, with sliding windows, softcap and sinks."""
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(model_module, "make_backend", lambda device, _: InterpretedBackend(device))
    calls: list[AttentionCall] = []
    attend = TritonAttention.attend

    def counted(self: TritonAttention, call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return attend(self, call)

    monkeypatch.setattr(TritonAttention, "attend", counted)
    folder = tiny.save(tiny.config(name), tmp_path)
    device = load(ModelConfig(str(folder), dtype="float32", device=DEVICE.type, context_length=128, kv_bytes=1 << 20))
    assert isinstance(device.backend, CudaBackend)
    assert device.backend.fallbacks == {}
    assert not device.equal_bits, "linear layers are torch's"
    calls.clear()
    prompts = {"long": tiny.prompt(40, 1), "short": tiny.prompt(9, 2)}
    engine = Engine(device, Limits(token_budget=32, max_running=4, context_length=128))
    result = tiny.run(engine, [tiny.greedy(id, tokens, 3) for id, tokens in prompts.items()])
    assert calls, "attention ran in the kernel"
    reference = tiny.reference(folder)
    for id, tokens in prompts.items():
        assert tuple(result.tokens[id]) == tiny.generate(reference, tokens, 3).tokens


class _Wrong(TritonAttention):
    def attend(self, call: AttentionCall) -> torch.Tensor:
        return super().attend(call) * 1.01


class _Failing(TritonAttention):
    def attend(self, call: AttentionCall) -> torch.Tensor:
        raise RuntimeError("out of shared memory")


@pytest.mark.parametrize(("broken", "reason"), [(_Wrong, "differ from torch's"), (_Failing, "out of shared memory")])
def test_a_kernel_that_fails_its_trial_is_replaced_by_torch(
    broken: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_backend, "TritonAttention", broken)
    backend = CudaBackend(DEVICE)
    backend.make_store(LAYOUT, 1, torch.float32)
    assert reason in backend.fallbacks["attention"]
    assert reason in caplog.text
    made: list[Any] = []
    monkeypatch.setattr(cuda_backend, "PagedAttention", lambda *args: made.append(args))
    backend.make_attention(*[None] * 4)  # type: ignore[arg-type]
    assert made


def test_a_cuda_device_gets_the_kernels_on_request_only() -> None:
    cuda = torch.device("cuda")
    assert type(model_backend.make_backend(cuda)) is model_backend.TorchBackend
    assert isinstance(model_backend.make_backend(cuda, "triton"), CudaBackend)


def test_kernels_that_can_not_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match="cuda_kernels: none on the device cpu"):
        model_backend.make_backend(torch.device("cpu"), "triton")
    monkeypatch.setattr(model_backend, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match="cuda_kernels: none without the package triton"):
        model_backend.make_backend(torch.device("cuda"), "triton")


def test_a_kernel_that_agrees_passes_its_trial() -> None:
    assert cuda_backend.try_attention(LAYOUT.layers[0], LAYOUT, torch.float32, DEVICE) is None
