from __future__ import annotations

import itertools
import logging
import subprocess
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from triton.errors import TritonError

from decant.engine.cuda import fused_layer
from decant.engine.cuda.adapters import CudaAdapters, linear_layers, try_changes
from decant.engine.cuda.attention import TILE, TritonAttention
from decant.engine.cuda.coded_product import CodedProduct
from decant.engine.cuda.coded_weights import replace_coded
from decant.engine.cuda.exact import make_exact
from decant.engine.cuda.graph_sizes import GraphLimits, mixed_tokens
from decant.engine.cuda.grouped_experts import GroupedExperts
from decant.engine.cuda.kv_store import CudaKvStore
from decant.engine.cuda.runner import CudaRunner
from decant.engine.cuda.sampler import TritonSampler
from decant.engine.errors import InvalidConfig
from decant.engine.kv_layout import KvLayout, LayerSpec, WindowKind
from decant.engine.library_errors import translate_device_errors
from decant.engine.model import backend as model_backend
from decant.engine.model.adapter_targets import find_targets
from decant.engine.model.adapters import ModelAdapters
from decant.engine.model.attention.interface import AttentionBackend, AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.attention.paged import PagedAttention
from decant.engine.model.backend import RunnerLimits, TorchBackend
from decant.engine.model.kv_store import KvStore
from decant.engine.model.runner import ModelRunner
from decant.engine.model.sampler import Sampler, highest
from decant.engine.model.step_batch import FlatBatch, Ints, flatten
from decant.engine.plan import Row
from decant.engine.request import Request, SamplingParams
from decant.engine.sampler_state import SamplerState

logger = logging.getLogger(__name__)

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-3}
"""Largest difference in a trial, relative to the norm of torch's result."""

PARTS = ("attention", "layers", "sampling")
CODED = "quantized weights"
"""Part of a model that has some."""

TRIAL_SPANS = ((0, 5), (18, 19), (2, 4), (133, 135), (140, 141))
"""First and last + 1 position of a trial's rows. The last two have more keys than a tile, and than an item."""

TRIAL_WINDOW = 100
"""Keys that a row sees in a layer with a window."""

TRIAL_GROUP = 2
"""Query heads for a KV head. A model has others, with which the same compiled kernel computes."""

TRIAL_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logit_bias": {1: 9.0}},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 500, "top_p": 0.95, "min_p": 0.01},
)
TRIAL_VOCABULARY = 5000

TRIAL_FAILURES = (TritonError, AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError)
"""What a trial may raise: torch, triton's compiler, or the C compiler that triton has build its launchers."""

Attention = Callable[[KvStore, Sequence[AttentionWindow], FlatBatch], AttentionBackend]


class CudaBackend(TorchBackend):
    """Backend of CUDA devices with triton: torch computes a part whose kernels fail a trial at load.

    With ``exact`` nothing falls back, and linear layers and norms are kernels, too.
    """

    keeps_codes = True
    block_size = TILE  # the keys of a tile are in one block

    def __init__(self, device: torch.device, *, exact: bool = False) -> None:
        super().__init__(device)
        self.sampler: Sampler = TritonSampler()
        self._fallbacks: dict[str, str] = {}
        self._torch_attends: dict[torch.dtype, str] = {}  # why; the load's comparison is in float32 always
        self._has_codes = False
        self._dtype: torch.dtype | None = None  # as served, once it is known
        self.exact = model_backend.PARTS if exact else frozenset()

    @property
    def kind(self) -> str:
        parts = [part for part in PARTS if part not in self.fallbacks]
        parts += [CODED] * self._has_codes + ["exact products"] * bool(self.exact)
        return f"{super().kind}, triton {triton.__version__}: {', '.join(parts)}"

    @property
    def fallbacks(self) -> dict[str, str]:
        """Reasons why torch computes a part instead of its kernels, by name of the part."""
        reason = None if self._dtype is None else self._torch_attends.get(self._dtype)
        return self._fallbacks if reason is None else {**self._fallbacks, "attention": reason}

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._dtype, sampler = dtype, self.sampler
        assert isinstance(sampler, TritonSampler)
        with self.around_step():
            self._note(CODED, self._replace_coded(model, dtype))
            if dtype not in self._torch_attends:  # a fused layer needs it
                self._note("layers", _tried("layers", partial(_try_layers, model, dtype)))
            self._note("sampling", _tried("sampling", partial(try_sampler, sampler, self.device)))
            if "sampling" in self.fallbacks:
                self.sampler = Sampler()
            if self.exact:
                make_exact(model, dtype)

    def _replace_coded(self, model: torch.nn.Module, dtype: torch.dtype) -> str | None:
        tried = partial(_tried, CODED)
        reason = replace_coded(model, dtype, self.device, tried, is_exact=bool(self.exact))
        self._has_codes = any(isinstance(module, CodedProduct | GroupedExperts) for module in model.modules())
        return reason

    def _note(self, part: str, reason: str | None) -> None:
        if reason is not None:
            self._refuse_if_exact(part, reason)
            self._fallbacks[part] = reason

    def _refuse_if_exact(self, part: str, reason: str) -> None:
        if self.exact:
            raise InvalidConfig("exact", f"off, as torch has to compute {part} ({reason})", True)

    def make_store(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype) -> KvStore:
        """Make a store, after a trial of the attention kernels on the layout's shapes."""
        with self.around_step():
            for spec in dict.fromkeys(layout.layers):
                trial = partial(try_attention, spec, layout, dtype, self.device, is_exact=bool(self.exact))
                if dtype not in self._torch_attends and (reason := _tried(f"attention in {dtype}", trial)):
                    self._torch_attends[dtype] = reason
        if dtype == self._dtype and dtype in self._torch_attends:
            self._refuse_if_exact("attention", self._torch_attends[dtype])
        return CudaKvStore(layout, num_blocks, dtype, self.device)

    def make_runner(
        self, model: torch.nn.Module, store: KvStore, layer_windows: Sequence[AttentionWindow], limits: RunnerLimits
    ) -> ModelRunner:
        if "attention" in self.fallbacks or not isinstance(self.sampler, TritonSampler):
            return super().make_runner(model, store, layer_windows, limits)
        runner = CudaRunner(model, store, layer_windows, limits.eos_token_ids, self, bool(self.exact))
        if self.device.type == "cuda":
            weights = sum(each.nbytes for each in itertools.chain(model.parameters(), model.buffers()))
            runner.capture(limits.context_length, GraphLimits(tokens=mixed_tokens(weights)))
        return runner

    def make_adapters(self, model: torch.nn.Module, run: Callable[[], object], tokens: int) -> ModelAdapters:
        assert self._dtype is not None
        with self.around_step():
            if reason := _tried("adapters", partial(try_changes, self._dtype, self.device)):
                raise InvalidConfig("adapters", f"off on the device {self.device} ({reason})", True)
            targets = find_targets(model, linear_layers(model), run, tokens)
        return CudaAdapters(model, targets, self.device)

    def fused_layers(self, model: torch.nn.Module) -> int:
        return len(fused_layer.fused_layers(model))

    graph_bytes = GraphLimits().bytes

    def make_attention(
        self, store: KvStore, layer_windows: Sequence[AttentionWindow], flat: FlatBatch, keep: Ints
    ) -> AttentionBackend:
        if store.dtype in self._torch_attends:
            return PagedAttention(store, layer_windows, flat)
        return TritonAttention(store, layer_windows, flat, bool(self.exact))


def _tried(part: str, trial: Callable[[], str | None]) -> str | None:
    """Return why ``trial`` failed and log it, or return None. Raises DeviceFailed."""
    try:
        with translate_device_errors():
            reason = trial()
    except TRIAL_FAILURES as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.warning("%s computed by torch, not by Triton kernels: %s", part, reason)
    return reason


@torch.inference_mode()
def try_attention(
    spec: LayerSpec, layout: KvLayout, dtype: torch.dtype, device: torch.device, *, is_exact: bool = False
) -> str | None:
    """Compute rows with the kernels that serve layers of ``spec``."""
    own = partial(TritonAttention, is_exact=is_exact)
    actual, expected = (_attend(make, spec, layout, dtype, device) for make in (own, PagedAttention))
    difference = float((actual - expected).norm() / expected.norm())
    if difference < TOLERANCE[dtype]:
        return None
    return f"heads of {spec.key_dim} and {spec.value_dim} differ from torch's by {difference:.2g}"


def _attend(
    make: Attention, spec: LayerSpec, layout: KvLayout, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    one = KvLayout((spec,), layout.block_size, layout.format)
    size, dims = layout.block_size, (spec.key_dim, spec.value_dim)
    count = -(-max(end for _, end in TRIAL_SPANS) // size)
    store = KvStore(one, count * len(TRIAL_SPANS), dtype, device)
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(store.num_blocks * size, spec.kv_heads, dim, generator=generator) for dim in dims)
    slots = torch.arange(store.num_blocks * size, device=device)
    key, value = (each.to(device, dtype) for each in numbers)
    store.put(0, slots // size, slots % size, (key, value))
    rows = []
    for index, (start, end) in enumerate(TRIAL_SPANS):
        blocks = array("i", range(index * count, (index + 1) * count))
        rows.append(Row(Request(str(index), (0,) * end), [0] * end, start, end, (blocks,), True))
    flat = flatten(rows, layout.block_size, store.null_block)
    query, key, value = (
        torch.randn(1, heads, len(flat.tokens), width, generator=generator).to(device, dtype)
        for heads, width in (
            (TRIAL_GROUP * spec.kv_heads, spec.key_dim),
            (spec.kv_heads, spec.key_dim),
            (spec.kv_heads, spec.value_dim),
        )
    )
    call = AttentionCall(0, query, key, value, spec.key_dim**-0.5, None, None, None)
    window = AttentionWindow(spec.window.kind, 0 if spec.window.kind is WindowKind.FULL else TRIAL_WINDOW)
    return make(store, [window], flat).attend(call).float()


def _try_layers(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Fuse layers; those that differ keep torch's operations, which is no failure."""
    logger.info("%d decoder layers have Triton kernels", fused_layer.fuse(model, dtype))


@torch.inference_mode()
def try_sampler(sampler: TritonSampler, device: torch.device) -> str | None:
    rows = []
    for seed, mix in enumerate(TRIAL_SAMPLING):
        request = Request("trial", (0,), sampling=SamplingParams(seed=seed, **mix))
        rows.append(Row(request, [0], 0, 1, (array("i"),), True, SamplerState(request)))
    logits = torch.randn(len(rows), TRIAL_VOCABULARY, generator=torch.Generator().manual_seed(0)).to(device)
    actual, expected = (kind.sample(rows, logits, frozenset()) for kind in (sampler, Sampler()))
    if actual != expected:
        return f"draws tokens {actual} instead of {expected}"
    (top, finite), (_, most_likely) = sampler.top(logits), highest(logits)
    if torch.equal(top, most_likely) and bool(finite.all()):
        return None
    return f"chooses tokens {top.tolist()} instead of {most_likely.tolist()}"
