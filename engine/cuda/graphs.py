"""Decode batches as CUDA graphs over buffers at fixed addresses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from decant.engine.cuda.attention import StaticAttention, num_items
from decant.engine.cuda.graph_sizes import GraphLimits, GraphSize, capture_all, choose_size, graph_sizes, pad
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

    cuBLAS keeps a workspace, 32 MiB on an H100, for each stream that it is called on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
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

    def run(self, flat: FlatBatch, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary], valid until the next step."""
        self._attention.fill(flat)
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        return self._replay()


class DecodeGraphs:
    """Graphs of a model for rows of at most ``width`` blocks.

    They share one buffer of logits. One for each would fill the memory of the graphs: 6,000 rows of 256 KB at a
    vocabulary of 128,000.
    """

    def __init__(
        self, store: KvStore, layer_windows: Sequence[AttentionWindow], width: int, compute: Compute, tile_rows: int
    ) -> None:
        self._store = store
        self._layer_windows = layer_windows
        self._width = width
        self._compute = compute
        self._tile_rows = tile_rows
        self._logits: torch.Tensor | None = None
        self.graphs: dict[GraphSize, DecodeGraph] = {}
        self.summary = "none"

    def capture(self, capture: Callable[[Replay], Replay], limits: GraphLimits, used_bytes: Callable[[], int]) -> None:
        """Capture graphs; after an error, which is logged, batches run without them."""

        sizes, store = graph_sizes(limits.rows), self._store
        most, groups, block_size = max(size.rows for size in sizes), len(store.layout.groups), store.layout.block_size

        def compute(
            tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attention: AttentionBackend
        ) -> torch.Tensor:
            logits = self._compute(tokens, positions, keep, attention)
            if self._logits is None:  # in the run before the first capture
                self._logits = logits.new_empty(most, logits.shape[1])
            return self._logits[: len(logits)].copy_(logits)

        def make(size: GraphSize) -> DecodeGraph:
            flat = flatten(pad([], size.rows, store.null_block, groups), block_size, store.null_block)
            attention = StaticAttention(store, self._layer_windows, flat, size, self._width, self._tile_rows)
            return DecodeGraph(flat, attention, compute, capture)

        try:
            self.graphs = capture_all(sizes, make, limits, clock=time.monotonic, used_bytes=used_bytes)
        except RuntimeError as error:
            logger.warning("decode batches run without CUDA graphs: %s", error)
            return
        self.summary = f"{len(self.graphs)} of {len(sizes)}"
        logger.info("captured %s CUDA graphs", self.summary)

    def find(self, rows: Sequence[Row], flat: FlatBatch) -> tuple[DecodeGraph, FlatBatch] | None:
        """Graph for a batch, and the batch padded to its size; None if no graph fits."""
        if len(flat.tokens) != len(rows):
            return None
        size = choose_size(self.graphs, len(rows), num_items(flat))
        if size is None:
            return None
        store = self._store
        padded = pad(rows, size.rows, store.null_block, len(store.layout.groups))
        return self.graphs[size], flatten(padded, store.layout.block_size, store.null_block)
