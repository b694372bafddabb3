"""Decode batches as CUDA graphs over buffers at fixed addresses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from decant.engine.cuda.attention import StaticAttention, num_items
from decant.engine.cuda.graph_sizes import GraphLimits, GraphSize, capture_all, choose_size, graph_sizes, pad
from decant.engine.cuda.staging import Staging
from decant.engine.model.attention import AttentionBackend
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, flatten
from decant.engine.plan import Row

logger = logging.getLogger(__name__)

Replay = Callable[[], torch.Tensor]

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBackend], torch.Tensor]
"""Token ids [T], positions [T], kept positions [k], attention -> logits [k, vocabulary]."""


class Capture:
    """All graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Replay) -> Replay:
        """Runs the function once to compile its kernels. The replay returns the same tensor."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def used_bytes(self) -> int:
        """Of the device, by all processes."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class DecodeGraph:
    def __init__(
        self,
        size: GraphSize,
        store: KvStore,
        views: Sequence[AttentionWindow],
        width: int,
        compute: Compute,
        capture: Callable[[Replay], Replay],
    ) -> None:
        self._store = store
        self._staging = Staging(store.blocks.device)
        flat = flatten(pad([], size.rows, store.blank, len(store.layout.groups)), store.layout.block_size, store.blank)
        self._tokens, self._positions, keep = (
            part.clone() for part in self._staging.upload(flat.tokens, flat.positions, np.arange(size.rows))
        )
        self._attention = StaticAttention(store, views, flat, size, width)
        self._replay = capture(lambda: compute(self._tokens, self._positions, keep, self._attention))

    def run(self, flat: FlatBatch, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary], valid until the next step."""
        self._attention.fill(flat)
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        return self._replay()


class DecodeGraphs:
    """``width``: most blocks of a row."""

    def __init__(self, store: KvStore, views: Sequence[AttentionWindow], width: int, compute: Compute) -> None:
        self._store = store
        self._views = views
        self._width = width
        self._compute = compute
        self.graphs: dict[GraphSize, DecodeGraph] = {}

    def capture(self, capture: Callable[[Replay], Replay], limits: GraphLimits, used_bytes: Callable[[], int]) -> None:
        """After an error, which is logged, batches run without graphs."""

        def make(size: GraphSize) -> DecodeGraph:
            return DecodeGraph(size, self._store, self._views, self._width, self._compute, capture)

        sizes = graph_sizes(limits.rows)
        try:
            self.graphs = capture_all(sizes, make, limits, clock=time.monotonic, used_bytes=used_bytes)
        except RuntimeError as error:
            logger.warning("decode batches run without CUDA graphs: %s", error)
            return
        logger.info("captured %d of %d CUDA graphs", len(self.graphs), len(sizes))

    def find(self, rows: Sequence[Row], flat: FlatBatch) -> tuple[DecodeGraph, FlatBatch] | None:
        """Also the batch padded to its size; None if there is none."""
        if len(flat.tokens) != len(rows):
            return None
        size = choose_size(self.graphs, len(rows), num_items(flat))
        if size is None:
            return None
        store = self._store
        padded = pad(rows, size.rows, store.blank, len(store.layout.groups))
        return self.graphs[size], flatten(padded, store.layout.block_size, store.blank)
