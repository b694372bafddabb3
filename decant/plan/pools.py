"""Pools of equal workers under a workload; times in seconds.

A decode worker at r requests/s runs r x output x seconds of a token sequences at a time: Little's law. A sequence
shares its steps with the mean number of others, as sequences arrive at random.
"""

from __future__ import annotations

import math
from functools import cached_property

from decant.plan.capacity.memory import KvCapacity
from decant.plan.costs.overheads import Overheads
from decant.plan.costs.speed import Speed
from decant.plan.queueing import ServiceTime, Wait
from decant.plan.workload import Workload

_DEVIATIONS = 3.0
_STEPS = 60  # halvings: more than a double resolves
_LENGTHS = 20


class Pools:
    def __init__(self, speed: Speed, kv_capacity: KvCapacity, workload: Workload, overheads: Overheads) -> None:
        self.speed = speed
        self._kv_capacity = kv_capacity
        self._workload = workload
        self._overheads = overheads

    @cached_property
    def service(self) -> ServiceTime:
        prefill, sending = self.speed.prefill, self._overheads.sending

        def moment(power: int) -> float:
            return self._workload.prompt.mean_of(lambda tokens: (prefill(tokens) + sending * tokens) ** power)

        return ServiceTime(moment(1), moment(2), moment(3))

    @property
    def prefill_mean(self) -> float:
        return self._workload.prompt.mean_of(self.speed.prefill)

    def prefill_use(self, workers: int, rate: float) -> float:
        return rate * self.service.mean / workers

    def ttft(self, workers: int, rate: float) -> float:
        wait = Wait(workers, rate, self.service).quantile(self._workload.quantile)
        return self._overheads.latency + self.speed.prefill(self._workload.prompt.high) + wait

    def median_ttft(self, workers: int, rate: float) -> float:
        wait = Wait(workers, rate, self.service)
        if not wait.is_bounded:
            return math.inf
        shares = ((number + 0.5) / _LENGTHS for number in range(_LENGTHS))
        prefills = [self.speed.prefill(self._workload.prompt.quantile(share)) for share in shares]
        low, high = prefills[0], prefills[-1] + wait.quantile(0.5)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            is_half = sum(wait.share(middle - prefill) for prefill in prefills) >= _LENGTHS / 2
            low, high = (low, middle) if is_half else (middle, high)
        return self._overheads.latency + high

    def running(self, rate: float) -> float:
        """Return the mean sequences of one decode worker at `rate`; infinite where it can't keep up."""
        tokens = rate * self._workload.output.mean
        low, high = 0.0, float(self._fit)
        if high < tokens * self._token(high):
            return math.inf
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if middle >= tokens * self._token(middle) else (middle, high)
        return high

    def tpot(self, running: float) -> float:
        gaps = max(self._workload.output.mean - 1, 1.0)
        return self._token(running) + self._overheads.handoff / gaps

    def prefill_fits(self, workers: int, rate: float, objective: float | None) -> bool:
        ttft = self.ttft(workers, rate)
        return ttft < math.inf and (objective is None or ttft <= objective)

    def decode_fits(self, rate: float, objective: float | None) -> bool:
        """Return whether one worker keeps the objective at `rate`, with its sequences in memory."""
        running = self.running(rate)
        if math.isinf(running):
            return False
        is_in_memory = (running + _DEVIATIONS * math.sqrt(running)) * self._workload.context <= self._kv_capacity.tokens
        return is_in_memory and (objective is None or self.tpot(running) <= objective)

    def batch_limit(self, objective: float | None) -> int:
        context = self._workload.context
        if objective is None or self.speed.step(self._fit, context) <= objective:
            return self._fit
        low, high = 1, self._fit  # step(low) is within the limit, step(high) is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.speed.step(middle, context) <= objective else (low, middle)
        return low

    def _token(self, others: float) -> float:
        return self.speed.step(min(others + 1, float(self._fit)), self._context)

    @cached_property
    def _context(self) -> float:
        return self._workload.context

    @cached_property
    def _fit(self) -> int:
        return self._kv_capacity.sequences(math.ceil(self._context))
