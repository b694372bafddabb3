"""Batches as CUDA graphs over buffers at fixed addresses."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from triton.errors import TritonError

from decant.engine.cuda.graph_sizes import (
    GraphLimits,
    GraphSize,
    PaddingLayout,
    capture_all,
    choose_size,
    graph_sizes,
    most_items,
    pad,
)
from decant.engine.cuda.sampler import TritonSampler
from decant.engine.cuda.static_attention import MOST_STATES, GraphMemory, StateBuffers, StaticAttention
from decant.engine.model.attention.interface import AttentionBackend
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, Ints, flatten
from decant.engine.plan import Row

logger = logging.getLogger(__name__)


class StepOutput(NamedTuple):
    """Logits [kept, vocabulary], the likeliest token of each, and whether all of a row are finite."""

    logits: torch.Tensor
    likeliest: torch.Tensor
    finite: torch.Tensor


Replay = Callable[[], StepOutput]

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBackend], StepOutput]
"""Token ids [T], positions [T], kept positions [k], attention -> output of k rows."""


class Capture:
    """Captures functions of tensors at fixed addresses. All graphs share one memory pool and one stream.

    cuBLAS keeps a workspace, 32 MiB on an H100, for each stream that it is called on. The kernels of a graph keep the
    priority of the stream: the decodes of one engine go before the prompts of another in the process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Replay) -> Replay:
        """Run the function once to compile its kernels, then capture it. The replay returns the same tensor."""
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # torch.cuda.graph itself stays on its stream after a failed capture
            compute()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                output = compute()
        current.wait_stream(self._stream)

        def replay() -> StepOutput:
            graph.replay()
            return output

        return replay

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class StepGraph:
    def __init__(
        self, flat: FlatBatch, attention: StaticAttention, compute: Compute, capture: Callable[[Replay], Replay]
    ) -> None:
        self._attention = attention
        self._flat = flat
        place = attention.buffer.place
        self._tokens, self._positions = place(flat.tokens), place(flat.positions)
        self._keep = place(np.arange(attention.rows))
        self._replay = capture(lambda: compute(self._tokens, self._positions, self._keep, attention))

    def prepare(self, flat: FlatBatch) -> bool:
        """Prepare a padded batch, or return False if it does not fit."""
        self._flat = flat
        return self._attention.prepare(flat)

    def run(self, keep: Ints, drawn: torch.Tensor, inputs: tuple[Ints, Ints]) -> StepOutput:
        """Output of the batch for the flattened positions ``keep``, valid until the next step.

        ``inputs``: flattened positions whose tokens are in ``drawn``, and where.
        """
        flat, all_kept = self._flat, np.zeros(self._attention.rows, np.int64)
        all_kept[: len(keep)] = keep
        target, source = self._attention.fill([flat.tokens, flat.positions, all_kept], inputs)
        if len(inputs[0]):
            self._tokens.index_copy_(0, target, drawn.index_select(0, source))
        return StepOutput(*(part[: len(keep)] for part in self._replay()))


@contextmanager
def collected_garbage() -> Iterator[None]:
    """Collect garbage before, none within: a capture fails if a tensor or a graph of a cycle is freed in it.

    Memory that torch keeps for later is freed, too: it would count as what graphs free.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepGraphs:
    """Graphs of a model for rows of at most ``width`` blocks.

    They share one buffer of logits and one of softmax states. One for each would fill the memory of the graphs: 2,500
    rows of 256 KB at a vocabulary of 128,000.
    """

    def __init__(
        self,
        store: KvStore,
        layer_windows: Sequence[AttentionWindow],
        sampler: TritonSampler,
        width: int,
        is_exact: bool,
    ) -> None:
        self._store = store
        self._sampler = sampler
        self._layer_windows = layer_windows
        self._width = width
        self._is_exact = is_exact
        self._logits: torch.Tensor | None = None
        self.graphs: dict[GraphSize, StepGraph] = {}
        self.summary = "none"

    def capture(
        self,
        compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBackend], torch.Tensor],
        capture: Callable[[Replay], Replay],
        limits: GraphLimits,
        used_bytes: Callable[[], int],
    ) -> None:
        """Capture graphs; batches of a size whose capture fails, which is logged, run without or in a larger one."""
        sizes, store = graph_sizes(limits), self._store
        most = max(size.rows for size in sizes)
        states = StateBuffers(MOST_STATES if self._is_exact else most_items(most), store.blocks.device)

        def compute_output(
            tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attention: AttentionBackend
        ) -> StepOutput:
            logits = compute(tokens, positions, keep, attention)
            if self._logits is None:  # in the run before the first capture
                self._logits = logits.new_empty(most, logits.shape[1])
            logits = self._logits[: len(logits)].copy_(logits)
            return StepOutput(logits, *self._sampler.top(logits))

        def make(size: GraphSize) -> StepGraph | None:
            flat = self._flatten([], size)
            memory = GraphMemory(size, self._width, states)
            attention = StaticAttention(store, self._layer_windows, flat, memory, self._is_exact)
            try:
                return StepGraph(flat, attention, compute_output, capture)
            except (RuntimeError, TritonError) as error:
                logger.warning("batches of %d tokens and %d rows have no CUDA graph: %s", *size, error)
                return None

        began = time.monotonic()
        with collected_garbage():
            before = used_bytes()
            self.graphs = capture_all(sizes, make, limits, clock=time.monotonic, used_bytes=used_bytes)
        used, seconds = (used_bytes() - before) >> 20, time.monotonic() - began
        self.summary = f"{len(self.graphs)} of {len(sizes)}, {used} MiB, {seconds:.1f} s"
        logger.info("captured CUDA graphs: %s", self.summary)

    def _flatten(self, rows: Sequence[Row], size: GraphSize) -> FlatBatch:
        layout, null_block = self._store.layout, self._store.null_block
        padded = pad(rows, size, PaddingLayout(null_block, layout.block_size, len(layout.groups)))
        return flatten(padded, layout.block_size, null_block)

    def find(self, rows: Sequence[Row]) -> tuple[StepGraph, FlatBatch] | None:
        """Graph for a batch, prepared for it, and the batch padded to its size; None if no graph fits."""
        size = choose_size(self.graphs, sum(row.end - row.start for row in rows), len(rows))
        if size is None or any(row.has_prompt_logprobs or row.request.adapter for row in rows):
            return None  # a graph has neither a logit for each token nor the changes of adapters
        flat = self._flatten(rows, size)
        return (self.graphs[size], flat) if self.graphs[size].prepare(flat) else None
