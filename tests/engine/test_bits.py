"""A row's logits have the same bits in any batch and chunking, and after preemption and handoff."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from decant import models
from decant.bench import model_shapes as shapes
from decant.engine.cpu.backend import CpuBackend, make_cpu_backend
from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.cpu.linear import pack_linear
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.model.runner import ModelRunner
from decant.engine.model.step_batch import FlatBatch, Ints
from decant.engine.plan import Row
from decant.engine.request import Request, SamplingParams, StopParams
from decant.engine.scheduler import Limits
from tests.engine import tiny

pytestmark = pytest.mark.slow

BLOCK = 16

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def gelu(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gelu")
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, hidden_act="gelu_pytorch_tanh")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def dbrx(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.config("dbrx", max_seq_len=1024), tmp_path_factory.mktemp("dbrx")))


@pytest.fixture(scope="module")
def jetmoe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.config("jetmoe", max_position_embeddings=1024), tmp_path_factory.mktemp("jetmoe")))


DEVICES = [
    *[f"{shape} {dtype} native" for shape in ("small", "committed") for dtype in ("bfloat16", "float32")],
    *[f"small {dtype} torch" for dtype in ("bfloat16", "float32") if KERNELS],
    *[f"gelu {dtype} native" for dtype in ("bfloat16", "float32")],
    *[f"{shape} {dtype} native" for shape in ("dbrx", "jetmoe") for dtype in ("bfloat16", "float32")],
    *[f"small bfloat16 {kernels} int8" for kernels in ("native", *["torch"] * bool(KERNELS))],
]
"""Shape, dtype and kernels, and the dtype of keys and values if it is another."""


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> ModelDevice:
    shape, dtype, kernels, *kv = request.param.split()
    path = str(models.path()) if shape == "committed" else request.getfixturevalue(shape)
    backend = CpuBackend() if kernels == "torch" else make_cpu_backend()
    return load(ModelConfig(path, dtype=dtype, kv_bytes=8 << 20, kv_dtype="int8" if kv else "auto"), backend=backend)


def tokens(length: int, seed: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (length,), generator=generator).tolist()


class Bench:
    def __init__(self, device: ModelDevice, lengths: list[int]) -> None:
        self.device = device
        self.tokens = [tokens(length, seed, device.vocab_size) for seed, length in enumerate(lengths)]
        first = 0
        self.tables = []
        for length in lengths:
            count = -(-length // device.block_size)
            self.tables.append(array("i", range(first, first + count)))
            first += count
        assert first <= device.num_blocks

    def row(self, index: int, start: int, end: int) -> Row:
        request = Request(f"s{index}", tuple(self.tokens[index]))
        return Row(request, self.tokens[index], start, end, (self.tables[index],), True)

    def step(self, *spans: tuple[int, int, int]) -> dict[int, torch.Tensor]:
        rows = [self.row(*span) for span in spans]
        rows.sort(key=lambda row: (row.end - row.start > 1, -row.end))
        total = sum(row.end - row.start for row in rows)
        with torch.inference_mode():
            logits = self.device.runner.logits(rows, np.arange(total))
        pieces = logits.split([row.end - row.start for row in rows])
        return {int(row.request.id[1:]): piece for row, piece in zip(rows, pieces, strict=True)}

    def chunked(self, index: int, chunk: int, first: int = 0) -> torch.Tensor:
        """Logits of a prompt in chunks, the first of ``first`` tokens if not 0."""
        length = len(self.tokens[index])
        starts = [*([0] if first else []), *range(first, length, chunk), length]
        return torch.cat([self.step((index, start, end))[index] for start, end in pairwise(starts)])

    def forget(self) -> None:
        self.device.store.blocks.view(torch.uint8).fill_(255)  # NaN in any dtype


LENGTHS = [200, 1, 130, 17, 64, 128, 33, 300]


def run_alone(bench: Bench) -> list[torch.Tensor]:
    return [bench.step((index, 0, len(sequence)))[index] for index, sequence in enumerate(bench.tokens)]


@pytest.fixture(scope="module")
def apart(device: ModelDevice) -> list[torch.Tensor]:
    """Logits of each prompt of ``LENGTHS`` in its own step, by one thread."""
    with threads(1):
        return run_alone(Bench(device, LENGTHS))


@pytest.mark.parametrize("count", [1, 3])
def test_logits_are_the_same_bits_alone_and_in_a_batch_of_prompts(
    device: ModelDevice, apart: list[torch.Tensor], count: int
) -> None:
    bench = Bench(device, LENGTHS)
    bench.forget()
    with threads(count):
        together = bench.step(*((index, 0, length) for index, length in enumerate(LENGTHS)))
    assert all(torch.equal(apart[index], together[index]) for index in range(len(LENGTHS)))


@pytest.mark.parametrize("chunk", [1, 7, 48, 129])
def test_logits_are_the_same_bits_in_any_chunking(device: ModelDevice, apart: list[torch.Tensor], chunk: int) -> None:
    bench = Bench(device, LENGTHS)
    bench.forget()
    if chunk == 1:  # across the borders of a block, at 16, and of a tile of keys, at 128
        assert torch.equal(bench.chunked(3, 1), apart[3])
        assert torch.equal(bench.chunked(2, 1, first=112), apart[2])
    else:
        for index in (0, 2, 7):
            assert torch.equal(bench.chunked(index, chunk), apart[index])


def test_decoding_beside_any_prompt_gives_the_same_bits(device: ModelDevice, apart: list[torch.Tensor]) -> None:
    bench = Bench(device, LENGTHS)
    bench.forget()
    decoding = [index for index in range(8) if index not in (2, 7)]
    bench.step(*((index, 0, len(bench.tokens[index]) - 1) for index in decoding if len(bench.tokens[index]) > 1))
    for start, end in ((0, 3), (3, 60), (60, 130)):
        mixed = [(index, len(bench.tokens[index]) - 1, len(bench.tokens[index])) for index in decoding]
        got = bench.step(*mixed, (2, start, end), (7, 2 * start, 2 * end))
        assert all(torch.equal(got[index][-1], apart[index][-1]) for index in decoding)
        assert torch.equal(got[2], apart[2][start:end])
        assert torch.equal(got[7], apart[7][2 * start : 2 * end])


@pytest.mark.parametrize("count", [2, 3])
def test_the_number_of_threads_does_not_change_a_bit(
    device: ModelDevice, apart: list[torch.Tensor], count: int
) -> None:
    bench = Bench(device, LENGTHS)
    bench.forget()
    with threads(count):
        again = run_alone(bench)
    assert all(torch.equal(one, other) for one, other in zip(apart, again, strict=True))


def test_the_blocks_that_a_sequence_gets_do_not_change_a_bit(device: ModelDevice) -> None:
    bench = Bench(device, [200])
    expected = run_alone(bench)[0]
    bench.forget()
    bench.tables[0] = array("i", reversed(range(40, 40 + len(bench.tables[0]))))
    assert torch.equal(bench.chunked(0, 48), expected)


class Tap(ModelRunner):
    def __init__(self, device: ModelDevice) -> None:
        self.__dict__.update(device.runner.__dict__)
        self.seen: dict[tuple[str, int], torch.Tensor] = {}

    def forward(self, flat: FlatBatch, keep: Ints, attended: Ints | None = None) -> torch.Tensor:
        logits = super().forward(flat, keep, attended)
        known_as = [(row.request.id, position) for row in flat.rows for position in range(row.start, row.end)]
        for place, line in zip(keep.tolist(), logits, strict=True):
            known = self.seen.setdefault(known_as[place], line.clone())
            assert torch.equal(known, line), f"{known_as[place]} has other bits the second time"
        return logits


def engine_on(device: ModelDevice, blocks: int, limits: Limits) -> tuple[Engine, Tap]:
    store = device.backend.make_store(device.store.layout, blocks, device.store.dtype)
    runner = ModelRunner(device.model, store, device.runner._layer_windows, frozenset(), device.backend)
    own = dataclasses.replace(device, store=store, runner=runner, eos_token_ids=frozenset())
    own.runner = tap = Tap(own)
    return Engine(own, limits), tap


def requests(vocabulary: int, lengths: Sequence[int] = (90, 3, 150, 40, 64, 31), written: int = 24) -> list[Request]:
    return [
        Request(
            f"r{index}",
            tuple(tokens(length, index, vocabulary)),
            sampling=SamplingParams(temperature=0.8 * (index % 2), seed=index),
            stop=StopParams(max_tokens=written),
        )
        for index, length in enumerate(lengths)
    ]


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    engine.check_integrity()


def logprobs_of(device: ModelDevice, batch: Sequence[Request], running: int, budget: int) -> dict[str, list[Any]]:
    limits = Limits(token_budget=budget, max_running=running, context_length=min(device.context_length, 512))
    engine, entries = Engine(device, limits), dict[str, list[Any]]()
    for request in batch:
        engine.add(request)
    while engine.has_work:
        output = engine.step()
        for token in output.tokens:
            entries.setdefault(token.id, []).append(token.logprobs)
        for part in output.prompt_logprobs:
            entries.setdefault(f"{part.id}, prompt", []).extend(part.entries)
    return entries


def test_logprobs_are_the_same_bits_at_any_concurrency(device: ModelDevice) -> None:
    batch = [
        dataclasses.replace(request, logprobs=index % 6, prompt_logprobs=index % 3 if index % 5 == 0 else None)
        for index, request in enumerate(requests(device.vocab_size, (90, 3, 150, 40, 64, 31) * 3, 6))
    ]
    run_alone = logprobs_of(device, batch, 1, 512)
    assert len(run_alone) == len(batch) + 4
    for running, budget in ((4, 512), (18, 48)):
        assert logprobs_of(device, batch, running, budget) == run_alone


def preemption_changes_nothing(device: ModelDevice, blocks: int, budget: int, batch: Sequence[Request]) -> None:
    context_length = min(device.context_length, blocks * BLOCK)
    undisturbed, expected = engine_on(
        device, 100, Limits(token_budget=512, max_running=8, context_length=context_length)
    )
    tight, got = engine_on(device, blocks, Limits(token_budget=budget, max_running=8, context_length=context_length))
    for request in batch:
        undisturbed.add(request)
        tight.add(request)
    run(undisturbed)
    run(tight)
    assert tight.scheduler.preemptions > 0
    written = {key for key in expected.seen if key[1] >= len(batch[int(key[0][1:])].token_ids)}
    assert len(written) == sum((request.stop.max_tokens or 0) - 1 for request in batch)
    common = expected.seen.keys() & got.seen.keys()
    assert common >= written
    assert all(torch.equal(expected.seen[key], got.seen[key]) for key in common)


def a_handoff_changes_nothing(device: ModelDevice, request: Request) -> None:
    limits = Limits(token_budget=48, max_running=8, context_length=min(device.context_length, 512))
    (whole, expected), (sender, _), (receiver, got) = (engine_on(device, 100, limits) for _ in range(3))
    whole.add(request)
    run(whole)
    hand_over(sender, receiver, request)
    run(receiver)
    later = {key for key in expected.seen if key[1] >= len(request.token_ids)}
    assert len(later) == (request.stop.max_tokens or 0) - 1
    assert not {key for key in got.seen if key[1] < len(request.token_ids)}, "nothing is computed again"
    assert all(torch.equal(expected.seen[key], got.seen[key]) for key in later)


def test_preemption_and_recomputation_do_not_change_a_bit(device: ModelDevice) -> None:
    preemption_changes_nothing(device, 32, 48, requests(device.vocab_size))


def test_a_handed_over_cache_gives_the_same_bits(device: ModelDevice) -> None:
    a_handoff_changes_nothing(device, requests(device.vocab_size)[2])


def hand_over(sender: Engine, receiver: Engine, request: Request) -> None:
    parking = Request(request.id, request.token_ids, sampling=request.sampling, stop=request.stop, park_after=1)
    sender.add(parking)
    arrival = receiver.transfers.reserve(request)
    export = sender.transfers.export(request.id, arrival.cached_blocks)
    sent = 0
    while not sender.parked:
        sender.step()
        for block in export.blocks[sent:]:
            arrival.write(block.address, bytes(export.read(block.address)), block.checksum)
        sent = len(export.blocks)
    commit = sender.transfers.finalize(request.id)
    for block in export.blocks[sent:]:
        arrival.write(block.address, bytes(export.read(block.address)), block.checksum)
    receiver.transfers.join(arrival, commit)
    sender.transfers.release(request.id)
    sender.check_integrity()


@pytest.mark.parametrize(("dtype", "vocabulary"), [("bfloat16", 75_968), ("float32", 38_016)])
def test_rows_are_exact_at_the_shape_of_qwen_half_a_billion(dtype: str, vocabulary: int, tmp_path: Path) -> None:
    shape = {**shapes.SHAPES["qwen2.5-0.5b"], "num_hidden_layers": 2, "vocab_size": vocabulary}
    folder = tiny.save_large(AutoConfig.for_model(**shape), tmp_path)
    device = load(ModelConfig(str(folder), dtype=dtype, kv_bytes=16 << 20))
    lengths = [140, 1, 33, 64, 20, 7]
    bench = Bench(device, lengths)
    with threads(2):
        apart = run_alone(bench)
        bench.forget()
        together = bench.step(*((index, 0, length) for index, length in enumerate(lengths)))
        assert all(torch.equal(apart[index], together[index]) for index in range(len(lengths)))
        bench.forget()
        assert torch.equal(bench.chunked(0, 48), apart[0])
        assert torch.equal(bench.chunked(2, 7), apart[2])
        assert torch.equal(bench.chunked(4, 1), apart[4])
        batch = requests(device.vocab_size, (45, 63), 6)
        preemption_changes_nothing(device, 8, 48, batch)
        a_handoff_changes_nothing(device, batch[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(4864, 896), (896, 4864), (128, 896), (97, 64)])
def test_a_packed_product_gives_a_row_the_same_bits_among_any_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(*shape, generator=generator) / shape[1] ** 0.5).to(dtype)
    rows = torch.randn(2048, shape[1], generator=generator).to(dtype)
    layer = pack_linear(weight, None, KERNELS)
    whole = layer(rows)
    for count in (1, 2, 3, 5, 8, 16, 17, 31, 64, 100, 129, 500, 1024):
        first = (count * 7) % (2048 - count)
        assert torch.equal(layer(rows[first : first + count]), whole[first : first + count]), count
