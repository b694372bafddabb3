from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from decant.engine import backends
from decant.engine.backends import make_backend
from decant.engine.cuda import attention, attention_kernels
from decant.engine.cuda import backend as cuda_backend
from decant.engine.cuda.attention import TritonAttention
from decant.engine.cuda.backend import CudaBackend
from decant.engine.cuda.fused_layer import TritonLayer
from decant.engine.cuda.sampler import TritonSampler
from decant.engine.engine import Engine
from decant.engine.errors import DeviceFailed, InvalidConfig
from decant.engine.kv_layout import KvFormat, KvLayout, LayerSpec, Window, WindowKind
from decant.engine.loading import load
from decant.engine.model import probe
from decant.engine.model.attention.interface import AttentionCall
from decant.engine.model.backend import TorchBackend
from decant.engine.model.kv_store import KvStore
from decant.engine.model.model import ModelConfig
from decant.engine.model.sampler import Sampler
from decant.engine.scheduler import Limits
from tests import gpu
from tests.engine import tiny

DEVICE = torch.device(gpu.device_type())
SINGLE_KEY_HEAD: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
LAYOUT = KvLayout((LayerSpec(1, 16, 16),), 16, KvFormat(4))


class InterpretedBackend(CudaBackend):
    """Backend for tensors on any device; ``inside`` counts open ``around_step`` blocks."""

    inside = 0

    @contextmanager
    def around_step(self) -> Iterator[None]:
        InterpretedBackend.inside += 1
        with super().around_step():
            yield
        InterpretedBackend.inside -= 1

    @property
    def kind(self) -> str:
        return "interpreted" if self.device.type == "cpu" else super().kind


def shorten_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a load compute few rows before the test computes its own."""
    monkeypatch.setattr(cuda_backend, "TRIAL_SAMPLING", cuda_backend.TRIAL_SAMPLING[:2])
    monkeypatch.setattr(probe, "LENGTHS", (4, 3, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("gemma2", 0), ("gpt_oss", 0), ("llama", 1)])
def test_a_model_generates_what_transformers_generates(
    name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SPLIT", 32)
    shorten_trials(monkeypatch)
    calls: list[AttentionCall] = []
    attend = TritonAttention._attend

    def counted(self: TritonAttention, call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return attend(self, call)

    monkeypatch.setattr(TritonAttention, "_attend", counted)
    changes = SINGLE_KEY_HEAD if name != "llama" else {}
    config = tiny.config(name, **changes)
    config.num_hidden_layers = layers or 2
    folder = tiny.save(config, tmp_path)
    options = ModelConfig(str(folder), dtype="float32", device=DEVICE.type, context_length=128, kv_bytes=1 << 20)
    device = load(options, backend=InterpretedBackend(DEVICE))
    assert isinstance(device.backend, CudaBackend)
    assert device.backend.fallbacks == {}
    assert not device.equal_bits, "linear layers are torch's"
    assert sum(isinstance(module.forward, TritonLayer) for module in device.model.modules()) == layers
    calls.clear()
    prompts = {"long": tiny.prompt(34, 1), "short": tiny.prompt(3, 2)}
    engine = Engine(device, Limits(token_budget=32, max_running=4, context_length=128))
    result = tiny.run(engine, [tiny.greedy(id, tokens, 3) for id, tokens in prompts.items()])
    graphs = getattr(device.runner, "graphs", None)
    assert calls or (graphs and graphs.graphs), "attention ran in the kernel, or in graphs that hold it"
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
    monkeypatch.setattr(cuda_backend, "try_sampler", lambda *_: None)
    backend = CudaBackend(DEVICE)
    store = backend.make_store(LAYOUT, 1, torch.float32)
    backend.prepare(torch.nn.Module(), torch.float32)
    assert reason in backend.fallbacks["attention"]
    assert reason in caplog.text
    assert attention_of(backend, store, monkeypatch) == "torch"


def attention_of(backend: CudaBackend, store: KvStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cuda_backend, "PagedAttention", lambda *_: "torch")
    monkeypatch.setattr(cuda_backend, "TritonAttention", lambda *_: "triton")
    return backend.make_attention(store, *[None] * 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [False, True])
def test_a_kernel_that_fails_in_the_dtype_of_the_comparison_computes_the_served_one(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = {torch.float32: "out of shared memory"}
    monkeypatch.setattr(cuda_backend, "try_attention", lambda spec, layout, dtype, device, **_: fails.get(dtype))
    monkeypatch.setattr(cuda_backend, "try_sampler", lambda *_: None)
    backend = InterpretedBackend(DEVICE, exact=exact)
    wide = backend.make_store(LAYOUT, 1, torch.float32)
    backend.prepare(torch.nn.Module(), torch.bfloat16)
    narrow = backend.make_store(LAYOUT, 1, torch.bfloat16)
    assert backend.fallbacks == {}
    assert attention_of(backend, wide, monkeypatch) == "torch"
    assert attention_of(backend, narrow, monkeypatch) == "triton"


def test_a_missing_compiler_is_a_reason_and_a_lost_device_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [
        subprocess.CalledProcessError(1, "gcc"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700),
    ]

    def fail(*_: object, **__: object) -> None:
        raise errors[0]

    monkeypatch.setattr(cuda_backend, "try_attention", fail)
    monkeypatch.setattr(cuda_backend, "try_sampler", lambda *_: None)
    backend = CudaBackend(DEVICE)
    backend.make_store(LAYOUT, 1, torch.float32)
    backend.prepare(torch.nn.Module(), torch.float32)
    assert "gcc" in backend.fallbacks["attention"]
    del errors[0]
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        CudaBackend(DEVICE).make_store(LAYOUT, 1, torch.float32)


class _WrongSampler(TritonSampler):
    def _draw(self, *args: Any) -> list[int]:
        return [token + 1 for token in super()._draw(*args)]


class _FailingSampler(TritonSampler):
    def _draw(self, *args: Any) -> list[int]:
        raise RuntimeError("out of shared memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "reason"),
    [(_WrongSampler, "draws tokens"), (_FailingSampler, "out of shared memory"), (TritonSampler, None)],
)
def test_a_sampler_that_fails_its_trial_is_replaced_by_torch(
    sampler: type[TritonSampler], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_backend, "TritonSampler", sampler)
    monkeypatch.setattr(cuda_backend, "TRIAL_VOCABULARY", 300)
    backend = InterpretedBackend(DEVICE)
    backend.prepare(torch.nn.Module(), torch.float32)
    assert (type(backend.sampler) is Sampler) == (reason is not None)
    assert (reason or "") in backend.fallbacks.get("sampling", "")
    assert ("sampling" in backend.kind) == (reason is None) or DEVICE.type == "cpu"


def test_a_cuda_device_gets_the_kernels_where_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert type(make_backend(cuda, "none")) is TorchBackend
    assert isinstance(make_backend(cuda), CudaBackend)
    assert isinstance(make_backend(cuda, "triton"), CudaBackend)
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert type(make_backend(cuda)) is TorchBackend


def test_kernels_that_can_not_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match="cuda_kernels: none on the device cpu"):
        make_backend(torch.device("cpu"), "triton")
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match="cuda_kernels: none without the package triton"):
        make_backend(torch.device("cuda"), "triton")


def test_a_gpu_that_triton_does_not_support_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    limit = "cuda_kernels: none on a GPU of compute capability 7.5: triton needs 8.0, got 'triton'"
    with pytest.raises(InvalidConfig, match=limit):
        make_backend(torch.device("cuda"), "triton")


def test_a_step_runs_on_its_own_device_and_not_on_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a machine may have one GPU
    around: Any = make_backend(torch.device("cuda:1"), "triton").around_step()
    assert isinstance(around, torch.cuda.device)
    assert around.idx == 1


def test_the_kernel_that_passes_its_trial_serves_models_of_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial does not know the heads of the model; compiling takes seconds, and may fail."""
    compiled: list[set[tuple[str, Any]]] = []
    groups: list[int] = []
    launch = attention_kernels.attend

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*args: Any, **constants: Any) -> None:
                compiled.append(set(constants.items()))
                groups.append(args[17])
                launch[grid](*args, **constants)

            return run

    monkeypatch.setattr(attention_kernels, "attend", Recorded())
    for group in (cuda_backend.TRIAL_GROUP, 4):
        monkeypatch.setattr(cuda_backend, "TRIAL_GROUP", group)
        assert cuda_backend.try_attention(LAYOUT.layers[0], LAYOUT, torch.float32, DEVICE) is None
    count = len(compiled) // 2
    assert groups == [2] * count + [4] * count
    assert compiled[:count] == compiled[count:]


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("kind", [WindowKind.FULL, WindowKind.CHUNKED])
def test_a_trial_computes_the_kernels_that_serve_a_layer_and_merges_items(
    kind: WindowKind, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SPLIT", 64)
    launched: list[tuple[bool, int, int]] = []
    launch = TritonAttention._launch

    def recorded(self: TritonAttention, call: AttentionCall, out: Any, part: Any, step: Any) -> None:
        launched.append((step.is_windowed, part.shape.split, len(part.merges)))
        launch(self, call, out, part, step)

    monkeypatch.setattr(TritonAttention, "_launch", recorded)
    spec = LayerSpec(1, 16, 16, Window(kind, 5000))
    layout = KvLayout((spec,), 64, KvFormat(4))
    assert cuda_backend.try_attention(spec, layout, torch.float32, DEVICE, is_exact=is_exact) is None
    windowed, splits, merges = zip(*launched, strict=True)
    assert set(windowed) == {is_exact or kind is not WindowKind.FULL}
    assert set(splits) == {64 if is_exact else 0}
    assert merges[0] == 1, "of the single tokens"


@pytest.mark.slow
def test_keys_in_8_bits_give_the_tokens_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", 32)
    shorten_trials(monkeypatch)
    config = tiny.config("llama")
    config.num_hidden_layers = 1
    folder = tiny.save(config, tmp_path)
    settings: Any = {"dtype": "float32", "context_length": 128, "kv_bytes": 1 << 20, "kv_dtype": "int8"}
    device = load(ModelConfig(str(folder), device=DEVICE.type, **settings), backend=InterpretedBackend(DEVICE))
    assert isinstance(device.backend, CudaBackend)
    assert device.backend.fallbacks == {}
    assert device.store.blocks.dtype == torch.int8
    on_cpu = load(ModelConfig(str(folder), device="cpu", **settings))
    request = tiny.greedy("r", tiny.prompt(20, 1), 3)
    found, expected = (tiny.run(Engine(each, Limits(context_length=64)), [request]) for each in (device, on_cpu))
    assert found.tokens == expected.tokens
