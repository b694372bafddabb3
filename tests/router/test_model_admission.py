"""Acceptance against a simulated pool: a fluid model of workers whose steps take as long as was measured."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from decant.router.admission.model_admission import AcceptedRequest, ModelAdmission
from decant.router.admission.output_length import OutputLengths
from decant.router.admission.request_size import RequestSize
from decant.router.placement.capacity import PoolCapacity
from decant.router.settings import RouterSettings
from decant.runtime.connections import channel
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import DeadlineExceeded, QueueFull
from tests.router import virtual_time

TICK_S = 0.1


@dataclass
class Pool:
    """Decode workers that give every running answer a token per step, after its prompt was computed in order."""

    decode_workers: int = 1
    batch_limit: int = 256
    step_s: float = 0.002
    step_s_per_sequence: float = 0.0006
    prompt_tokens_per_s: float = 20_000.0
    slowdown: float = 1.0
    prompts: list[list[float]] = field(default_factory=list)  # tokens left to compute
    running: int = 0

    def capacity(self) -> PoolCapacity:
        return PoolCapacity(
            decode_workers=self.decode_workers,
            batch_limit=self.batch_limit,
            step_s=self.slowdown * self.step_s,
            step_s_per_sequence=self.slowdown * self.step_s_per_sequence,
            prompt_tokens_per_s=self.prompt_tokens_per_s,
            queued_prompt_tokens=round(sum(left for (left,) in self.prompts)),
        )

    async def answer(self, prompt_tokens: int, output: list[int], length: int) -> None:
        left = [float(prompt_tokens)]
        self.prompts.append(left)
        while left[0] > 0:  # noqa: ASYNC110 - the time is simulated
            await asyncio.sleep(TICK_S)
        self.running += 1
        try:
            generated = 0.0
            while generated < length:
                await asyncio.sleep(TICK_S)
                generated += TICK_S / self.capacity().seconds_per_token(self.running)
                output.extend([0] * (min(length, int(generated)) - len(output)))
        finally:
            self.running -= 1

    async def compute_prompts(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            tokens = TICK_S * self.prompt_tokens_per_s
            while self.prompts and tokens > 0:
                used = min(tokens, self.prompts[0][0])
                tokens -= used
                self.prompts[0][0] -= used
                if self.prompts[0][0] <= 0:
                    self.prompts.pop(0)


@dataclass
class Load:
    """Offered requests, and what became of them."""

    admission: ModelAdmission
    pool: Pool
    outcomes: dict[str, int] = field(default_factory=dict)
    late: list[float] = field(default_factory=list)

    async def send(self, seconds: float | None, max_tokens: int, length: int, priority: int = 0) -> None:
        size = RequestSize(150, max_tokens, max_tokens if length == max_tokens else 0)
        deadline = Deadline.after(seconds)
        try:
            self.admission.check(size, priority, deadline)
            output: list[int] = []
            request = self.admission.accepted(size, priority, deadline, lambda: len(output))
            async with asyncio.timeout(seconds) as limit:
                started = await self.admission.enter(request)
                try:
                    await self.pool.answer(size.prompt_tokens, output, length)
                finally:
                    started.release()
        except QueueFull:
            self._count("refused")
        except (TimeoutError, DeadlineExceeded):
            assert seconds is not None
            del limit
            self._count("missed")
        else:
            self.admission.learn(size, length, 0)
            self._count("completed")

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def simulate(
    monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Load], Coroutine[Any, Any, None]], **pool: Any
) -> Load:
    async def main() -> Load:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=loop.time))
        workers = Pool(**pool)
        load = Load(ModelAdmission(RouterSettings(models=("m",)), workers.capacity), workers)
        background = [asyncio.create_task(workers.compute_prompts()), asyncio.create_task(heartbeats(load.admission))]
        await scenario(load)
        for task in background:
            task.cancel()
        assert load.admission.active == load.admission.waiting == 0
        assert load.admission._expected_tokens == pytest.approx(0, abs=1e-6)
        return load

    return virtual_time.run(main())


async def heartbeats(admission: ModelAdmission) -> None:
    while True:
        await asyncio.sleep(0.25)
        admission.grant()


async def offer(
    load: Load, rate: float, seconds: float, send: Callable[[random.Random], Coroutine[Any, Any, None]]
) -> None:
    draw, tasks = random.Random(1), []
    for _ in range(int(rate * seconds)):
        tasks.append(asyncio.create_task(send(draw)))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*tasks)


CAPACITY = 1 / (0.0006 * 64 + 0.002 * 64 / 256)  # answers of 64 tokens per second, at the batch limit


@pytest.mark.parametrize("deadline", [8.0, 30.0])
@pytest.mark.parametrize("factor", [0.5, 3, 10])
def test_accepted_requests_keep_their_deadlines_at_any_load(
    monkeypatch: pytest.MonkeyPatch, factor: float, deadline: float
) -> None:
    async def scenario(load: Load) -> None:
        await offer(load, factor * CAPACITY, 10, lambda draw: load.send(deadline, 64, 64))

    load = simulate(monkeypatch, scenario)
    assert "missed" not in load.outcomes, load.outcomes
    if factor < 1:
        assert "refused" not in load.outcomes, load.outcomes
    else:
        assert load.outcomes["completed"] >= 0.9 * CAPACITY * 10, load.outcomes


def test_a_mixture_of_lengths_and_deadlines_misses_few(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(load: Load) -> None:
        def send(draw: random.Random) -> Coroutine[Any, Any, None]:
            length = max(1, min(256, round(draw.expovariate(1 / 40))))
            return load.send(draw.choice([6.0, 15.0, 60.0, None]), 256, length)

        await offer(load, 3 * CAPACITY, 15, send)

    outcomes = simulate(monkeypatch, scenario).outcomes
    accepted = outcomes["completed"] + outcomes.get("missed", 0)
    assert outcomes.get("missed", 0) <= 0.02 * accepted, outcomes
    assert outcomes["completed"] > 0.8 * 15 * CAPACITY * 64 / 40, outcomes


def test_requests_without_deadline_do_not_make_others_miss_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(load: Load) -> None:
        first = [asyncio.create_task(load.send(4.0, 64, 64)) for _ in range(20)]
        await asyncio.sleep(0.2)
        flood = [asyncio.create_task(load.send(None, 64, 64)) for _ in range(400)]
        await asyncio.gather(*first, *flood)

    assert "missed" not in simulate(monkeypatch, scenario).outcomes


def test_a_high_priority_is_refused_where_accepted_requests_would_miss_their_deadlines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(load: Load) -> None:
        tasks = []
        for number in range(2000):
            tasks.append(asyncio.create_task(load.send(10.0, 64, 64, priority=number % 2 * 10)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)

    outcomes = simulate(monkeypatch, scenario, batch_limit=32).outcomes
    assert outcomes.get("missed", 0) <= 0.02 * outcomes["completed"], outcomes
    assert outcomes["refused"] > 0


def test_a_request_alone_is_accepted_whatever_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(load: Load) -> None:
        load.admission.check(RequestSize(150, 64, 64), 0, Deadline.after(1.0))
        load.pool.slowdown = 0.001
        await load.send(None, 64, 64)

    assert simulate(monkeypatch, scenario, slowdown=1e6).outcomes == {"completed": 1}


def test_a_refusal_names_its_limit_and_when_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(load: Load) -> None:
        running = [asyncio.create_task(load.send(None, 1000, 1000)) for _ in range(256)]
        await asyncio.sleep(1)
        with pytest.raises(QueueFull, match=r"at most 1.0 s are allowed for a deadline in 2.0 s") as refused:
            load.admission.check(RequestSize(100, 64, 64), 0, Deadline.after(2.0))
        assert refused.value.retry_after
        with pytest.raises(QueueFull, match="at most 60 s are allowed"):
            load.admission.check(RequestSize(100_000_000, 1), 0, Deadline())
        for task in running:
            task.cancel()
        await asyncio.wait(running)

    simulate(monkeypatch, scenario)


def test_a_request_that_can_no_longer_end_in_time_fails_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(load: Load) -> None:
        running = [asyncio.create_task(load.send(None, 64, 64)) for _ in range(8)]
        await asyncio.sleep(0.1)
        waits = asyncio.create_task(load.send(3.0, 64, 64))
        await asyncio.sleep(0.1)
        assert load.admission.waiting == 1
        load.pool.slowdown = 12.0
        await waits
        assert load.outcomes["missed"] == 1
        await asyncio.gather(*running)
        assert load.pool.running == 0

    simulate(monkeypatch, scenario, batch_limit=8)


def test_an_expired_request_leaves_the_queue_without_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(load: Load) -> None:
        size, deadline = RequestSize(10, 64, 64), Deadline.after(0.5)
        started = await load.admission.enter(load.admission.accepted(size, 0, Deadline()))
        request: AcceptedRequest = load.admission.accepted(size, 0, deadline)
        with pytest.raises(DeadlineExceeded):
            await load.admission.enter(request)
        assert load.admission.active == 1
        started.release()

    simulate(monkeypatch, scenario, batch_limit=1)


def test_a_waiting_request_has_the_number_of_those_that_go_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(load: Load) -> None:
        admission, size = load.admission, RequestSize(10, 64, 64)
        started = await admission.enter(admission.accepted(size, 0, Deadline()))
        requests: list[AcceptedRequest] = []
        waiting: list[asyncio.Task[Any]] = []
        for priority in (0, 1000, 0):
            requests.append(admission.accepted(size, priority, Deadline()))
            waiting.append(asyncio.create_task(admission.enter(requests[-1])))
            await asyncio.sleep(0.1)
        assert [admission.num_ahead(request) for request in requests] == [1, 0, 2]
        started.release()
        urgent = await waiting[1]
        assert [admission.num_ahead(requests[index]) for index in (0, 2)] == [0, 1]
        urgent.release()
        (await waiting[0]).release()
        (await waiting[2]).release()

    simulate(monkeypatch, scenario, batch_limit=1)


def test_output_lengths_are_learned_from_answers_whose_length_was_free() -> None:
    lengths = OutputLengths()
    free, forced, unset = RequestSize(10, 1000), RequestSize(10, 64, 64), RequestSize(10, 8000, is_limit_set=False)
    assert lengths.high(forced) == 64
    assert lengths.mean(free) == lengths.mean(unset) == 1
    for length in (100, 120, 80, 100):
        lengths.add(free, length)
        lengths.add(forced, 64)
        lengths.add(unset, 3 * length)
    assert lengths.mean(free) == pytest.approx(100)
    assert 100 < lengths.high(free) < 150
    assert lengths.mean(unset) == pytest.approx(300)
    assert lengths.high(RequestSize(10, 20)) <= 20
    assert lengths.high(RequestSize(10, 1000, 500)) == 500
    assert not math.isnan(lengths.high(free))
