from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from decant.engine.checkpoint.checkpoint import DTYPES
from decant.engine.checkpoint.quantize import QUANTIZATIONS, Quantization
from decant.engine.costs import StepCostModel
from decant.engine.errors import InvalidConfig, check_int
from decant.engine.kv_layout import HOST_KV_SHARE, INT8_KV, KV_DTYPES, KvDtype, KvFormat, KvLayout, Window
from decant.engine.library_errors import refuse_model_on_error, translate_device_errors
from decant.engine.model import kv_memory, rope
from decant.engine.model.adapters import NO_ADAPTERS, ModelAdapters
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.attention.paged import TILE
from decant.engine.model.backend import PARTS, Backend, CudaKernels, RunnerLimits
from decant.engine.model.kv_memory import StepSizes
from decant.engine.model.kv_store import KvStore
from decant.engine.model.probe import (
    ProbeResult,
    Subject,
    check_attention,
    learn_attention,
    probe,
    probe_sequences,
    probe_step,
    reference_logits,
    token_embeddings,
)
from decant.engine.model.recurrent_state import refuse_other_state
from decant.engine.model.runner import ModelRunner
from decant.engine.plan import BlockMemory, DeviceMemory, StepPlan, StepResult

Activations = Literal["auto", "int8"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Settings of a load.

    model           a folder or a hub name; ``revision`` pins the latter
    dtype           "auto" (the checkpoint's; float16 becomes bfloat16 on a CPU), or a name in DTYPES
    device          "auto" (CUDA when there is one), "cpu", "cuda", "cuda:1", ...
    context_length  in tokens; None: the checkpoint's
    kv_bytes        None: what a GPU has left; in the memory of the host ``HOST_KV_BYTES``, and less where it has less
    host_memory     bytes of the host's memory that are left for this process, read after the weights; None: unknown
    block_size      in tokens: a power of two of at most 128; None: what the backend's kernels are fastest with
    eos_token_ids   tokens that end a sequence; those outside the vocabulary are dropped
    cuda_kernels    "none": torch alone; "triton": own kernels; "auto": own kernels where triton runs
    kv_dtype        how blocks store keys and values; "auto": in ``dtype``; "int8": in 8 bits, with a scale for each
    activations     what inputs of linear layers with int8 or int4 weights are rounded to; "auto": not at all
    quantize        what to quantize linear layers to while they are loaded, the head among them; None: as they are
    exact           on CUDA: only kernels that give a row the same bits in any batch; a CPU has no others
    adapters        whether adapters can be added to the device
    adapter_bytes   bytes that are kept for them if ``kv_bytes`` is None
    step_sizes      the largest steps, for which a GPU keeps memory if ``kv_bytes`` is None
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    context_length: int | None = None
    kv_bytes: int | None = None
    host_memory: Callable[[], int | None] = lambda: None
    block_size: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    cuda_kernels: CudaKernels = "auto"
    exact: bool = False
    kv_dtype: KvDtype = "auto"
    quantize: Quantization | None = None
    activations: Activations = "auto"
    adapters: bool = False
    adapter_bytes: int = 0
    step_sizes: StepSizes = field(default_factory=StepSizes)

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise InvalidConfig("dtype", f"auto or one of {', '.join(DTYPES)}", self.dtype)
        if self.quantize is not None and self.quantize not in QUANTIZATIONS:
            raise InvalidConfig("quantize", f"one of {', '.join(QUANTIZATIONS)}", self.quantize)
        if self.activations not in ACTIVATIONS:
            raise InvalidConfig("activations", f"one of {', '.join(ACTIVATIONS)}", self.activations)
        if self.kv_dtype not in KV_DTYPES:
            raise InvalidConfig("kv_dtype", f"one of {', '.join(KV_DTYPES)}", self.kv_dtype)
        if self.kv_dtype != "auto" and self.block_size == 1:
            raise InvalidConfig("block_size", f"at least 2 with kv_dtype {self.kv_dtype}", self.block_size)
        if self.block_size is not None:
            check_int("block_size", self.block_size, minimum=1)
            if self.block_size not in (1, 2, 4, 8, 16, 32, 64, TILE):
                raise InvalidConfig("block_size", f"a power of two of at most {TILE}", self.block_size)
        if self.context_length is not None:
            check_int("context_length", self.context_length, minimum=1)
        if self.kv_bytes is not None:
            check_int("kv_bytes", self.kv_bytes, minimum=1)


@dataclass(slots=True)
class ModelDevice:
    store: KvStore
    runner: ModelRunner
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    layout_hash: str
    quantization: str | None
    equal_bits: bool
    probe_result: ProbeResult
    backend: Backend
    model: torch.nn.Module = field(repr=False)
    costs: StepCostModel = field(default_factory=StepCostModel)
    lookahead: int = 0

    @property
    def adapters(self) -> ModelAdapters:
        return self.runner.adapters

    @property
    def overlaps_steps(self) -> bool:
        return self.runner.overlaps_steps

    @property
    def embedding_size(self) -> int:
        return self.runner.embedding_size

    @property
    def num_blocks(self) -> int:
        return self.store.num_blocks

    @property
    def block_size(self) -> int:
        return self.store.layout.block_size

    @property
    def windows(self) -> tuple[Window, ...]:
        return self.store.layout.windows

    @property
    def block_bytes(self) -> int:
        return self.store.block_bytes

    @property
    def block_memory(self) -> BlockMemory:
        return self.store.block_memory

    def memory(self) -> DeviceMemory | None:
        return self.backend.memory()

    def run(self, plan: StepPlan) -> StepResult:
        return self.submit(plan)()

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step; this call and the returned function raise DeviceFailed."""
        with translate_device_errors():
            result = self.runner.submit(plan)
        return partial(_await, result)

    def read(self, block: int) -> memoryview:
        with translate_device_errors():
            return self.store.read(block)

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        with translate_device_errors():
            self.store.write(block, data)


def _await(result: Callable[[], StepResult]) -> StepResult:
    with translate_device_errors():
        return result()


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model with its weights on the device.

    layout_hash   a device's ``layout_hash``, given its ``KvLayout``
    check_files   raises ModelRefused if the files that the weights are mapped from have changed
    quantization  of most weights
    """

    model: PreTrainedModel
    name: str
    context_length: int
    layout_hash: Callable[[KvLayout], str]
    check_files: Callable[[], object] = lambda: None
    quantization: str | None = None


@translate_device_errors()
def make_device(
    read: ReadModel, config: ModelConfig, backend: Backend, progress: Callable[[int], None] = lambda percent: None
) -> ModelDevice:
    """Make the device of a model, whose modules it replaces. Raises ModelRefused, InvalidConfig, DeviceFailed."""
    model, name, context_length = read.model, read.name, read.context_length
    dtype = token_embeddings(model).weight.dtype
    with refuse_model_on_error(name, "its rotary scaling can't be frozen"):
        rope.freeze(model, context_length)
    refuse_other_state(model, name, probe_sequences(model, context_length)[0].tokens)
    progress(40)
    reference = reference_logits(model, name, context_length)
    progress(60)
    layer_windows, specs = learn_attention(model, name, context_length)
    progress(70)
    kv_format = INT8_KV if config.kv_dtype == "int8" else KvFormat(dtype.itemsize)
    layout = KvLayout(specs, config.block_size or backend.block_size, kv_format)
    if config.kv_bytes is not None and config.kv_bytes < layout.block_bytes:
        raise InvalidConfig("kv_bytes", f"at least one block of {layout.block_bytes} bytes", config.kv_bytes)
    subject = Subject(model, name, context_length, backend, rounds_rows=config.activations == "int8")
    difference = check_attention(subject, layout, layer_windows, reference)
    progress(80)
    with refuse_model_on_error(name, "its weights can't be prepared"):
        backend.prepare(model, dtype)
    read.check_files()  # all weights are copied from the mapped files now
    progress(90)
    exact = probe(subject, layout, layer_windows, reference)
    progress(98)
    kv_bytes = config.kv_bytes or _free_kv_bytes(subject, layout, layer_windows, config)
    store = backend.make_store(layout, kv_bytes // layout.block_bytes, dtype)
    store.prefault()
    adapters = _adapters(subject, layout, layer_windows) if config.adapters else NO_ADAPTERS
    vocab_size = token_embeddings(model).num_embeddings
    eos = frozenset(token for token in config.eos_token_ids if token < vocab_size)
    runner = backend.make_runner(model, store, layer_windows, RunnerLimits(eos, context_length))
    runner.adapters = adapters
    return ModelDevice(
        store=store,
        runner=runner,
        context_length=context_length,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        layout_hash=read.layout_hash(layout),
        quantization=read.quantization,
        equal_bits=backend.exact >= PARTS,
        probe_result=ProbeResult(exact, difference),
        backend=backend,
        model=model,
    )


def _adapters(subject: Subject, layout: KvLayout, layer_windows: Sequence[AttentionWindow]) -> ModelAdapters:
    run, tokens = probe_step(subject, layout, layer_windows)
    return subject.backend.make_adapters(subject.model, run, tokens)


def _free_kv_bytes(
    subject: Subject, layout: KvLayout, layer_windows: Sequence[AttentionWindow], config: ModelConfig
) -> int:
    most = config.step_sizes
    dtype = token_embeddings(subject.model).weight.dtype

    def steps() -> None:
        memory = subject.backend.memory()
        slots = layout.block_size * max(1, memory.total // layout.block_bytes) if memory else sys.maxsize
        sizes = most.possible(subject.context_length, slots)
        blocks = kv_memory.blocks_of_largest_steps(sizes, subject.context_length, layout.block_size)
        store = subject.backend.make_store(layout, blocks, dtype)
        runner = ModelRunner(subject.model, store, layer_windows, frozenset(), subject.backend)
        for plan in kv_memory.largest_steps(sizes, subject.context_length, layout.block_size, len(layout.groups)):
            runner.run(plan)

    left = kv_memory.choose(subject.backend.kv_bytes_left, steps, most)
    if subject.backend.loads_to_device:
        left -= config.adapter_bytes
    elif (free := config.host_memory()) is not None:
        left = min(left, int((free - config.adapter_bytes) * HOST_KV_SHARE))
    if left < layout.block_bytes:
        raise InvalidConfig("kv_bytes", f"memory left for at least one block of {layout.block_bytes} bytes", left)
    return left
