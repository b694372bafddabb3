"""Fewest workers of each role.

prefill   `quantile` of the prompts wait and prefill within the TTFT objective, which ends before the handoff
decode    tokens keep the TPOT objective, and the running sequences fit with three standard deviations to spare

Pools on a shared machine slow each other down: numbers of workers assume that the other pool computes all the time,
latencies that it is as busy as planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from decant.plan.capacity.memory import KvCapacity
from decant.plan.costs.overheads import NO_OVERHEADS, Overheads
from decant.plan.costs.speed import Slowed, Speed
from decant.plan.errors import InvalidPlan
from decant.plan.pools import Pools
from decant.plan.quantities import Slo, show_seconds
from decant.plan.workload import Workload

MAX_WORKERS = 10_000
_LEAST_RATE = 1e-6
_STEPS = 60  # halvings: more than a double resolves
_ROUNDS = 40
"""Rounds until each pool's use agrees with what it costs the other."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Workers of a plan; times in seconds, `goodput` and `pool_bytes` per second. `ttft` is what `quantile` of the
    requests would keep with the longest prompt; `running` and `batch_limit` count sequences of one decode worker.
    """

    prefill_workers: int
    decode_workers: int
    prefill_mean: float
    prefill_longest: float
    ttft: float
    ttft_median: float
    tpot: float
    running: float
    batch_limit: int
    kv_use: float
    prefill_use: float
    goodput: float
    goodput_limit: str
    pool_bytes: float


class Sizing:
    def __init__(
        self, speed: Speed, kv_capacity: KvCapacity, workload: Workload, slo: Slo, overheads: Overheads = NO_OVERHEADS
    ) -> None:
        self._speed = speed
        self._kv_capacity = kv_capacity
        self._workload = workload
        self._slo = slo
        self._overheads = overheads

    def plan(self) -> Plan:
        """Return the smallest plan. Raises InvalidPlan where none is large enough."""
        self._kv_capacity.check(self._workload.longest)
        rate, slo, busy = self._workload.rate, self._slo, self._pools(1.0, 1.0)
        self._check_objectives(busy)
        prefill = _fewest("prefill", rate, lambda count, rate: busy.prefill_fits(count, rate, slo.ttft))
        decode = _fewest("decode", rate, lambda count, rate: busy.decode_fits(rate / count, slo.tpot))
        return self._describe(prefill, decode)

    def _describe(self, prefill: int, decode: int) -> Plan:
        workload, kv_capacity, slo = self._workload, self._kv_capacity, self._slo
        rate = workload.rate
        pools = self.slowed(prefill, decode, rate)
        running = pools.running(rate / decode)
        by_prefill = _highest(
            lambda rate: self.slowed(prefill, decode, rate).prefill_fits(prefill, rate, slo.ttft), rate
        )
        by_decode = _highest(lambda rate: self.slowed(prefill, decode, rate).decode_fits(rate / decode, slo.tpot), rate)
        return Plan(
            prefill_workers=prefill,
            decode_workers=decode,
            prefill_mean=pools.prefill_mean,
            prefill_longest=pools.speed.prefill(workload.prompt.high),
            ttft=pools.ttft(prefill, rate),
            ttft_median=pools.median_ttft(prefill, rate),
            tpot=pools.tpot(running),
            running=running,
            batch_limit=pools.batch_limit(slo.tpot),
            kv_use=running * workload.context / kv_capacity.tokens,
            prefill_use=pools.prefill_use(prefill, rate),
            goodput=min(by_prefill, by_decode),
            goodput_limit="prefill" if by_prefill < by_decode else "decode",
            pool_bytes=rate * workload.prompt.mean * kv_capacity.kv_token,
        )

    def slowed(self, prefill: int, decode: int, rate: float) -> Pools:
        prefill_use = decode_use = 0.0
        for _ in range(_ROUNDS):
            pools = self._pools(prefill_use, decode_use)
            before = prefill_use, decode_use
            prefill_use = min(1.0, pools.prefill_use(prefill, rate))
            decode_use = 1 - math.exp(-pools.running(rate / decode))
            if before == (prefill_use, decode_use):
                break
        return pools

    def _pools(self, prefill_use: float, decode_use: float) -> Pools:
        contention = self._overheads.contention
        prefill_factor = 1 + (contention.prefill - 1) * decode_use
        step_factor = 1 + (contention.decode - 1) * prefill_use
        speed = Slowed(self._speed, prefill_factor, step_factor)
        handoff = self._overheads.handoff * (1 + (contention.handoff - 1) * prefill_use)
        sending = self._overheads.sending * prefill_use  # slows a prompt only where one follows at once
        return Pools(
            speed, self._kv_capacity, self._workload, replace(self._overheads, handoff=handoff, sending=sending)
        )

    def _check_objectives(self, busy: Pools) -> None:
        is_alone, prompt, slo = self._overheads == NO_OVERHEADS, self._workload.prompt.high, self._slo
        ttft, prefill = busy.ttft(MAX_WORKERS, _LEAST_RATE), busy.speed.prefill(prompt)
        if slo.ttft is not None and ttft > slo.ttft:
            what = f"a prefill of {prompt:,} tokens alone{'' if is_alone else ', with latency and contention,'}"
            remedy = "shorter prompts, or a device {:.1f} times as fast"
            raise InvalidPlan("--slo ttft", _least(what, ttft, prefill, slo.ttft, remedy), show_seconds(slo.ttft))
        tpot, step = busy.tpot(busy.running(_LEAST_RATE / MAX_WORKERS)), busy.speed.step(1, self._workload.context)
        if slo.tpot is not None and tpot > slo.tpot:
            what = f"a step of one sequence{'' if is_alone else ', with handoff and contention,'}"
            remedy = "--quantization, or a device with {:.1f} times the bandwidth"
            raise InvalidPlan("--slo tpot", _least(what, tpot, step, slo.tpot, remedy), show_seconds(slo.tpot))


def _least(what: str, takes: float, computing: float, objective: float, remedy: str) -> str:
    left = objective - (takes - computing)
    faster = f", {remedy.format(computing / left)}" if left > 0 else ""
    return f"{what} takes {show_seconds(takes)}: at least that{faster}"


def _fewest(role: str, rate: float, fits: Callable[[int, float], bool]) -> int:
    high = 1
    while not fits(high, rate):
        if high >= MAX_WORKERS:
            highest = _highest(lambda rate: fits(MAX_WORKERS, rate), _LEAST_RATE)
            limit = f"at most {highest:.3g} requests/s, for {MAX_WORKERS:,} {role} workers"
            raise InvalidPlan("--rate", limit, f"{rate:g}")
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle, rate) else (middle, high)
    return high


def _highest(fits: Callable[[float], bool], begin: float) -> float:
    """Return the highest rate that fits; `begin` has to fit."""
    low, high = begin, 2 * begin
    while fits(high):
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
