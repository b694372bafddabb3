"""How a model is computed on one kind of device. Nothing else asks for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Literal, NamedTuple, Protocol

import torch

from decant.engine.errors import InvalidConfig
from decant.engine.kv_layout import KvLayout
from decant.engine.model.attention import AttentionBackend
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.attention.paged import PagedAttention
from decant.engine.model.kv_memory import HOST_BYTES, bytes_left
from decant.engine.model.kv_store import KvStore
from decant.engine.model.runner import ModelRunner
from decant.engine.model.sampler import Sampler
from decant.engine.model.step_batch import FlatBatch, Ints, flatten
from decant.engine.plan import Device, DeviceMemory, Row

CudaKernels = Literal["none", "triton"]

PARTS = frozenset({"linear", "attention", "elementwise", "sampler"})
"""In which a row's bits may depend on the other rows."""


MIN_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs that triton supports."""


class RunnerLimits(NamedTuple):
    eos_token_ids: frozenset[int]
    context_length: int


class Backend(Protocol):
    @property
    def device(self) -> torch.device: ...
    @property
    def kind(self) -> str:
        """Hardware and kernels, as far as they change bits; part of ``Device.layout``."""
        ...

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """That the device multiplies fast enough to serve."""
        ...

    @property
    def exact(self) -> frozenset[str]:
        """``PARTS`` that give a row the same bits in any batch. With all, the probe requires it."""
        ...

    @property
    def sampler(self) -> Sampler: ...

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Replace modules in place. Weights are copied from mapped files."""
        ...

    def make_store(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype) -> KvStore:
        """Raises InvalidConfig."""
        ...

    def make_runner(
        self, model: torch.nn.Module, store: KvStore, views: Sequence[AttentionWindow], limits: RunnerLimits
    ) -> ModelRunner:
        """The last call of a load."""
        ...

    def flatten(self, rows: Sequence[Row], block_size: int, blank: int) -> FlatBatch: ...

    def make_attention(
        self, store: KvStore, views: Sequence[AttentionWindow], flat: FlatBatch, keep: Ints
    ) -> AttentionBackend:
        """``views[i]``: what layer i sees; ``keep``: flattened positions that need logits."""
        ...

    def memory(self) -> DeviceMemory | None: ...

    def kv_bytes_left(self, steps: Callable[[], object]) -> int:
        """With the weights loaded; ``steps`` runs the largest ones. ``HOST_BYTES`` if it computes in host memory."""
        ...

    def around_step(self) -> AbstractContextManager[object]:
        """Entered by the thread that computes a step: makes a CUDA device its current one, where Triton launches, and
        torch's elementwise loops on a CPU independent of the number of rows."""
        ...

    def choose_threads(self, device: Device, most: int) -> int:
        """Set and return the number of CPU threads, at most ``most``, with which steps are fastest."""
        ...

    def fused_layers(self, model: torch.nn.Module) -> int: ...


class TorchBackend:
    dtypes = frozenset({torch.bfloat16, torch.float16, torch.float32})
    exact: frozenset[str] = frozenset()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sampler: Sampler = Sampler()

    @property
    def kind(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        pass

    def make_store(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype) -> KvStore:
        return KvStore(layout, num_blocks, dtype, self.device)

    def make_runner(
        self, model: torch.nn.Module, store: KvStore, views: Sequence[AttentionWindow], limits: RunnerLimits
    ) -> ModelRunner:
        return ModelRunner(model, store, views, limits.eos_token_ids, self)

    def flatten(self, rows: Sequence[Row], block_size: int, blank: int) -> FlatBatch:
        return flatten(rows, block_size, blank)

    def make_attention(
        self, store: KvStore, views: Sequence[AttentionWindow], flat: FlatBatch, keep: Ints
    ) -> AttentionBackend:
        return PagedAttention(store, views, flat)

    def memory(self) -> DeviceMemory | None:
        return DeviceMemory(*torch.cuda.mem_get_info(self.device)) if self.device.type == "cuda" else None

    graph_bytes = 0

    def kv_bytes_left(self, steps: Callable[[], object]) -> int:
        if self.device.type != "cuda":
            return HOST_BYTES
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        steps()
        activations = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        return bytes_left(DeviceMemory(*torch.cuda.mem_get_info(self.device)), activations, self.graph_bytes)

    def around_step(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def choose_threads(self, device: Device, most: int) -> int:
        return most

    def fused_layers(self, model: torch.nn.Module) -> int:
        return 0


def make_backend(device: torch.device, cuda_kernels: CudaKernels = "none", exact: bool = False) -> Backend:
    """Raises InvalidConfig. ``exact``: only a backend whose rows have the same bits in any batch, as any CPU's."""
    if cuda_kernels == "triton":
        if device.type != "cuda":
            raise InvalidConfig("cuda_kernels", f"none on the device {device}", cuda_kernels)
        if find_spec("triton") is None:
            raise InvalidConfig("cuda_kernels", "none without the package triton (extra cuda)", cuda_kernels)
        if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
            have, need = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
            limit = f"none on a GPU of compute capability {have}: triton needs {need}"
            raise InvalidConfig("cuda_kernels", limit, cuda_kernels)
        from decant.engine.cuda.backend import CudaBackend

        return CudaBackend(device, exact=exact)
    if device.type == "cpu":
        from decant.engine.cpu.backend import make_cpu_backend

        return make_cpu_backend()
    if exact:
        raise InvalidConfig("exact", "off on a CUDA device without cuda_kernels triton", exact)
    return TorchBackend(device)
