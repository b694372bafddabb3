from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from decant.engine.backends import choose_backend
from decant.engine.errors import DeviceFailed, InvalidConfig
from decant.engine.loading import load
from decant.engine.model import backend as backend_module
from decant.engine.model import kv_memory, model
from decant.engine.model.backend import Backend
from decant.engine.model.kv_memory import StepSizes, blocks_of_largest_steps, bytes_left, choose, largest_steps
from decant.engine.model.kv_store import KvStore
from decant.engine.model.model import ModelConfig
from decant.engine.model.runner import ModelRunner
from decant.engine.plan import DeviceMemory

GIB = 1 << 30


def test_blocks_get_what_activations_graphs_and_a_margin_leave() -> None:
    left = bytes_left(DeviceMemory(free=60 * GIB, total=80 * GIB), activations=2 * GIB, graphs=GIB)
    assert left == 57 * GIB - int(80 * GIB * kv_memory.MARGIN)


@pytest.mark.parametrize("context_length", [5, 300, 100_000])
def test_the_largest_steps_fit_into_their_blocks(context_length: int) -> None:
    sizes = StepSizes(tokens=700, sequences=90)
    count = blocks_of_largest_steps(sizes, context_length, 16)
    prompts, decodes = largest_steps(sizes, context_length, 16, 2)
    assert prompts.num_tokens == sum(row.end - row.start for row in prompts.rows) == 700
    assert prompts.rows[0].end == min(700, context_length)
    assert len(decodes.rows) == 90
    assert not decodes.rows[0].request.is_plain_greedy, "a drawn token needs more memory than the likeliest one"
    for row in (*prompts.rows, *decodes.rows):
        assert row.end <= context_length
        assert len(row.blocks) == 2
        for blocks in row.blocks:
            assert row.end <= 16 * len(blocks)
            assert set(blocks) <= set(range(count))


def test_prompts_of_one_length_share_their_row() -> None:
    prompts, _ = largest_steps(StepSizes(tokens=1000, sequences=4), 300, 16, 1)
    assert [row.end for row in prompts.rows] == [300, 300, 300, 100]
    assert len({id(row) for row in prompts.rows}) == 2


@pytest.mark.parametrize(
    ("sizes", "possible"),
    [
        (StepSizes(700, 90), StepSizes(700, 90)),
        (StepSizes(10**9, 4), StepSizes(4 * 300, 4)),
        (StepSizes(10**9, 10**9), StepSizes(6400, 6400)),
    ],
)
def test_a_step_has_at_most_the_contexts_of_its_sequences_and_the_slots(sizes: StepSizes, possible: StepSizes) -> None:
    assert sizes.possible(context_length=300, slots=6400) == possible


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (StepSizes(10**9, 256), "token_budget: at most 1048576 .* got 1000000000"),
        (StepSizes(10**9, 10**9), "max_running: at most 1048576 .* got 1000000000"),
    ],
)
def test_steps_too_large_to_measure_are_refused(sizes: StepSizes, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        sizes.possible(context_length=100_000, slots=1 << 40)


def test_a_full_device_is_refused() -> None:
    ran: list[bool] = []

    def measure(steps: Callable[[], object]) -> int:
        steps()
        return 7

    assert choose(measure, lambda: ran.append(True), StepSizes()) == 7
    assert ran == [True]
    with pytest.raises(InvalidConfig, match=r"kv_bytes: memory beside the weights .* got '-3 bytes free'"):
        choose(lambda steps: -3, lambda: None, StepSizes())


def run_steps(backend: Backend, steps: Callable[[], object]) -> int:
    steps()
    return 1 << 20


@pytest.mark.parametrize("adapter_bytes", [0, 1 << 19])
def test_a_load_without_a_size_takes_what_is_left(
    adapter_bytes: int, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(str(tiny_llama), device="cpu", kv_bytes=None, adapters=True, adapter_bytes=adapter_bytes)
    backend = choose_backend(config)
    monkeypatch.setattr(type(backend), "kv_bytes_left", run_steps)
    monkeypatch.setattr(type(backend), "loads_to_device", True)
    device = load(config, backend=backend)
    assert device.num_blocks == ((1 << 20) - adapter_bytes) // device.block_bytes


def test_a_device_in_the_memory_of_the_host_builds_no_steps(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "HOST_KV_BYTES", 1 << 20)
    monkeypatch.setattr(kv_memory, "largest_steps", lambda *sizes: pytest.fail("steps are built"))
    device = load(ModelConfig(str(tiny_llama), device="cpu", step_sizes=StepSizes(10**9, 10**9)))
    assert device.num_blocks == (1 << 20) // device.block_bytes


@pytest.mark.parametrize(("free", "blocks"), [(None, 64), (1 << 40, 64), (32, 24), (4 / 3, 1)])
def test_a_host_with_little_memory_left_gets_fewer_blocks(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, free: float | None, blocks: int
) -> None:
    block_bytes = load(ModelConfig(str(tiny_llama), device="cpu", kv_bytes=1 << 20)).block_bytes
    monkeypatch.setattr(backend_module, "HOST_KV_BYTES", 64 * block_bytes)
    left = None if free is None else int((free + 8) * block_bytes) + 1
    config = ModelConfig(
        str(tiny_llama), device="cpu", host_memory=lambda: left, adapters=True, adapter_bytes=8 * block_bytes
    )
    assert load(config).num_blocks == blocks


def test_a_host_without_memory_for_a_block_is_refused_with_what_it_has(tiny_llama: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"kv_bytes: memory left for at least one block of \d+ bytes, got 75"):
        load(ModelConfig(str(tiny_llama), device="cpu", host_memory=lambda: 100))


def test_steps_that_exhaust_the_memory_are_refused_with_their_settings(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(str(tiny_llama), device="cpu", step_sizes=StepSizes(512, 64))
    backend = choose_backend(config)
    monkeypatch.setattr(type(backend), "kv_bytes_left", run_steps)
    monkeypatch.setattr(model, "_free_kv_bytes", partial(exhausted, monkeypatch, model._free_kv_bytes))
    limit = "max_running: less, or a token_budget below 512: the largest steps exhaust .* got 64"
    with pytest.raises(InvalidConfig, match=limit):
        load(config, backend=backend)


def exhausted(monkeypatch: pytest.MonkeyPatch, then: Callable[..., int], *arguments: object) -> int:
    """Let steps exhaust the memory from now on, after the probes; then call ``then``."""
    monkeypatch.setattr(ModelRunner, "run", raising(torch.OutOfMemoryError("CUDA out of memory.")))
    return then(*arguments)


def raising(error: Exception) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise error

    return fail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "name"), [("backend", "kv_bytes_left"), ("store", "prefault"), ("backend", "make_runner")]
)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure", 719), "the device is lost"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to"), "the memory of the device is exhausted"),
    ],
)
def test_a_device_that_fails_after_the_probes_is_named(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, part: str, name: str, error: Exception, reason: str
) -> None:
    config = ModelConfig(str(tiny_llama), device="cpu", kv_bytes=None)
    backend = choose_backend(config)
    monkeypatch.setattr(type(backend), "kv_bytes_left", run_steps)
    monkeypatch.setattr(type(backend) if part == "backend" else KvStore, name, raising(error))
    is_measured = name == "kv_bytes_left" and isinstance(error, torch.OutOfMemoryError)
    expected = (InvalidConfig, "max_running: less") if is_measured else (DeviceFailed, reason)
    with pytest.raises(expected[0], match=expected[1]):
        load(config, backend=backend)
