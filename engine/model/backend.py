"""How a model is computed on one kind of device. Only backends and ``engine.backends`` ask for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, Protocol

import torch

from decant.engine.errors import InvalidConfig
from decant.engine.kv_layout import BLOCK_SIZE, HOST_KV_BYTES, KvLayout
from decant.engine.model.adapters import ModelAdapters
from decant.engine.model.attention.interface import AttentionBackend
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.attention.paged import PagedAttention
from decant.engine.model.kv_memory import bytes_left
from decant.engine.model.kv_store import KvStore
from decant.engine.model.runner import ModelRunner
from decant.engine.model.sampler import Sampler
from decant.engine.model.step_batch import FlatBatch, Ints, flatten
from decant.engine.plan import Device, DeviceMemory, Row

CudaKernels = Literal["auto", "none", "triton"]

PARTS = frozenset({"linear", "attention", "elementwise", "sampler"})
"""Parts of a step in which a row's bits may depend on the other rows."""


class RunnerLimits(NamedTuple):
    eos_token_ids: frozenset[int]
    context_length: int


class Backend(Protocol):
    @property
    def device(self) -> torch.device: ...
    @property
    def kind(self) -> str:
        """Hardware and kernels, as far as they change bits."""
        ...

    @property
    def identity(self) -> tuple[str, str]:
        """Device type and ``kind``, the part of ``Device.layout_hash`` that names where a model is computed."""
        ...

    @property
    def loads_to_device(self) -> bool:
        """Whether a load puts each plain weight on the device as it is read."""
        ...

    @property
    def keeps_codes(self) -> bool:
        """Whether ``prepare`` takes quantized weights of layers and experts; if not, a load dequantizes them."""
        ...

    @property
    def quantize_piece(self) -> int:
        """Numbers of a weight that ``--quantize`` takes at once."""
        ...

    @property
    def rounds_rows(self) -> bool:
        """Whether its products round the inputs of a ``CodedLinear`` that asks for it."""
        ...

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Dtypes that the device multiplies fast enough to serve."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block with which the kernels are fastest."""
        ...

    @property
    def exact(self) -> frozenset[str]:
        """The ``PARTS`` that give a row the same bits in any batch."""
        ...

    @property
    def sampler(self) -> Sampler: ...

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Replace modules in place, and copy weights that are in mapped files."""
        ...

    def make_store(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype) -> KvStore:
        """Make a store of zeros. Raises InvalidConfig."""
        ...

    def make_runner(
        self, model: torch.nn.Module, store: KvStore, layer_windows: Sequence[AttentionWindow], limits: RunnerLimits
    ) -> ModelRunner:
        """Make the runner that serves: the last call of a load."""
        ...

    def make_adapters(self, model: torch.nn.Module, run: Callable[[], object], tokens: int) -> ModelAdapters:
        """Make the adapters of a prepared model, none yet. Raises InvalidConfig where adapters are not served.

        ``run`` computes a step of ``tokens`` tokens that keeps fewer of them.
        """
        ...

    def flatten(self, rows: Sequence[Row], block_size: int, null_block: int) -> FlatBatch: ...

    def make_attention(
        self, store: KvStore, layer_windows: Sequence[AttentionWindow], flat: FlatBatch, keep: Ints
    ) -> AttentionBackend:
        """Make a step's attention. Only the flattened positions ``keep`` need logits."""
        ...

    def memory(self) -> DeviceMemory | None: ...

    def kv_bytes_left(self, steps: Callable[[], object]) -> int:
        """Bytes left beside the weights while ``steps`` runs the largest steps, or ``HOST_KV_BYTES`` in host memory."""
        ...

    def around_step(self) -> AbstractContextManager[object]:
        """Context of a step: sets the thread's current CUDA device, or runs torch's loops on one CPU thread."""
        ...

    def choose_threads(self, device: Device, most: int) -> int:
        """Set and return the number of CPU threads, at most ``most``, with which steps are fastest."""
        ...

    def fused_layers(self, model: torch.nn.Module) -> int: ...


class TorchBackend:
    """The backend for any device of PyTorch: its operators as they are.

    A backend makes what a device computes differently: prepared weights, store, runner, attention and sampler. The CPU
    and CUDA backends extend this one; ``choose_backend`` picks one for ``loading``.
    """

    dtypes = frozenset({torch.bfloat16, torch.float16, torch.float32})
    exact: frozenset[str] = frozenset()
    keeps_codes = False
    quantize_piece = 1 << 24  # a GPU is busy with so many
    rounds_rows = False
    block_size = BLOCK_SIZE

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sampler: Sampler = Sampler()

    @property
    def kind(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def identity(self) -> tuple[str, str]:
        return self.device.type, self.kind

    @property
    def loads_to_device(self) -> bool:
        return self.device.type != "cpu"

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        pass

    def make_store(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype) -> KvStore:
        return KvStore(layout, num_blocks, dtype, self.device)

    def make_runner(
        self, model: torch.nn.Module, store: KvStore, layer_windows: Sequence[AttentionWindow], limits: RunnerLimits
    ) -> ModelRunner:
        return ModelRunner(model, store, layer_windows, limits.eos_token_ids, self)

    def make_adapters(self, model: torch.nn.Module, run: Callable[[], object], tokens: int) -> ModelAdapters:
        raise InvalidConfig(
            "adapters", f"off on the device {self.device}: CPUs, and GPUs with triton, compute with them", True
        )

    def flatten(self, rows: Sequence[Row], block_size: int, null_block: int) -> FlatBatch:
        return flatten(rows, block_size, null_block)

    def make_attention(
        self, store: KvStore, layer_windows: Sequence[AttentionWindow], flat: FlatBatch, keep: Ints
    ) -> AttentionBackend:
        return PagedAttention(store, layer_windows, flat)

    def memory(self) -> DeviceMemory | None:
        return DeviceMemory(*torch.cuda.mem_get_info(self.device)) if self.device.type == "cuda" else None

    graph_bytes = 0

    def kv_bytes_left(self, steps: Callable[[], object]) -> int:
        if self.device.type != "cuda":
            return HOST_KV_BYTES
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
