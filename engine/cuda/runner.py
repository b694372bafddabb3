"""Runs plans on CUDA without waiting for the step before.

submit(k)    flatten ─> upload ─> tokens of step k-1 that the rows continue ─> graph or kernels ─> draw ─> download
result(k)    wait for the download of step k, while the device computes step k+1

The slots of a block that are not written yet are not cleared: the kernels of attention do not read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from decant.engine.cuda.attention import TritonAttention
from decant.engine.cuda.graph_sizes import GraphLimits
from decant.engine.cuda.graphs import Capture, StepGraphs, StepOutput
from decant.engine.cuda.sampler import TritonSampler
from decant.engine.cuda.staging import Staging
from decant.engine.cuda.step_draw import StepDraw
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.backend import Backend
from decant.engine.model.kv_store import KvStore
from decant.engine.model.runner import ModelRunner, StepLogits
from decant.engine.model.step_batch import FlatBatch, Ints
from decant.engine.plan import StepPlan, StepResult


class CudaRunner(ModelRunner):
    overlaps_steps = True

    def __init__(
        self,
        model: torch.nn.Module,
        store: KvStore,
        layer_windows: Sequence[AttentionWindow],
        eos: frozenset[int],
        backend: Backend,
        is_exact: bool,
    ) -> None:
        super().__init__(model, store, layer_windows, eos, backend)
        assert isinstance(backend.sampler, TritonSampler)
        self._sampler = backend.sampler
        self._is_exact = is_exact
        self._staging = Staging(self._device)
        self._drawn = torch.zeros(0, dtype=torch.int64, device=self._device)  # by row of the newest plan
        self.graphs: StepGraphs | None = None

    @property
    def embedding_size(self) -> int:
        return 0  # no hidden states leave a graph

    def capture(self, context_length: int, limits: GraphLimits, capture: Capture | None = None) -> None:
        width = -(-context_length // self._store.layout.block_size)
        self.graphs = StepGraphs(self._store, self._layer_windows, self._sampler, width, self._is_exact)
        with torch.inference_mode(), self._backend.around_step():
            capture = capture or Capture(self._device)
            self.graphs.capture(self.compute, capture, limits, capture.used_bytes)

    def run(self, plan: StepPlan) -> StepResult:
        return self.submit(plan)()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        with self._backend.around_step():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        graphed = self.graphs.find(plan.rows) if self.graphs else None
        batch = self.flatten(plan.rows) if graphed is None else graphed[1]
        step = StepLogits(first_rows(batch, len(plan.rows)), self._sampler)
        inputs = drawn_inputs(batch, plan)
        if graphed is None:
            output = self._compute_eagerly(batch, step, inputs)
        else:
            output = graphed[0].run(step.keep, self._drawn, inputs)
        if len(self._drawn) < len(plan.rows):
            self._drawn = torch.zeros(2 * len(plan.rows), dtype=torch.int64, device=self._device)
        return StepDraw(step, output, self._eos, self._drawn, self._staging, self._sampler).result

    def _compute_eagerly(self, batch: FlatBatch, step: StepLogits, inputs: tuple[Ints, Ints]) -> StepOutput:
        tokens, positions, keep, target, source = self._staging.upload(
            batch.tokens, batch.positions, step.keep, *inputs
        )
        if len(target):
            tokens.index_copy_(0, target, self._drawn.index_select(0, source))
        attention = TritonAttention(self._store, self._layer_windows, batch, self._is_exact)
        with self.adapters.applied(batch):
            logits = self.compute(tokens, positions, keep, attention)
        return StepOutput(logits, *self._sampler.top(logits))


def drawn_inputs(batch: FlatBatch, plan: StepPlan) -> tuple[Ints, Ints]:
    """Flattened positions whose tokens the step before draws, and their indexes in its plan."""
    first_of = np.empty(len(batch.rows), np.int64)
    first_of[batch.order] = batch.firsts
    return first_of[list(plan.inputs)], np.array(list(plan.inputs.values()), np.int64)


def first_rows(batch: FlatBatch, count: int) -> FlatBatch:
    """The first rows of a batch, without the padding behind them."""
    if count == len(batch.rows):
        return batch
    table, tokens = batch.row_table[:, :count], batch.flattened[:, : int(batch.stops[count - 1])]
    return FlatBatch(batch.rows[:count], table, tokens, batch.new_blocks, batch.table[:, :count])
