from __future__ import annotations

import pytest

from decant.engine.engine import Engine
from decant.engine.errors import OutOfBlocks
from decant.engine.request import Request
from tests.engine.factories import BLOCK, make_engine, make_request, prompt, step_until


def arrival(blocks: int) -> Request:
    return make_request("arrives", prompt(blocks * BLOCK - 1, 9), 4)


@pytest.mark.parametrize("running", [1, 2, 3])
def test_an_arrival_leaves_a_block_for_each_running_sequence(running: int) -> None:
    engine = make_engine(24)
    for number in range(running):
        engine.add(make_request(f"r{number}", prompt(6, number + 1), 40))
    step_until(engine, lambda: len(engine.scheduler.running) == running)
    most = engine.pool.available_blocks - running
    with pytest.raises(OutOfBlocks):
        engine.transfers.reserve(arrival(most + 1))
    engine.transfers.reserve(arrival(most)).abort()
    engine.check_integrity()


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("running", [1, 2, 3])
def test_a_waiting_prompt_leaves_the_last_blocks_to_running_sequences(running: int, beyond: int) -> None:
    engine = make_engine(24)
    for number in range(running):
        engine.add(make_request(f"r{number}", prompt(6, number + 1), 40))
    step_until(engine, lambda: len(engine.scheduler.running) == running)
    most = engine.pool.available_blocks - running
    engine.add(make_request("waits", prompt((most + beyond) * BLOCK, 9), 4))
    engine.step()
    assert engine.load().waiting == beyond


def preempted(engine: Engine) -> bool:
    return any(waiting.timeline.scheduled is not None for waiting in engine.scheduler.waiting)


@pytest.mark.rule(
    "block-for-each-running-sequence",
    "engine/exports.py:KvTransfers.reserve",
    "engine/scheduler.py:Scheduler.reserved_blocks",
)
def test_preempted_sequences_come_before_arrivals() -> None:
    engine = make_engine(12, max_running=4)
    for number in range(3):
        engine.add(make_request(f"r{number}", prompt(8, number + 1), 30))
    log = step_until(engine, lambda: preempted(engine) and engine.pool.available_blocks > len(engine.scheduler.running))
    with pytest.raises(OutOfBlocks):
        engine.transfers.reserve(arrival(1))
    step_until(engine, lambda: not preempted(engine) and engine.pool.available_blocks > 4, log)
    engine.transfers.reserve(arrival(1)).abort()
    engine.check_integrity()
