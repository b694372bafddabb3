"""Products of quantized weights with their inputs, for ``bench.gpu.kernels``."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from itertools import product

import torch

from bench.gpu.kernel_works import BF16, Kernels, Make, Work
from decant.engine.checkpoint.weight import CodeKind, Codes
from decant.engine.cuda.coded_product import CodedProduct

GROUP, MOST = 128, 64
"""Inputs of an int4 weight with a common scale, and most weights in turn."""


def coded(kernels: Kernels) -> Iterator[Make]:
    shape = kernels.shape
    for rows, kind in product(shape.counts, CodeKind):
        name = f"{kind.name.lower()} gate and up, {rows} rows"
        yield partial(_product, kernels, name, rows, (2 * shape.inner, shape.hidden), kind)


def _product(kernels: Kernels, name: str, rows: int, size: tuple[int, int], kind: CodeKind) -> Work:
    columns, depth = size
    group = min(GROUP, depth) if kind is CodeKind.INT4 else depth
    codes = Codes(kind, torch.zeros(size, dtype=kind.value), torch.ones(-(-depth // group), columns), group)
    weight, x = CodedProduct(codes, None, BF16, kernels.device, is_exact=False), kernels.random(rows, depth)
    copies = min(MOST, kernels.shape.cached_bytes // weight.codes.nbytes + 1)
    calls = [partial(each, x) for each in (weight, *(deepcopy(weight) for _ in range(copies)))]
    return Work(name, calls, weight.codes.nbytes, 2 * rows * columns * depth)
