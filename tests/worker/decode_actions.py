"""The events of a schedule, each a method with one number that chooses its details."""

from __future__ import annotations

import asyncio
from functools import cache

from decant.engine.errors import EngineError
from decant.handoff.errors import HandoffFailed, SequenceAlreadyFinished
from decant.protos import worker_pb2 as wire
from decant.runtime.packed import unpack
from decant.worker.wire_codec import to_requests
from tests.worker.decode_harness import make_work, run_alone
from tests.worker.decode_scenario import DecodeScenario
from tests.worker.scheduled_router import Expected, ExpectedOutput
from tests.worker.stepped_worker import LEASE_S


@cache
def reference_text(length: int, wanted: int, seed: int, output: int) -> list[int]:
    """Text of one output of a request, alone."""
    work = make_work(length, wanted, seed=seed)
    work.outputs[0].output = output
    return run_alone(work)


def check_is_expected(error: Exception) -> None:
    """No schedule makes a cache corrupt."""
    if isinstance(error, HandoffFailed) and error.cause == wire.CAUSE_CORRUPT:
        raise AssertionError(str(error)) from error


class RouterActions:
    def __init__(self, scenario: DecodeScenario) -> None:
        self.scenario = scenario

    def _begin(self, value: int, *, has_ticket: bool) -> None:
        number = len(self.scenario.runs)
        length, wanted = 1 + value % 19, 1 + value // 19 % 9
        ref = wire.Run(request=f"t/{number}", epoch=1, attempt=1)
        work = make_work(length, wanted, seed=number)
        if value % 11 == 0:
            work.remaining_ms = 1 + 40 * (value % 7)
        work.priority = value % 3 - 1
        count = 1 + value % 3
        work.outputs.extend(wire.OutputPrefix(output=output) for output in range(1, count))
        outputs = {
            output: ExpectedOutput(output, reference_text(length, wanted, number, output)) for output in range(count)
        }
        run = self.scenario.runs[ref.request] = Expected(ref, work, outputs)
        router = self.scenario.router_of(run)
        if not router.is_open:
            run.end = "unknown"
            return
        router.send(start=self._start_message(run, self.scenario.prefill.offer(ref, work) if has_ticket else None))

    def _start_message(self, run: Expected, ticket: wire.Ticket | None = None) -> wire.Start:
        return wire.Start(run=run.ref, engine_request=run.work, ticket=ticket)

    def start(self, value: int) -> None:
        self._begin(value, has_ticket=False)

    def fetch(self, value: int) -> None:
        self._begin(value, has_ticket=True)

    def repeat(self, value: int) -> None:
        run = self.scenario.pick(value)
        if run is not None and run.end is None and not run.is_forgotten:
            run.is_repeated = True
            self.scenario.router_of(run).send(start=self._start_message(run))

    def cancel(self, value: int) -> None:
        run = self.scenario.pick(value)
        if run is None:
            return
        cancel = wire.Cancel(run=run.ref, reason=[wire.Cancel.REASON_CLIENT, wire.Cancel.REASON_DEADLINE][value % 2])
        output = run.outputs[value % len(run.outputs)]
        if value % 5 == 0 and output.tokens and output.stop_position is None:
            cancel.reason, cancel.output = wire.Cancel.REASON_STOP_STRING, output.index
            cancel.end_position = output.stop_position = min(output.tokens) + value % len(output.tokens)
        self.scenario.router_of(run).send(cancel=cancel)

    def forget(self, value: int) -> None:
        run = self.scenario.pick(value)
        if run is not None:
            self.scenario.forget(run)

    def resend(self, value: int) -> None:
        run = self.scenario.pick(value)
        if run is not None and run.end is None:
            resume = wire.ResumePosition(output=value % len(run.outputs), position=run.prompt)
            self.scenario.router_of(run).send(resend=wire.Resend(run=run.ref, resume=resume))

    def adopt(self, value: int) -> None:
        run = self.scenario.pick(value)
        if run is None or run.end is not None or run.is_migrating:
            return
        other = {"a": "b", "b": "a"}[run.owner]
        if self.scenario.routers[other].is_open:
            run.owner = other
            run.ref = wire.Run(request=run.ref.request, epoch=run.ref.epoch + 1, attempt=1)
            run.clear()
            self.scenario.routers[other].send(adopt=wire.Adopt(run=run.ref, resume=run.resume))

    def replace(self, value: int) -> None:
        run = self.scenario.pick(value)
        if run is None or run.end is not None or run.is_migrating or not self.scenario.router_of(run).is_open:
            return
        router = self.scenario.router_of(run)
        run.end = "dropped"
        router.send(cancel=wire.Cancel(run=run.ref, reason=wire.Cancel.REASON_ATTEMPT))
        self.scenario.forget(run)

    def migrate(self, value: int) -> None:
        run = self.scenario.pick(value, lambda run: run.end is None and not run.is_migrating)
        if run is not None:
            self.scenario.router_of(run).send(migrate=wire.Migrate(run=run.ref, withdrawn=value % 4 == 0))

    async def leave(self, value: int) -> None:
        await self.scenario.routers["ab"[value % 2]].leave()

    async def open(self, value: int) -> None:
        """Open a session; runs that its hello omits are orphans."""
        router = self.scenario.routers["ab"[value % 2]]
        mine = [run for run in self.scenario.runs.values() if run.owner == router.name and run.end is None]
        named = mine if value % 3 else mine[::2]
        for run in mine:
            if run not in named:
                run.end, run.is_forgotten = "dropped", True
        await router.open(named)


class WorkerActions:
    def __init__(self, scenario: DecodeScenario) -> None:
        self.scenario = scenario

    def receive(self, value: int) -> None:
        run = self.scenario.pick(value, lambda run: run.offer and run.end is None and not run.is_migrating)
        if run is not None and run.offer is not None:
            run.is_migrating = True
            task = asyncio.create_task(self._move(run, run.offer))
            self.scenario.moves.add(task)

    async def _move(self, run: Expected, ticket: wire.Ticket) -> None:
        requests = to_requests(f"moved/{run.ref.request}", run.work, model="m")
        by_index = {request.sampling.output_index: request for request in requests}
        root, *forks = (by_index[output] for output in ticket.outputs)
        host = self.scenario.target.host
        try:
            arrival = await host.loop.call(
                lambda engine: engine.transfers.reserve(root, forks), undo=lambda _, made: made.abort()
            )
            result = await host.receiver.receive(self.scenario.target.source("d"), ticket, arrival)
        except (HandoffFailed, SequenceAlreadyFinished, EngineError) as error:
            check_is_expected(error)
            self.scenario.router_of(run).send(migrate=wire.Migrate(run=run.ref, withdrawn=True))
        else:
            for output in result.outputs:
                assert (moved := list(unpack(output.tokens))) == run.outputs[output.output].text[: len(moved)]
            run.end = run.end or "migrated"
            self.scenario.forget(run)
        finally:
            run.is_migrating, run.offer = False, None

    def step(self, value: int) -> None:
        [self.scenario.node, self.scenario.prefill, self.scenario.target, self.scenario.node][value % 4].loop.turn()

    def deliver(self, value: int) -> None:
        [self.scenario.node, self.scenario.prefill, self.scenario.target, self.scenario.node][value % 4].loop.deliver()

    def round(self, _: int) -> None:
        self.scenario.round()

    async def wait(self, value: int) -> None:
        await asyncio.sleep([0.01, 0.1, 0.3, 1.1, LEASE_S + 0.1][value % 5])

    def stall(self, _: int) -> None:
        if self.scenario.network.flows.is_set():
            self.scenario.network.flows.clear()
        else:
            self.scenario.network.flows.set()

    def cut(self, value: int) -> None:
        self.scenario.network.breaks = True
        self.scenario.network.loses_releases = value % 2 == 0

    def drain(self, value: int) -> None:
        if value % 4 == 0 and self.scenario.drain is None:
            self.scenario.drain = asyncio.create_task(self.scenario.node.decode.drain())

    def crash(self, value: int) -> None:
        if value % 8 == 0:
            self.scenario.node.device.broken = True
