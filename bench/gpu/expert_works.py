"""Products of a mixture's quantized experts with their inputs, for ``bench.gpu.kernels``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from bench.gpu.kernel_works import BF16, Kernels, Make, Work
from decant.engine.checkpoint.weight import CodeKind, Codes
from decant.engine.cuda import grouped_experts
from decant.engine.cuda.coded_product import CodedProduct
from decant.engine.cuda.grouped_experts import ExpertProducts

GROUP = 64
"""Inputs of an int4 weight with a common scale."""


def experts(kernels: Kernels) -> Iterator[Make]:
    for tokens, kind in product(kernels.shape.coded, (CodeKind.INT8, CodeKind.INT4)):
        yield partial(_gates_and_ups, kernels, tokens, kind)


def _gates_and_ups(kernels: Kernels, tokens: int, kind: CodeKind) -> Work:
    """Places of the pairs, and gate and up projections of their experts; bytes are those of the chosen ones."""
    count, top_k, hidden, inner = kernels.shape.experts
    group = min(GROUP, hidden) if kind is CodeKind.INT4 else hidden
    size = 2 * inner, hidden
    codes = Codes(kind, torch.zeros(size, dtype=kind.dtype), torch.ones(-(-hidden // group), 2 * inner), group)
    one = CodedProduct(codes, None, BF16, kernels.device, is_exact=False)
    made, rows = ExpertProducts([one] * count), kernels.random(tokens, hidden)
    chosen = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]).flatten()
    on_device = chosen.to(kernels.device)

    def run() -> None:
        made(rows, grouped_experts.place(on_device, count), top_k)

    read = len(chosen.unique()) * one.codes.nbytes
    title = f"{kind.name.lower()} gate and up of {count} experts, {top_k} each, {tokens} tokens"
    return Work(title, [run], read, 2 * tokens * top_k * 2 * inner * hidden)
