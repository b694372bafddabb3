"""Kernels of the engine with their inputs, in shapes of a model, for ``bench.gpu.kernels``."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.nn import functional

from bench.gpu.timing import Call
from decant.engine.cuda import attention, dependent_launch, exact, fused_layer, sampler, sampler_kernels, skinny
from decant.engine.cuda.attention import TritonAttention
from decant.engine.cuda.graph_sizes import most_items
from decant.engine.kv_layout import KvFormat, KvLayout, LayerSpec
from decant.engine.model.attention.interface import AttentionCall
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Of Llama-3.1-8B."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    inner: int = 14336
    vocabulary: int = 128256
    decodes: tuple[tuple[int, int], ...] = ((1, 1024), (64, 2048), (256, 1024))
    prompt: int = 3500
    counts: tuple[int, ...] = (1, 64, 256, 3500)
    few: tuple[int, ...] = (1, 4, 16)
    coded: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 3500)
    experts: tuple[int, int, int, int] = (128, 8, 2048, 768)  # of Qwen3-30B-A3B: how many, of a token, hidden, inner
    copied_bytes: int = 2 << 30
    product: int = 8192
    cached_bytes: int = 300 << 20  # more than the L2 cache holds

    @property
    def hidden(self) -> int:
        return self.heads * self.width


TINY = Shape(2, 4, 2, 16, 64, 64, ((1, 70), (2, 20)), 20, (1, 2), (1, 2), (1, 2), (4, 2, 32, 16), 1 << 16, 32, 1)


class Work(NamedTuple):
    """A kernel over one memory after another, and what one call moves or multiplies."""

    name: str
    calls: Sequence[Call]
    bytes: int = 0
    operations: int = 0


Make = Callable[[], Work]

ROW_VARIANTS = (
    skinny.ROW,
    *(skinny.RowShape(*options) for options in ((8, 512, 4, 1), (8, 1024, 4, 2), (16, 512, 8, 2))),
)

ROWS_VARIANTS = (
    skinny.ROWS,
    *(skinny.RowsShape(*options) for options in ((32, 256, 4, 4), (64, 128, 4, 5))),
)


class _Variant(TritonAttention):
    """Attention with other options of the kernel."""

    changes: Mapping[str, Any] = MappingProxyType({})

    def _find_layers(self, layer: int, group: int) -> Any:
        found = super()._find_layers(layer, group)
        tokens, chunks = (shape._replace(**self.changes) for shape in (found.tokens, found.chunks))
        return found._replace(tokens=tokens, chunks=chunks)


class _Rotation(TritonAttention):
    """Rotates and writes, and attends to nothing."""

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        return call.query


def _independent(make: Make) -> Work:
    """The work without dependent launches."""
    work = make()

    def run(call: Call) -> None:
        with mock.patch.object(dependent_launch, "ENABLED", False):
            call()

    return work._replace(name=f"{work.name}, no dependent launch", calls=[partial(run, call) for call in work.calls])


class Kernels:
    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=BF16)

    # -- attention ----------------------------------------------------------------------------------------------

    def decodes(self) -> Iterator[Make]:
        for (rows, context), block in product(self.shape.decodes, (64, 16)):
            spans = [(context - 1, context)] * rows
            step = partial(self._step, spans, block, self.shape.layers)
            kv = rows * context * self.shape.kv_heads * 2 * self.shape.width * BF16.itemsize
            title = f"attend {rows}x{context}, blocks of {block}"
            for tile, stages in ((64, 5), (64, 3), (32, 5)) if block == 64 else ((32, 5), (32, 3)):
                changes = {"tile": tile, "num_stages": stages}
                yield partial(self._attend, f"{title}, tile {tile}, {stages} stages", step, changes, kv)
            if block == 64:
                yield partial(self._attend, f"{title}, exact", partial(step, is_exact=True), {}, kv)
                for most in (rows, 8 * rows, 32 * rows):
                    yield partial(self._attend, f"{title}, at most {most} items", step, {}, kv, most=most)

    def chunks(self) -> Iterator[Make]:
        shape, length = self.shape, self.shape.prompt
        operations = 2 * length * length * shape.hidden  # scores and outputs of the causal half
        step = partial(self._step, [(0, length)], 64, 1)
        for rows, warps, stages in ((64, 4, 3), (64, 4, 4), (64, 4, 5), (128, 8, 5)):
            changes = {"tile_rows": rows, "num_warps": warps, "num_stages": stages}
            name = f"attend a prompt of {length}, {rows} rows, {warps} warps, {stages} stages"
            yield partial(self._attend, name, step, changes, 0, operations)
        name = f"attend a prompt of {length}, exact"
        yield partial(self._attend, name, partial(step, is_exact=True), {}, 0, operations)
        yield partial(self._sdpa, length, operations)

    def _step(
        self,
        spans: Sequence[tuple[int, int]],
        block: int,
        layers: int,
        *,
        is_exact: bool = False,
        kind: type[TritonAttention] = _Variant,
    ) -> tuple[Any, list[AttentionCall]]:
        shape, each = self.shape, -(-max(end for _, end in spans) // block)
        spec = LayerSpec(shape.kv_heads, shape.width, shape.width)
        store = KvStore(
            KvLayout((spec,) * layers, block, KvFormat(BF16.itemsize)), each * len(spans), BF16, self.device
        )
        for part in store.blocks.split(512):
            part.normal_()
        order = np.random.default_rng(0).permutation(store.num_blocks).astype(np.int32)
        flat = flatten([self._row(index, span, order, each) for index, span in enumerate(spans)], block, 0)
        query = self.random(1, len(flat.tokens), shape.heads, shape.width).transpose(1, 2)
        none = query[:, : shape.kv_heads, :0]
        call = AttentionCall(0, query, none, none, shape.width**-0.5, None, None, None)
        windows = [AttentionWindow()] * layers
        return kind(store, windows, flat, is_exact), [call._replace(layer=layer) for layer in range(layers)]

    def _row(self, index: int, span: tuple[int, int], order: Any, each: int) -> Row:
        start, end = span
        blocks = array("i", order[index * each : (index + 1) * each].tolist())
        return Row(Request(str(index), (0,)), [0] * end, start, end, (blocks,), True)

    def _attend(
        self,
        name: str,
        step: Callable[[], tuple[Any, list[AttentionCall]]],
        changes: Mapping[str, Any],
        bytes_: int,
        operations: int = 0,
        most: int | None = None,
    ) -> Work:
        own, calls = step()
        own.changes = changes
        with mock.patch.object(attention, "most_items", lambda rows: most or most_items(rows)):
            own._attend(calls[0])  # makes its lists
        return Work(name, [partial(own._attend, call) for call in calls], bytes_, operations)

    def _sdpa(self, length: int, operations: int) -> Work:
        shape = self.shape
        query, key, value = (
            self.random(1, heads, length, shape.width) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        call = partial(functional.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True)
        return Work(f"torch's attention, a prompt of {length}", [call] * 4, 0, operations)

    # -- products -----------------------------------------------------------------------------------------------

    def products(self) -> Iterator[Make]:
        shape = self.shape
        hidden, keys = shape.hidden, shape.kv_heads * shape.width
        sizes = {
            "q or o": (hidden, hidden),
            "k or v": (keys, hidden),
            "q, k and v": (hidden + 2 * keys, hidden),
            "gate or up": (shape.inner, hidden),
            "gate and up": (2 * shape.inner, hidden),
            "down": (hidden, shape.inner),
            "head": (shape.vocabulary, hidden),
        }
        for rows, (name, size) in product(shape.counts, sizes.items()):
            if name == "head" and rows > 256:
                continue
            yield partial(self._product, f"{name}, {rows} rows", rows, *size)
            if name == "down":
                yield partial(self._add_product, f"{name} with the residual added, {rows} rows", rows, *size)
            if rows <= 64 and name != "head":
                yield partial(self._exact_product, f"exact {name}, {rows} rows", rows, *size)

    def skinny(self) -> Iterator[Make]:
        """Products of few rows, and what torch takes for them."""
        shape = self.shape
        hidden, keys = shape.hidden, shape.kv_heads * shape.width
        sizes = {
            "q, k and v": (hidden + 2 * keys, hidden, {}),
            "o": (hidden, hidden, {}),
            "gate and up": (2 * shape.inner, hidden, {"is_gated": True}),
            "down": (hidden, shape.inner, {"is_added": True}),
            "head": (shape.vocabulary, hidden, {}),
        }
        has_dependent = (
            self.device.type == "cuda"
            and torch.cuda.get_device_capability(self.device) >= dependent_launch.LEAST_CAPABILITY
        )
        for rows, (name, (columns, depth, options)) in product(shape.few, sizes.items()):
            yield partial(self._torch_few, f"torch {name}, {rows} rows", rows, columns, depth, **options)
            variants: tuple[Any, ...] = ROW_VARIANTS if rows == 1 else ROWS_VARIANTS
            for at, variant in enumerate(variants):
                title = f"skinny {name}, {rows} rows, {' x '.join(map(str, variant))}"
                few = partial(self._few, title, rows, columns, depth, variant, **options)
                yield few
                if has_dependent and not at:
                    yield partial(_independent, few)

    def _torch_few(
        self, name: str, rows: int, columns: int, depth: int, *, is_gated: bool = False, is_added: bool = False
    ) -> Work:
        """The products with what follows them in a layer."""
        x, weights = self.random(rows, depth), self._weights(columns, depth)
        total = self.random(rows, columns)

        def run(weight: torch.Tensor) -> None:
            if is_added:
                total.addmm_(x, weight.t())
            elif is_gated:
                fused_layer.gated(functional.linear(x, weight))
            else:
                functional.linear(x, weight)

        return Work(name, [partial(run, weight) for weight in weights], weights[0].nbytes, 2 * rows * columns * depth)

    def _few(
        self,
        name: str,
        rows: int,
        columns: int,
        depth: int,
        variant: Any,
        *,
        is_gated: bool = False,
        is_added: bool = False,
    ) -> Work:
        x, weights = self.random(rows, depth), self._weights(columns, depth)
        total = self.random(rows, columns) if is_added else None
        layers = []
        for weight in weights:
            layer = torch.nn.Linear(depth, columns, bias=False, device="meta")
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            layers.append(layer)

        def run(layer: torch.nn.Linear) -> None:
            with mock.patch.object(skinny, "ROW" if rows == 1 else "ROWS", variant):
                skinny.multiply(layer, x, total, is_gated=is_gated)

        return Work(name, [partial(run, layer) for layer in layers], weights[0].nbytes, 2 * rows * columns * depth)

    def _weights(self, columns: int, depth: int) -> list[torch.Tensor]:
        count = max(2, self.shape.cached_bytes // (columns * depth * BF16.itemsize) + 1)
        return [self.random(columns, depth) for _ in range(min(count, 64))]

    def _product(self, name: str, rows: int, columns: int, depth: int) -> Work:
        x, weights = self.random(rows, depth), self._weights(columns, depth)
        calls = [partial(functional.linear, x, weight) for weight in weights]
        return Work(f"torch {name}", calls, weights[0].nbytes, 2 * rows * columns * depth)

    def _add_product(self, name: str, rows: int, columns: int, depth: int) -> Work:
        x, residual, weights = self.random(rows, depth), self.random(rows, columns), self._weights(columns, depth)
        calls = [partial(residual.addmm_, x, weight.t()) for weight in weights]
        return Work(f"torch {name}", calls, weights[0].nbytes, 2 * rows * columns * depth)

    def _exact_product(self, name: str, rows: int, columns: int, depth: int) -> Work:
        x, weights = self.random(rows, depth), self._weights(columns, depth)
        layers = []
        for weight in weights:
            layer = torch.nn.Linear(depth, columns, bias=False, device="meta")
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            layers.append(exact.ExactLinear(layer))
        return Work(name, [partial(layer, x) for layer in layers], weights[0].nbytes, 2 * rows * columns * depth)

    # -- the rest -----------------------------------------------------------------------------------------------

    def elementwise(self) -> Iterator[Make]:
        for rows in self.shape.counts:
            for make in (self._norm, self._gate, self._rotate):
                yield partial(make, rows)
        for rows, tile in product(self.shape.counts[:3], (2048, 4096, 8192)):
            yield partial(self._highest, rows, tile)

    def _norm(self, rows: int) -> Work:
        x, norm = self.random(rows, self.shape.hidden), fused_layer.Norm(self.random(self.shape.hidden), 1e-5)
        return Work(f"add and norm, {rows} rows", [partial(norm.add, x, x)] * 20, 4 * x.nbytes)

    def _gate(self, rows: int) -> Work:
        pairs = self.random(rows, 2 * self.shape.inner)
        return Work(f"gate, {rows} rows", [partial(fused_layer.gated, pairs)] * 20, 3 * pairs.nbytes // 2)

    def _rotate(self, rows: int) -> Work:
        shape = self.shape
        own, (call, *_) = self._step([(0, rows)], 64, 1, kind=_Rotation)
        key = self.random(1, rows, shape.kv_heads, shape.width).transpose(1, 2)
        angles = self.random(1, rows, shape.width)
        run = partial(own.attend_rotated, call._replace(key=key, value=key), angles, angles)
        return Work(f"rotate and write, {rows} tokens", [run] * 20, 2 * call.query.nbytes + 4 * key.nbytes)

    def _highest(self, rows: int, tile: int) -> Work:
        logits = self.random(rows, self.shape.vocabulary)

        def run() -> None:
            with mock.patch.object(sampler, "TILE", tile):
                sampler.TritonSampler().top(logits)

        return Work(f"highest logit, {rows} rows, tile {tile}", [run] * 4, logits.nbytes)

    def draws(self) -> Iterator[Make]:
        rows = self.shape.counts[1]
        options = {"temperature": (0, 1.0), "top-p": (0, 0.9), "top-k and top-p": (50, 0.9)}
        for (name, (top_k, top_p)), (tile, warps) in product(options.items(), ((2048, 16), (4096, 16), (8192, 32))):
            yield partial(
                self._draw, f"draw {rows} rows, {name}, tile {tile}, {warps} warps", rows, top_k, top_p, tile, warps
            )

    def _draw(self, name: str, rows: int, top_k: int, top_p: float, tile: int, warps: int) -> Work:
        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=self.device)

        scores = torch.randn(rows, self.shape.vocabulary, device=self.device)
        tokens = torch.empty(rows, dtype=torch.int64, device=self.device)
        columns = (
            column(0.7, torch.float32),
            column(top_k, torch.int32),
            column(top_p, torch.float64),
            column(0.0, torch.float32),
            column(0.5, torch.float64),
        )

        def run() -> None:
            sampler_kernels.draw[(rows,)](
                *(scores, tokens, *columns, self.shape.vocabulary), TILE=tile, num_warps=warps, num_stages=3
            )

        return Work(name, [run] * 2, scores.nbytes)

    def sections(self) -> dict[str, Callable[[], Iterator[Make]]]:
        return {
            "decode": self.decodes,
            "chunk": self.chunks,
            "skinny": self.skinny,
            "products": self.products,
            "elementwise": self.elementwise,
            "draw": self.draws,
        }
