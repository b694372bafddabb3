from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decant.router.admission.first_worker import WaitingForWorker
from decant.router.execution.queue_depth import ASSUMED_PREFILL_S_PER_TOKEN, set_queue_metrics
from decant.router.placement.cost_model import PrefillTransferCosts
from decant.runtime.telemetry.metrics import QueueMetrics, Registry

NOW = 100.0


def execution(model: str, accepted_at: float, *, prompt: int = 0, output: int = 0, scheduled: bool = False) -> Any:
    engine_request = SimpleNamespace(model=model)
    request = SimpleNamespace(engine_request=engine_request, accepted_at=accepted_at, prompt_tokens=prompt)
    return SimpleNamespace(is_scheduled=scheduled, stream=SimpleNamespace(request=request, num_tokens=output))


class Gauges:
    def __init__(self, *executions: Any) -> None:
        self.costs = {model: PrefillTransferCosts(lambda: NOW) for model in ("m", "n")}
        self._registry = Registry(process=False)
        self._metrics = QueueMetrics(self._registry)
        self._executions = [one for one in executions if not isinstance(one, WaitingForWorker)]
        self._first_workers = [one for one in executions if isinstance(one, WaitingForWorker)]

    def of(self, model: str) -> tuple[float | None, ...]:
        pool: Any = SimpleNamespace(costs=self.costs)
        set_queue_metrics(self._metrics, self._executions, self._first_workers, pool, NOW)
        names = ["requests_running", "requests_waiting", "oldest_waiting_request_seconds"]
        names += ["waiting_prompt_tokens", "waiting_prompt_seconds"]
        values = [self._registry.collectors.get_sample_value(f"decant_{name}", {"model": model}) for name in names]
        return tuple(values)


def test_waiting_prompts_are_counted_by_model_with_the_output_of_earlier_attempts() -> None:
    gauges = Gauges(
        execution("m", 90, prompt=1000, scheduled=True),
        execution("m", 97, prompt=300, output=20),
        execution("m", 95, prompt=80),
        execution("n", 99, prompt=7),
    )
    for model in gauges.costs:
        gauges.costs[model].add_prefill(100, 0.5, on_decode_worker=False)
    assert gauges.of("m") == pytest.approx((1, 2, 5, 400, 2.0))
    assert gauges.of("n") == pytest.approx((0, 1, 1, 7, 0.035))


def test_requests_that_wait_for_a_first_worker_wake_a_pool_at_zero() -> None:
    gauges = Gauges(WaitingForWorker("m", 300, 96.0), execution("m", 97, prompt=100))
    assert gauges.of("m") == pytest.approx((0, 2, 4, 400, 400 * ASSUMED_PREFILL_S_PER_TOKEN))
    assert gauges.of("n") == (0, 0, 0, 0, 0)


def test_a_model_without_requests_has_zeros() -> None:
    assert Gauges().of("m") == (0, 0, 0, 0, 0)


def test_a_prompt_without_a_measured_cost_still_waits_for_seconds() -> None:
    gauges = Gauges(execution("m", 90, prompt=300))
    assert gauges.of("m")[-1] == pytest.approx(300 * ASSUMED_PREFILL_S_PER_TOKEN)
    gauges.costs["m"].add_prefill(100, 1.0, on_decode_worker=True)
    assert gauges.of("m")[-1] == pytest.approx(3.0)
    gauges.costs["m"].add_prefill(100, 0.1, on_decode_worker=False)
    assert gauges.of("m")[-1] == pytest.approx(0.3), "prefill workers compute the prompts"
