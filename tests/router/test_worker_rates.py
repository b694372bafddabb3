from __future__ import annotations

import pytest

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity
from decant.router.placement.worker_rates import WorkerRates

COSTS = Capacity(step_us=2_000, step_us_per_sequence=500)


def heartbeat(steps: int, seconds: float, running: int = 10) -> wire.Heartbeat:
    return wire.Heartbeat(load=wire.Load(running=running, busy_steps=steps, busy_us=round(seconds * 1e6)))


def seconds_per_token(rates: WorkerRates, sequences: int) -> float:
    return rates.step_s + rates.step_s_per_sequence * sequences


def test_steps_are_predicted_by_their_measured_time_and_the_costs_of_the_start() -> None:
    rates = WorkerRates(COSTS)
    assert seconds_per_token(rates, 10) == 0, "unknown"
    rates.apply_heartbeat(heartbeat(0, 0.0), 0.0, 0, 0)
    rates.apply_heartbeat(heartbeat(100, 1.4), 0.25, 0, 0)  # twice the 7 ms of ten sequences
    assert seconds_per_token(rates, 10) == pytest.approx(0.014)
    assert seconds_per_token(rates, 20) == pytest.approx(0.024)


def test_a_worker_without_costs_has_equal_steps() -> None:
    rates = WorkerRates(Capacity())
    rates.apply_heartbeat(heartbeat(0, 0.0), 0.0, 0, 0)
    rates.apply_heartbeat(heartbeat(10, 1.0), 0.25, 0, 0)
    assert seconds_per_token(rates, 1) == seconds_per_token(rates, 500) == pytest.approx(0.1)


def test_idle_time_does_not_slow_steps_down() -> None:
    rates = WorkerRates(COSTS)
    for count in range(100):
        rates.apply_heartbeat(heartbeat(count, 0.007 * count), 60.0 * count, 0, 0)
    assert seconds_per_token(rates, 10) == pytest.approx(0.007)


def test_a_restarted_counter_is_no_measurement() -> None:
    rates = WorkerRates(COSTS)
    rates.apply_heartbeat(heartbeat(1000, 50.0), 0.0, 0, 0)
    rates.apply_heartbeat(heartbeat(3, 0.1), 0.25, 0, 0)
    assert seconds_per_token(rates, 10) == 0


def test_a_worker_that_claims_more_time_than_has_passed_is_not_measured() -> None:
    rates = WorkerRates(COSTS)
    rates.apply_heartbeat(heartbeat(0, 0.0), 0.0, 0, 0)
    rates.apply_heartbeat(heartbeat(100, 4_000.0), 1.0, 0, 0)
    assert seconds_per_token(rates, 10) == 0
    rates.apply_heartbeat(heartbeat(100, 0.7), 2.0, 0, 0)
    assert seconds_per_token(rates, 10) == pytest.approx(0.007)


def test_prompts_are_measured_only_while_some_wait() -> None:
    rates = WorkerRates(COSTS)
    for at, queued, computed in [
        (0, 0, 0),
        (1, 100, 100),
        (2, 500, 2_100),
        (3, 200, 4_100),
        (4, 0, 4_300),
        (9, 10, 4_310),
    ]:
        rates.apply_heartbeat(wire.Heartbeat(), at, queued, computed)
    assert rates.prompt_tokens_per_s == pytest.approx(2_000)
