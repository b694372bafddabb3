"""Decode batches as CUDA graphs over buffers at fixed addresses."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from triton.errors import TritonError

from decant.engine.cuda.attention import MOST_STATES, GraphMemory, StateBuffers, StaticAttention
from decant.engine.cuda.graph_sizes import GraphLimits, capture_all, choose_size, graph_sizes, most_items, pad
from decant.engine.model.attention.interface import AttentionBackend
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, flatten
from decant.engine.plan import Row

logger = logging.getLogger(__name__)

Replay = Callable[[], torch.Tensor]

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBackend], torch.Tensor]
"""Token ids [T], positions [T], kept positions [k], attention -> logits [k, vocabulary]."""


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

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class DecodeGraph:
    def __init__(
        self, flat: FlatBatch, attention: StaticAttention, compute: Compute, capture: Callable[[Replay], Replay]
    ) -> None:
        self._attention = attention
        self._tokens, self._positions, keep = (
            part.clone() for part in attention.staging.upload(flat.tokens, flat.positions, np.arange(len(flat.tokens)))
        )
        self._replay = capture(lambda: compute(self._tokens, self._positions, keep, attention))

    def fill(self, flat: FlatBatch) -> bool:
        """Copy a padded batch to the buffers, or return False if it does not fit."""
        return self._attention.fill(flat)

    def run(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] of the batch in the buffers, valid until the next step."""
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        return self._replay()


@contextmanager
def collected_garbage() -> Iterator[None]:
    """Collect garbage before, none within: a capture fails if a tensor or a graph of a cycle is freed in it."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DecodeGraphs:
    """Graphs of a model for rows of at most ``width`` blocks.

    They share one buffer of logits and one of softmax states. One for each would fill the memory of the graphs: 2,200
    rows of 256 KB at a vocabulary of 128,000.
    """

    def __init__(self, store: KvStore, layer_windows: Sequence[AttentionWindow], width: int, is_exact: bool) -> None:
        self._store = store
        self._layer_windows = layer_windows
        self._width = width
        self._is_exact = is_exact
        self._logits: torch.Tensor | None = None
        self.graphs: dict[int, DecodeGraph] = {}
        self.summary = "none"

    def capture(
        self,
        compute: Compute,
        capture: Callable[[Replay], Replay],
        limits: GraphLimits,
        used_bytes: Callable[[], int],
    ) -> None:
        """Capture graphs; batches of a size whose capture fails, which is logged, run without or in a larger one."""
        sizes, store = graph_sizes(limits.rows), self._store
        most, groups, block_size = max(sizes), len(store.layout.groups), store.layout.block_size
        states = StateBuffers(MOST_STATES if self._is_exact else most_items(most), store.blocks.device)

        def compute_logits(
            tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attention: AttentionBackend
        ) -> torch.Tensor:
            logits = compute(tokens, positions, keep, attention)
            if self._logits is None:  # in the run before the first capture
                self._logits = logits.new_empty(most, logits.shape[1])
            return self._logits[: len(logits)].copy_(logits)

        def make(rows: int) -> DecodeGraph | None:
            flat = flatten(pad([], rows, store.null_block, groups), block_size, store.null_block)
            memory = GraphMemory(self._width, states)
            attention = StaticAttention(store, self._layer_windows, flat, memory, self._is_exact)
            try:
                return DecodeGraph(flat, attention, compute_logits, capture)
            except (RuntimeError, TritonError) as error:
                logger.warning("decode batches of %d rows have no CUDA graph: %s", rows, error)
                return None

        began, before = time.monotonic(), used_bytes()
        with collected_garbage():
            self.graphs = capture_all(sizes, make, limits, clock=time.monotonic, used_bytes=used_bytes)
        used, seconds = (used_bytes() - before) >> 20, time.monotonic() - began
        self.summary = f"{len(self.graphs)} of {len(sizes)}, {used} MiB, {seconds:.1f} s"
        logger.info("captured CUDA graphs: %s", self.summary)

    def find(self, rows: Sequence[Row]) -> tuple[DecodeGraph, FlatBatch] | None:
        """Graph for a batch, filled with it, and the batch padded to its size; None if no graph fits."""
        if any(row.end - row.start != 1 for row in rows):
            return None
        size = choose_size(self.graphs, len(rows))
        if size is None:
            return None
        store = self._store
        padded = pad(rows, size, store.null_block, len(store.layout.groups))
        flat = flatten(padded, store.layout.block_size, store.null_block)
        return (self.graphs[size], flat) if self.graphs[size].fill(flat) else None
