from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.gpu import ceilings, continuous_batching, idle, interference, shapes, variants
from bench.gpu.serving import decode_steps, make_engine, request, serve
from bench.gpu.shapes import Decode, Sizes
from decant.engine.errors import EngineError
from decant.engine.library_errors import triton_errors
from decant.engine.model.model import ModelDevice

UNMEASURED = "not measured"

FAILURES: tuple[type[Exception], ...] = (
    AssertionError,
    AttributeError,
    EngineError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a part may raise on a machine that lacks something, beside ``triton_errors``."""

TRANSFORMERS_SECONDS = 180.0


def free_memory(device: torch.device) -> None:
    """Free what the parts before held: fused layers and engines are in cycles, which only the collector frees."""
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Row:
    """A figure; its goal ``least`` is a minimum, or a maximum if ``is_most``."""

    name: str
    value: float | None
    unit: str
    least: float | None = None
    is_most: bool = False
    detail: dict[str, Any] = field(default_factory=dict)
    why: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return f"{UNMEASURED}: {self.why}"
        if self.least is None:
            return ""
        return "reached" if (self.value <= self.least if self.is_most else self.value >= self.least) else "missed"


class Bench:
    """Measures parts, of which each begins with the memory of the others freed, except the model that several share.

    ``loads`` describes each model that was loaded: its kernels, what fell back to torch, graphs, and free memory.
    """

    def __init__(self, sizes: Sizes, device: torch.device, how: shapes.Served) -> None:
        self.sizes = sizes
        self.device = device
        self.how = how
        self.loads: list[dict[str, Any]] = []
        self.bandwidth = ceilings.bandwidth(device, sizes.copied_bytes)
        self.rate = ceilings.product_rate(device, sizes.product)
        self._served: ModelDevice | None = None
        self._weights = self._products = 0
        self._own_throughput = 0.0  # at the outputs that are compared with transformers' continuous batching
        self.ends = float("inf")

    def parts(self) -> dict[str, Callable[[], Iterator[Row]]]:
        """Parts in order; those that share the large model come first."""
        return {
            "decode": self.decodes,
            "prompt": self.prompt,
            "mixed": self.mixed,
            "idle": self.idle,
            "interference": self.interference,
            "dependent": self.dependent,
            "exact": self.exact,
            "adapters": self.adapters,
            "queue": lambda: self.queue(self.sizes.small_models[0]),
            "queue-1b": lambda: self.queue(self.sizes.small_models[1]),
            "transformers": self.transformers,
        }

    # -- the large model ----------------------------------------------------------------------------------------

    @property
    def served(self) -> ModelDevice:
        if self._served is None:
            self._served = self._make(self.sizes.model)
        return self._served

    def _release(self) -> None:
        self._served = None
        free_memory(self.device)

    def _make(self, name: str, *, exact: bool = False, adapters: bool = False) -> ModelDevice:
        model = shapes.make_model(name, self.sizes.context_length, self.device)
        self._products = shapes.products(model)
        kv_bytes = shapes.kv_bytes(model, self._kv_tokens())
        began = time.perf_counter()
        how = replace(self.how, adapters=adapters)
        device = shapes.make_served(model, name, how, exact=exact, kv_bytes=kv_bytes)
        self._weights = shapes.weight_bytes(model)
        self.loads.append(shapes.describe(device, name) | {"load_s": round(time.perf_counter() - began, 1)})
        print(f"loaded: {self.loads[-1]}", file=sys.stderr, flush=True)
        gc.collect()
        gc.freeze()  # as workers do: a collection that looks through a model is a gap of a quarter of a second
        return device

    def _kv_tokens(self) -> int:
        sizes, steps = self.sizes, self.sizes.steps
        decodes = max(one.sequences * (one.context + steps + 112) for one in sizes.decodes)
        requests, _, longest = sizes.mixed
        count, length = sizes.long_prompts
        gaps = (sizes.answers + count) * 512 + count * (length + 64) + sizes.answers * sizes.context_length // 8
        return max(decodes, requests * (longest + sizes.outputs + 64), gaps, sizes.queue_kv_tokens + 64)

    def decodes(self) -> Iterator[Row]:
        for one in self.sizes.decodes:
            yield self._decode(one)

    def _decode(self, one: Decode) -> Row:
        device = self.served
        steps = decode_steps(device, one.sequences, one.context, self.sizes.steps)
        seconds, tokens = median(took for took, _ in steps), median(tokens for _, tokens in steps)
        kv = tokens * device.block_bytes // device.block_size
        by_bytes = (self._weights + kv) / self.bandwidth
        by_products = one.sequences * self._products / self.rate
        limit = max(by_bytes, by_products)
        detail = {
            "step_ms": seconds * 1e3,
            "limit_ms": limit * 1e3,
            "tokens": tokens,
            "tokens_s": one.sequences / seconds,
        }
        name = f"decode, {one.sequences} sequences, {one.context:,} tokens"
        return Row(name, limit / seconds, "of the limit", one.least, detail=detail)

    def prompt(self) -> Iterator[Row]:
        device, length = self.served, self.sizes.prompt
        seconds = []
        for run in range(3):
            engine = make_engine(device, 1, budget=length)
            (tokens,) = serve(engine, [request(f"prompt-{run}", length, 1, device.vocab_size)]).tokens.values()
            seconds.append(tokens[0])
        limit = length * self._products / self.rate
        detail = {"ttft_ms": min(seconds) * 1e3, "limit_ms": limit * 1e3}
        yield Row(
            f"prompt of {length:,} tokens: first token", limit / min(seconds), "of the limit", 0.75, detail=detail
        )

    def _requests(self, output: int, vocabulary: int) -> list[Any]:
        count, shortest, longest = self.sizes.mixed
        rng = random.Random(0)
        return [request(f"mixed-{at}", rng.randint(shortest, longest), output, vocabulary) for at in range(count)]

    def mixed(self) -> Iterator[Row]:
        device, (count, shortest, longest) = self.served, self.sizes.mixed
        for output in (self.sizes.outputs, self.sizes.compared_outputs):
            trace = serve(make_engine(device, count), self._requests(output, device.vocab_size))
            name = f"{count} at once, {shortest:,} to {longest:,} in, {output} out"
            detail = {"tpot_ms": trace.tpot * 1e3, "seconds": trace.seconds}
            yield Row(name, trace.throughput, "tokens/s", detail=detail)
        self._own_throughput = trace.throughput

    def transformers(self) -> Iterator[Row]:
        self._release()
        count, output = self.sizes.mixed[0], self.sizes.compared_outputs
        name = f"transformers' continuous batching, {count} at once, {output} out"
        if self.device.type != "cuda":
            yield Row(name, None, "tokens/s", why="its batching needs a GPU")
            return
        prompts = [list(one.token_ids) for one in self._requests(output, shapes.vocabulary(self.sizes.model))]
        job = continuous_batching.Job(self.sizes.model, str(self.device), self.sizes.context_length, prompts, output)
        left = self.ends - time.monotonic()
        tokens, seconds = continuous_batching.measure(job, max(1.0, min(left, TRANSFORMERS_SECONDS)))
        yield Row(name, tokens / seconds, "tokens/s", detail={"seconds": seconds})
        if self._own_throughput:
            times = self._own_throughput * seconds / tokens
            yield Row(f"{count} at once, {output} out: beside transformers' continuous batching", times, "times", 5.0)

    def idle(self) -> Iterator[Row]:
        for one in self.sizes.decodes[:2]:
            name = f"device idle between decode steps, {one.sequences} sequences"
            if self.device.type != "cuda":
                yield Row(name, None, "of the time", 0.03, is_most=True, why="needs a GPU's profile")
                continue
            share, detail = self._profile(self.served, one.sequences, one.context // 4)
            yield Row(name, share, "of the time", 0.03, is_most=True, detail=detail)

    def _profile(self, device: ModelDevice, sequences: int, context: int) -> tuple[float, dict[str, Any]]:
        """Idle share of decode steps, and each kernel's share of their time, which is printed."""
        found = idle.profile(partial(decode_steps, device, sequences, context, self.sizes.steps))
        shares = {kernel: seconds / found.seconds for kernel, seconds in found.kernels.items()}
        for kernel, share in shares.items():
            print(f"    {100 * share:>5.1f} %  {kernel}", file=sys.stderr)
        return found.idle, {"kernels": shares}

    def interference(self) -> Iterator[Row]:
        sizes, device = self.sizes, self.served
        count, length = sizes.long_prompts
        title = f"longest gap of {sizes.answers} answers, {count} prompts of {length:,}"
        chunks = interference.gaps_mixed(device, sizes, sizes.chunk)
        detail = {"longest_ms": chunks.longest * 1e3, "median_ms": chunks.median * 1e3}
        name = f"{title}, mixed in chunks of {sizes.chunk}"
        yield Row(name, chunks.longest / chunks.median, "of the median", 2.0, is_most=True, detail=detail)
        mixed = interference.gaps_mixed(device, sizes, length)
        second = shapes.beside(device, count * (-(-length // device.block_size) + 2))
        split = interference.gaps_split(device, second, sizes)
        detail = {"split_ms": split.longest * 1e3, "split_median_ms": split.median * 1e3}
        detail |= {"mixed_ms": mixed.longest * 1e3}
        name = f"{title}: split to mixed in whole"
        yield Row(name, split.longest / mixed.longest, "of mixed", 0.1, is_most=True, detail=detail)

    def exact(self) -> Iterator[Row]:
        one = self.sizes.decodes[1]
        plain = median(took for took, _ in decode_steps(self.served, one.sequences, one.context, self.sizes.steps))
        self._release()
        device = self._make(self.sizes.model, exact=True)
        exact = median(took for took, _ in decode_steps(device, one.sequences, one.context, self.sizes.steps))
        detail = {"exact_ms": exact * 1e3, "step_ms": plain * 1e3, "equal_bits": device.equal_bits}
        yield Row(f"exact, {one.sequences} sequences", exact / plain, "of the step", 1.25, is_most=True, detail=detail)

    def dependent(self) -> Iterator[Row]:
        name = "requests whose tokens dependent launches change"
        has_triton = self.device.type == "cuda" and self.how.cuda_kernels == "triton"
        if not has_triton or torch.cuda.get_device_capability(self.device) < (9, 0):
            why = "needs Triton kernels on a GPU of compute capability 9.0"
            yield Row(name, None, "requests", 0.0, is_most=True, why=why)
            return
        for requests in self.sizes.dependent:
            found = variants.compare_dependent_launches(self.served, requests, 600, self.sizes.outputs)
            title = f"{name}, of {requests} with {self.sizes.outputs} outputs"
            yield Row(title, found.changed, "requests", 0.0, is_most=True, detail=asdict(found))

    def adapters(self) -> Iterator[Row]:
        self._release()
        one, counts = self.sizes.decodes[1], self.sizes.adapters
        device = self._make(self.sizes.model, adapters=True)
        times = variants.adapter_steps(device, one.sequences, one.context, counts, self.sizes.steps)
        detail = {f"step_{count}_ms": each for count, each in zip(counts, times, strict=True)}
        name = f"one adapter, {one.sequences} sequences, {one.context:,} tokens"
        yield Row(name, times[1] / times[0], "of the step", 1.15, is_most=True, detail=detail)

    # -- the small models ---------------------------------------------------------------------------------------

    def queue(self, model: str) -> Iterator[Row]:
        self._release()
        sizes, device = self.sizes, self._make(model)
        rng = random.Random(0)
        outputs = [
            max(1, min(sizes.queue_most, round(rng.expovariate(1 / sizes.queue_mean)))) for _ in range(sizes.queue)
        ]
        requests = [
            request(f"queue-{at}", sizes.queue_prompt, output, device.vocab_size) for at, output in enumerate(outputs)
        ]
        trace = serve(make_engine(device, 64, kv_tokens=sizes.queue_kv_tokens), requests)
        batch = max(1, sizes.queue_kv_tokens // (sizes.queue_prompt + sizes.queue_most))
        batches = [outputs[at : at + batch] for at in range(0, len(outputs), batch)]
        if self.device.type == "cuda":
            share, profile = self._profile(device, 12, sizes.queue_prompt)
            yield Row(f"{model}: device idle between decode steps, 12 sequences", share, "of the time", detail=profile)
        prompt, step = self._static_pace(device, batch)
        detail = {"seconds": trace.seconds, "batch": batch, "static_step_ms": step * 1e3, "scaled_by_steps": True}
        detail |= trace.pace()
        for padded, least, name in (
            ([max(outputs)] * len(batches), 23.0, "a static batch padded to the longest of all"),
            ([max(one) for one in batches], 6.0, "a static batch padded to its own longest"),
        ):
            static = sum(prompt + (length - 1) * step for length in padded)
            title = f"{model}: {sizes.queue:,} requests, {sizes.queue_kv_tokens:,} tokens of KV: beside {name}"
            yield Row(title, static / trace.seconds, "times", least, detail=detail | {"static_s": static})

    def _static_pace(self, device: ModelDevice, batch: int) -> tuple[float, float]:
        sizes = self.sizes
        output = max(3, min(sizes.queue_most, sizes.steps * 2))
        rows = [request(f"static-{at}", sizes.queue_prompt + sizes.queue_most // 2 - output, output, device.vocab_size)
                for at in range(batch)]  # fmt: skip
        trace = serve(make_engine(device, batch), rows, batch)
        short = [request(f"first-{at}", sizes.queue_prompt, 1, device.vocab_size) for at in range(batch)]
        return serve(make_engine(device, batch), short).seconds, median(took for took, _ in trace.decodes)


def measure(bench: Bench, names: Sequence[str], seconds: float) -> Iterator[Row]:
    bench.ends = time.monotonic() + seconds
    for name in names:
        if time.monotonic() > bench.ends:
            yield Row(name, None, "", why=f"{seconds:g} s were over")
            continue
        try:
            yield from bench.parts()[name]()
        except FAILURES + triton_errors() as error:
            yield Row(name, None, "", why=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        free_memory(bench.device)
