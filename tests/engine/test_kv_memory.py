from __future__ import annotations

from pathlib import Path

import pytest

from decant.engine.errors import InvalidConfig
from decant.engine.model import kv_memory
from decant.engine.model.kv_memory import StepSizes, blocks_of_largest_steps, bytes_left, choose, largest_steps
from decant.engine.model.model import ModelConfig, load
from decant.engine.plan import DeviceMemory, StepPlan, StepResult

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
    assert not decodes.rows[0].request.plain, "a drawn token needs more memory than the likeliest one"
    for row in (*prompts.rows, *decodes.rows):
        assert row.end <= context_length
        assert len(row.blocks) == 2
        for blocks in row.blocks:
            assert row.end <= 16 * len(blocks)
            assert set(blocks) <= set(range(count))


def test_a_full_device_is_refused() -> None:
    ran: list[StepPlan] = []

    def run(plan: StepPlan) -> StepResult:
        ran.append(plan)
        return StepResult([])

    plans = largest_steps(StepSizes(), 64, 16, 1)
    assert choose(lambda steps: (steps(), 7)[1], run, plans) == 7
    assert ran == list(plans)
    with pytest.raises(InvalidConfig, match=r"kv_bytes: memory beside the weights .* got '-3 bytes free'"):
        choose(lambda steps: -3, run, plans)


def test_a_load_without_a_size_takes_what_is_left(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(str(tiny_llama), device="cpu", kv_bytes=None)
    backend = config.make_backend()
    assert backend.kv_bytes_left(lambda: None) == kv_memory.HOST_BYTES
    monkeypatch.setattr(type(backend), "kv_bytes_left", lambda self, steps: (steps(), 1 << 20)[1])
    device = load(config, backend=backend)
    assert device.num_blocks == (1 << 20) // device.block_bytes
