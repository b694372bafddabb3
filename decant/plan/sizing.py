"""From a workload and objectives to workers of each role.

prefill   the fewest workers at which `quantile` of the prompts wait and prefill within the TTFT objective
decode    the fewest at which a step takes at most the TPOT objective and the running sequences fit, with three standard
          deviations to spare: arrivals are random, so their number is about Poisson

A worker at r requests/s runs b sequences with b = r x output x step(b): Little's law. Objectives that are not set leave
the limits of load and memory. TTFT ends before the handoff; the first token does not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from decant.plan.errors import InvalidPlan
from decant.plan.memory import Room
from decant.plan.quantities import Lengths, Slo, show_seconds
from decant.plan.queueing import ServiceTime, wait_quantile
from decant.plan.recorded_workload import Trace
from decant.plan.speed import Speed

MAX_WORKERS = 10_000
_DEVIATIONS = 3.0
_STEPS = 60  # halvings: more than a double resolves


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests per second, their lengths, and the share of them that has to meet the TTFT objective. `trace`: the
    requests that rate and lengths are of, if they are recorded ones."""

    prompt: Lengths
    output: Lengths
    rate: float = 1.0
    quantile: float = 0.99
    trace: Trace | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.trace.longest if self.trace else self.prompt.high + self.output.high

    @property
    def context(self) -> float:
        """Mean context of a running sequence; a long output is running for longer."""
        return self.prompt.mean + self.output.mean_square / self.output.mean / 2


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment and what it gives. Seconds; `goodput` in requests/s within all objectives.

    ttft           that `quantile` of the requests stay within, for the longest prompt
    ttft_median    of a prompt of mean length
    running        sequences of each decode worker, on average
    batch_limit    most sequences of a decode worker within TPOT objective and memory
    kv_use         share of a decode worker's KV blocks in use, on average
    pool_bytes     bytes/s of KV cache from the prefill pool to the decode pool
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
    """Plans for one kind of worker."""

    def __init__(self, speed: Speed, room: Room, workload: Workload, slo: Slo) -> None:
        self._speed = speed
        self._room = room
        self._workload = workload
        self._slo = slo

    def plan(self) -> Plan:
        """The smallest deployment for the workload. Raises InvalidPlan where none is large enough."""
        self._room.check(self._workload.longest)
        self._check_objectives()
        rate = self._workload.rate
        prefill = _fewest("prefill workers", lambda count: self._prefill_fits(count, rate))
        decode = _fewest("decode workers", lambda count: self._decode_fits(rate / count))
        return self._describe(prefill, decode)

    def batch_limit(self) -> int:
        """Most sequences that run on a decode worker within the TPOT objective and its memory."""
        context = self._workload.context
        fit = self._room.sequences(math.ceil(context))
        limit = self._slo.tpot
        if limit is None or self._speed.step(fit, context) <= limit:
            return fit
        low, high = 1, fit  # step(low) is within the limit, step(high) is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._speed.step(middle, context) <= limit else (low, middle)
        return low

    def ttft(self, workers: int, rate: float) -> float:
        """Wait and prefill of the longest prompt, in seconds, that `quantile` of the requests stay within."""
        wait = wait_quantile(workers, rate, self._service(), self._workload.quantile)
        return self._speed.prefill(self._workload.prompt.high) + wait

    def median_ttft(self, workers: int, rate: float) -> float:
        """Median wait, and the prefill of a prompt of mean length, in seconds."""
        return self._speed.prefill(self._workload.prompt.mean) + wait_quantile(workers, rate, self._service(), 0.5)

    def running(self, rate: float) -> float:
        """Sequences that run on a decode worker at `rate` requests/s; infinite where it can't keep up."""
        tokens = rate * self._workload.output.mean
        low, high = 0.0, float(self._room.sequences(math.ceil(self._workload.context)))
        if high < tokens * self._speed.step(high, self._workload.context):
            return math.inf
        for _ in range(_STEPS):
            middle = (low + high) / 2
            is_enough = middle >= tokens * self._speed.step(middle, self._workload.context)
            low, high = (low, middle) if is_enough else (middle, high)
        return high

    def _prefill_fits(self, workers: int, rate: float) -> bool:
        ttft = self.ttft(workers, rate)
        return ttft < math.inf and (self._slo.ttft is None or ttft <= self._slo.ttft)

    def _decode_fits(self, rate: float) -> bool:
        running = self.running(rate)
        if math.isinf(running):
            return False
        context = self._workload.context
        is_in_memory = (running + _DEVIATIONS * math.sqrt(running)) * context <= self._room.tokens
        step = self._speed.step(max(running, 1.0), context)
        return is_in_memory and (self._slo.tpot is None or step <= self._slo.tpot)

    def _describe(self, prefill: int, decode: int) -> Plan:
        workload, speed, room = self._workload, self._speed, self._room
        running = self.running(workload.rate / decode)
        by_prefill = _highest(lambda rate: self._prefill_fits(prefill, rate), workload.rate)
        by_decode = _highest(lambda rate: self._decode_fits(rate / decode), workload.rate)
        return Plan(
            prefill_workers=prefill,
            decode_workers=decode,
            prefill_mean=self._service().mean,
            prefill_longest=speed.prefill(workload.prompt.high),
            ttft=self.ttft(prefill, workload.rate),
            ttft_median=self.median_ttft(prefill, workload.rate),
            tpot=speed.step(max(running, 1.0), workload.context),
            running=running,
            batch_limit=self.batch_limit(),
            kv_use=running * workload.context / room.tokens,
            prefill_use=workload.rate * self._service().mean / prefill,
            goodput=min(by_prefill, by_decode),
            goodput_limit="prefill" if by_prefill < by_decode else "decode",
            pool_bytes=workload.rate * workload.prompt.mean * room.kv_token,
        )

    def _service(self) -> ServiceTime:
        """Moments of a prefill's seconds."""
        prefill, lengths = self._speed.prefill, self._workload.prompt
        powers = (lengths.mean_of(lambda tokens, power=power: prefill(tokens) ** power) for power in (1, 2, 3))  # type: ignore[misc]
        return ServiceTime(*powers)

    def _check_objectives(self) -> None:
        alone = self._speed.prefill(self._workload.prompt.high)
        if self._slo.ttft is not None and alone > self._slo.ttft:
            raise InvalidPlan(
                "--slo ttft",
                f"a prefill of {self._workload.prompt.high:,} tokens alone takes {show_seconds(alone)}: at least that, "
                f"shorter prompts, or a device {alone / self._slo.ttft:.1f} times as fast",
                show_seconds(self._slo.ttft),
            )
        step = self._speed.step(1, self._workload.context)
        if self._slo.tpot is not None and step > self._slo.tpot:
            raise InvalidPlan(
                "--slo tpot",
                f"a step of one sequence takes {show_seconds(step)}: at least that, --quantization, or a device with "
                f"{step / self._slo.tpot:.1f} times the bandwidth",
                show_seconds(self._slo.tpot),
            )


def _fewest(what: str, fits: Callable[[int], bool]) -> int:
    """The smallest count that fits; fitting is monotonic. Raises InvalidPlan."""
    high = 1
    while not fits(high):
        if high >= MAX_WORKERS:
            raise InvalidPlan("--rate", f"a rate that {MAX_WORKERS:,} {what} can serve", "more")
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _highest(fits: Callable[[float], bool], begin: float) -> float:
    """The highest rate that fits, at least `begin`, which does."""
    low, high = begin, 2 * begin
    while fits(high):
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
