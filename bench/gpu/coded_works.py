"""Products of quantized weights with their inputs, for ``bench.gpu.kernels``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch

from bench.gpu.kernel_works import BF16, Kernels, Make, Work
from bench.gpu.timing import Call
from decant.engine.checkpoint.weight import CodeKind, Codes
from decant.engine.cuda import coded_product
from decant.engine.cuda.coded_product import CodedProduct, RowShape, TileShape

GROUP, MOST = 128, 64
"""Inputs of an int4 weight with a common scale, and most weights in turn."""

Shapes = Mapping[str, tuple[Any, ...]]

ONE = ((4, 512, 4, 1), (4, 1024, 4, 3), (8, 512, 4, 3))

VARIANTS: Mapping[str, Shapes] = MappingProxyType(
    {
        "one": {"ROW": tuple(RowShape(*one) for one in ONE)},
        "few": {"FEW": (coded_product.FEW, coded_product.FEW_INT8)},
        "many": {"MANY": (coded_product.MANY, TileShape(64, 128, 8, 3)), "DENSE_ROWS": (2,)},
        "dense": {"DENSE_ROWS": (2,)},
    }
)
"""Values of ``coded_product`` by number of rows."""


OF_KIND = {("ROW", CodeKind.INT4): "ROW_INT4", ("FEW", CodeKind.INT8): "FEW_INT8"}


def coded(kernels: Kernels) -> Iterator[Make]:
    shape = kernels.shape
    for rows, kind in product(shape.coded, (CodeKind.INT8, CodeKind.INT4, CodeKind.FP8)):
        variants = "one" if rows == 1 else "few" if rows <= coded_product.FEW.rows else "many"
        variants = "dense" if rows >= coded_product.DENSE_ROWS else variants
        for constant, values in VARIANTS[variants].items():
            name = OF_KIND.get((constant, kind), constant)
            for value in values:
                of = " x ".join(map(str, value)) if isinstance(value, tuple) else value
                title = f"{kind.name.lower()} gate and up, {rows} rows, {name} {of}"
                make = partial(_product, kernels, title, rows, (2 * shape.inner, shape.hidden), kind)
                yield partial(_with, make, name, value)


def _with(make: Callable[[], Work], name: str, value: Any) -> Work:
    work = make()

    def run(call: Call) -> None:
        with mock.patch.object(coded_product, name, value):
            call()

    return work._replace(calls=[partial(run, call) for call in work.calls])


def _product(kernels: Kernels, name: str, rows: int, size: tuple[int, int], kind: CodeKind) -> Work:
    columns, depth = size
    group = min(GROUP, depth) if kind is CodeKind.INT4 else depth
    codes = Codes(kind, torch.zeros(size, dtype=kind.dtype), torch.ones(-(-depth // group), columns), group)
    weight, x = CodedProduct(codes, None, BF16, kernels.device, is_exact=False), kernels.random(rows, depth)
    copies = min(MOST, kernels.shape.cached_bytes // weight.codes.nbytes + 1)
    calls = [partial(each, x) for each in (weight, *(deepcopy(weight) for _ in range(copies)))]
    return Work(name, calls, weight.codes.nbytes, 2 * rows * columns * depth)
