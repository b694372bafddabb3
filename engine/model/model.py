"""Loads a Hugging Face checkpoint as a device: read weights, replace attention, prepare, probe, allocate blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from decant.engine.checkpoint import checkpoint
from decant.engine.checkpoint.checkpoint import DTYPES
from decant.engine.costs import StepCostModel
from decant.engine.errors import InvalidConfig, check_whole
from decant.engine.kv_layout import KvLayout, Window
from decant.engine.model import rope
from decant.engine.model.attention.paged import TILE
from decant.engine.model.backend import PARTS, Backend, CudaKernels, make_backend
from decant.engine.model.kv_store import KvStore
from decant.engine.model.probe import (
    ProbeResult,
    Subject,
    check_attention,
    learn_attention,
    probe,
    probe_sequences,
    reference_logits,
    token_embeddings,
)
from decant.engine.model.recurrent_state import refuse_other_state
from decant.engine.model.runner import ModelRunner
from decant.engine.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model to serve, on what, with how much memory.

    model           a folder or a hub name; ``revision`` pins the latter
    dtype           "auto" (the checkpoint's; float16 becomes bfloat16 on a CPU), or a name in DTYPES
    device          "auto" (CUDA when there is one), "cpu", "cuda", "cuda:1", ...
    context_length  longest sequence, in tokens; None: the checkpoint's
    kv_bytes        memory for the blocks
    block_size      tokens per block: a power of two of at most 128
    cuda_kernels    what computes attention on CUDA: torch alone (none), or Triton kernels, not measured on a GPU yet
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    context_length: int | None = None
    kv_bytes: int = 1 << 30
    block_size: int = 16
    cuda_kernels: CudaKernels = "none"

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise InvalidConfig("dtype", f"auto or one of {', '.join(DTYPES)}", self.dtype)
        check_whole("block_size", self.block_size, least=1)
        if self.block_size not in (1, 2, 4, 8, 16, 32, 64, TILE):
            raise InvalidConfig("block_size", f"a power of two of at most {TILE}", self.block_size)
        if self.context_length is not None:
            check_whole("window", self.context_length, least=1)
        check_whole("kv_bytes", self.kv_bytes, least=1)

    def make_backend(self) -> Backend:
        """The backend for ``device`` and ``cuda_kernels``. Raises InvalidConfig."""
        return make_backend(checkpoint.choose_device(self.device), self.cuda_kernels)


@dataclass(slots=True)
class ModelDevice:
    """A served model with its blocks: the ``Device`` of an engine. ``costs`` are unknown until ``calibration``."""

    store: KvStore
    runner: ModelRunner
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    layout: str
    equal_bits: bool
    probe_result: ProbeResult
    backend: Backend
    model: torch.nn.Module = field(repr=False)
    costs: StepCostModel = field(default_factory=StepCostModel)
    lookahead: int = 0

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

    def run(self, plan: StepPlan) -> StepResult:
        return self.runner.run(plan)

    def read(self, block: int) -> memoryview:
        return self.store.read(block)

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        self.store.write(block, data)


HASHED, READ = 5, 20
"""Percent of a load done when the weight files are hashed, and when they are read."""


def load(
    config: ModelConfig, progress: Callable[[int], None] = lambda percent: None, backend: Backend | None = None
) -> ModelDevice:
    """Load a checkpoint and decide whether it is served. Raises ModelRefused, InvalidConfig.

    The reference is computed by transformers' own attention before anything is replaced. ``progress`` gets the percent
    done. ``backend``: by default ``config.make_backend()``.
    """
    progress(0)
    backend = backend or config.make_backend()
    source = checkpoint.open(config.model, config.revision)
    dtype = source.choose_dtype(config.dtype, backend.dtypes)
    context_length = source.choose_context_length(config.context_length)
    weights = source.weights()
    progress(HASHED)
    model = source.read(dtype, backend.device)
    progress(READ)
    with checkpoint.refusing(source.name, "its rotary scaling can't be frozen"):
        rope.freeze(model, context_length)
    refuse_other_state(model, source.name, probe_sequences(model, context_length)[0].tokens)
    progress(40)
    reference = reference_logits(model, source.name, context_length)
    progress(60)
    views, specs = learn_attention(model, source.name, context_length)
    progress(70)
    layout = KvLayout(specs, config.block_size, dtype.itemsize)
    if config.kv_bytes < layout.block_bytes:
        raise InvalidConfig("kv_bytes", f"at least one block of {layout.block_bytes} bytes", config.kv_bytes)
    subject = Subject(model, source.name, context_length, backend)
    difference = check_attention(subject, layout, views, reference)
    progress(80)
    with checkpoint.refusing(source.name, "laying its weights out failed"):
        backend.prepare(model, dtype)
    weights.check_unchanged(source.name)  # all weights are copied from the mapped files now
    progress(90)
    exact = probe(subject, layout, views, reference)
    progress(98)
    eos = source.eos_token_ids(model)
    store = backend.make_store(layout, config.kv_bytes // layout.block_bytes, dtype)
    store.prefault()
    return ModelDevice(
        store=store,
        runner=ModelRunner(model, store, views, eos, backend),
        context_length=context_length,
        vocab_size=token_embeddings(model).num_embeddings,
        eos_token_ids=eos,
        layout=checkpoint.layout_hash(weights, layout, context_length, dtype, (backend.device.type, backend.kind)),
        equal_bits=backend.exact >= PARTS,
        probe_result=ProbeResult(exact, difference),
        backend=backend,
        model=model,
    )
