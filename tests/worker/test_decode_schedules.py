from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import pytest

from decant.engine.engine import Engine
from decant.protos import worker_pb2 as wire
from tests.worker.decode_harness import Node, make_run, make_work, owned, run_alone
from tests.worker.session_client import Router, RunRecord
from tests.worker.waiting import eventually

MOVES = (
    "start",
    "start",
    "start",
    "fetch",
    "fetch",
    "fetch",
    "cancel",
    "forget",
    "forget_early",
    "resend",
    "rest",
    "rest",
    "break",
)


class Schedule:
    def __init__(self, seed: int, sender: Node, node: Node) -> None:
        self.rng = random.Random(seed)
        self.sender = sender
        self.node = node
        self.router = Router(node)
        self.works: dict[tuple[str, int], tuple[wire.Run, wire.EngineRequest]] = {}
        self.unknown_runs: set[tuple[str, int]] = set()
        self.forgotten: set[tuple[str, int]] = set()

    async def play(self, moves: int) -> None:
        await self.router.open()
        for _ in range(moves):
            await getattr(self, f"_{self.rng.choice(MOVES)}")()
        await self._reconnect(everything=True)
        await self.router.until(lambda: not self._open())

    def _open(self) -> list[tuple[str, int]]:
        given_up = self.unknown_runs | self.forgotten
        return [
            key
            for key, (_, work) in self.works.items()
            if key not in given_up and not is_over(self.router.records.get(key, RunRecord()), len(work.prompt) // 4)
        ]

    async def _start(self, ticketed: bool = False) -> None:
        number = len(self.works)
        run = make_run(f"t/{number}", attempt=self.rng.randint(1, 3))
        work = make_work(self.rng.randint(1, 50), self.rng.randint(2, 25), seed=number)
        if self.rng.random() < 0.15:
            work.remaining_ms = self.rng.randint(1, 300)
        work.priority = self.rng.randint(-2, 2)
        self.works[run.request, run.attempt] = run, work
        await self.router.start(run, work, await self.sender.offer(run, work) if ticketed else None)

    async def _fetch(self) -> None:
        await self._start(ticketed=True)

    async def _cancel(self) -> None:
        if self.works:
            run, _ = self.rng.choice(list(self.works.values()))
            await self.router.cancel(run)

    async def _forget(self) -> None:
        for key, (run, _) in list(self.works.items()):
            if (
                "ended" in self.router.records.get(key, RunRecord()).last
                and key not in self._open()
                and self.rng.random() < 0.5
            ):
                self.forgotten.add(key)
                await self.router.forget(run)

    async def _forget_early(self) -> None:
        if self._open():
            await self.router.forget(self.works[self.rng.choice(self._open())][0])

    async def _resend(self) -> None:
        if self.works:
            run, work = self.rng.choice(list(self.works.values()))
            await self.router.send(
                resend=wire.Resend(run=run, resume=wire.ResumePosition(position=len(work.prompt) // 4))
            )

    async def _rest(self) -> None:
        await asyncio.sleep(self.rng.choice((0, 0.001, 0.01, 0.05)))

    async def _break(self) -> None:
        await self.router.leave()
        await asyncio.sleep(self.rng.choice((0, 0, 0.02, 0.7)))
        await self._reconnect(everything=self.rng.random() < 0.7)

    async def _reconnect(self, everything: bool) -> None:
        await self.router.leave()
        mine = [key for key in self._open() if everything or self.rng.random() < 0.5]
        await self.router.open(*(owned(self.works[key][0], len(self.works[key][1].prompt) // 4) for key in mine))
        welcome = self.router.welcome
        assert welcome is not None
        self.unknown_runs |= {(run.request, run.attempt) for run in welcome.unknown_runs}
        self.unknown_runs |= {key for key in self._open() if key not in mine}  # given up


def is_over(record: RunRecord, prompt: int) -> bool:
    ends = [record.last["ended"].end] if "ended" in record.last else []
    ends += record.last["run_status"].ended if "run_status" in record.last else []
    if ends:
        end: wire.OutputEnd = ends[0]
        return prompt + len(record.tokens) >= end.end_position
    return record.outcome is not None


async def owners_are_known(node: Node, others: set[str]) -> bool:
    def alive(engine: Engine) -> set[str]:
        engine.check_integrity()
        return {*engine.sequences, *engine.transfers.arrivals}

    ids = await node.host.loop.call(alive)
    return ids <= {name for *_, name in node.decode.runs()} | others


async def run_schedule(seed: int, moves: int) -> None:
    async with (
        Node("p", blocks=256, lease_ms=600) as sender,
        Node("d", blocks=40, running=4, budget=8, lease_ms=400, max_waiting=6) as node,
    ):
        node.device.seconds = sender.device.seconds = 0.001
        schedule = Schedule(seed, sender, node)
        await schedule.play(moves)
        for key, (_, work) in schedule.works.items():
            record, text = schedule.router.records.get(key, RunRecord()), run_alone(work)
            prompt = len(work.prompt) // 4
            written = record.text(prompt)
            assert record.tokens == {place: text[place - prompt] for place in record.tokens}
            if (
                key not in schedule.unknown_runs
            ):  # of one that was given up, the first that is record may be in the middle
                assert written == text[: len(written)]
            end = record.last["ended"].end if "ended" in record.last else wire.OutputEnd()
            if end.reason == wire.OutputEnd.REASON_LENGTH and key not in schedule.unknown_runs:
                assert written == text
        await eventually(lambda: owners_are_known(node, set()))
        await schedule.router.leave()
        await eventually(lambda: not list(node.decode.runs()))  # one lease after their owner has gone
        await node.audit()
        await sender.audit()
        assert not node.errors


async def run_schedules(seeds: Iterable[int], moves: int) -> None:
    async def run(seed: int) -> None:
        try:
            await run_schedule(seed, moves)
        except Exception as error:
            error.add_note(f"in the schedule of seed {seed}")
            raise

    async with asyncio.TaskGroup() as group:
        for seed in seeds:
            group.create_task(run(seed))


@pytest.mark.slow
async def test_every_run_ends_and_every_block_has_an_owner() -> None:
    await run_schedules(range(6), 40)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 124, 8))
async def test_every_run_ends_and_every_block_has_an_owner_in_long_schedules(first: int) -> None:
    await run_schedules(range(first, first + 8), 150)
