"""The events of a schedule of prefill calls, each a method with one number that chooses its details."""

from __future__ import annotations

import asyncio

from decant.protos import worker_pb2 as wire
from decant.runtime.packed import pack
from decant.runtime.protocol import PROTOCOL
from tests.router.virtual_time import settle
from tests.worker.decode_actions import reference_text
from tests.worker.decode_harness import make_work
from tests.worker.prefill_scenario import PrefillCall, PrefillScenario
from tests.worker.stepped_worker import LEASE_S

ROUTER = wire.Peer(id="a", incarnation=1, protocol=PROTOCOL)


class CallActions:
    def __init__(self, scenario: PrefillScenario) -> None:
        self.scenario = scenario

    def _call(self, run: wire.Run, work: wire.EngineRequest, texts: list[list[int]], *, handoff: bool) -> PrefillCall:
        node = self.scenario.node
        request = wire.PrefillRequest(
            run=run, router=ROUTER, worker=node.host.peer, engine_request=work, handoff=handoff
        )
        self.scenario.calls.append(call := PrefillCall(node, request, texts))
        network = self.scenario.network
        call.is_disturbed = network.breaks or not network.flows.is_set()  # a fault that waits for its fetch
        return call

    def call(self, value: int) -> None:
        self._new(value, handoff=False)

    def handoff(self, value: int) -> None:
        self._new(value, handoff=True)

    def _new(self, value: int, *, handoff: bool) -> None:
        number = len(self.scenario.calls)
        length, wanted = 1 + value % 27, 1 + value % 7
        count = 1 + value % 3
        work = make_work(length, wanted, seed=number)
        work.outputs.extend(wire.OutputPrefix(output=output) for output in range(1, count))
        texts = [reference_text(length, wanted, number, output) for output in range(count)]
        work.priority = value % 3 - 1
        if value % 11 == 0:
            work.remaining_ms = 1 + 60 * (value % 7)
        if value % 5 == 0:
            work.stopping.stop_token_ids.append(texts[value % count][0])
        if value % 4 == 0:
            work.prompt_logprobs = 0
        self._call(wire.Run(request=f"t/{number}", epoch=1, attempt=1), work, texts, handoff=handoff)

    def invalid(self, value: int) -> None:
        """Call with a token outside the vocabulary, which only the engine knows."""
        work = make_work(1 + value % 9)
        work.prompt = pack([1000])
        self._call(
            wire.Run(request=f"t/{len(self.scenario.calls)}", epoch=1, attempt=1), work, [], handoff=value % 2 == 0
        )

    async def adopt(self, value: int) -> None:
        old = self.scenario.pick(value)
        if old is not None:
            run = old.request.run
            run = wire.Run(request=run.request, epoch=run.epoch + 1, attempt=len(self.scenario.calls) + 2)
            self._call(run, old.request.engine_request, old.texts, handoff=value % 3 > 0)
            await settle()
            if run.epoch == self._highest_epoch(run):
                older = (call for call in self.scenario.calls[:-1] if call.request.run.request == run.request)
                assert not any(call.is_open and call.request.run.epoch < run.epoch for call in older)

    async def stale(self, value: int) -> None:
        old = self.scenario.pick(value)
        newest = self._highest_epoch(old.request.run) if old is not None else 0
        if old is not None and newest > 1:
            run = wire.Run(request=old.request.run.request, epoch=newest - 1, attempt=len(self.scenario.calls) + 2)
            call = self._call(run, old.request.engine_request, old.texts, handoff=True)
            await settle()
            assert call.end == "superseded"
            assert not call.is_open

    def _highest_epoch(self, run: wire.Run) -> int:
        runs = (call.request.run for call in self.scenario.calls)
        return max(each.epoch for each in runs if each.request == run.request)

    async def break_off(self, value: int) -> None:
        call = self.scenario.pick(value)
        if call is not None:
            await call.break_off()

    async def lose_router(self, value: int) -> None:
        for call in self.scenario.calls[value % 2 :: 2]:
            await call.break_off()

    def renew(self, value: int) -> None:
        call = self.scenario.pick(value)
        if call is not None and call.ticket is not None:
            self.scenario.node.host.sender.leases.renew_unopened(call.ticket.id)


class WorkerActions:
    def __init__(self, scenario: PrefillScenario) -> None:
        self.scenario = scenario

    def receive(self, value: int) -> None:
        call = self.scenario.pick(value)
        if call is not None and call.ticket is not None and not call.is_receiving:
            self.scenario.receive(call)

    async def release(self, value: int) -> None:
        call = self.scenario.pick(value)
        if call is not None and call.ticket is not None:
            call.is_disturbed = True
            outcome = wire.ReleaseRequest.OUTCOME_ABANDONED
            request = wire.ReleaseRequest(ticket=call.ticket.id, run=call.request.run, outcome=outcome)
            await self.scenario.node.host.sender.release(request)

    def step(self, value: int) -> None:
        [self.scenario.node, self.scenario.receiver][value % 3 // 2].loop.turn()

    def deliver(self, value: int) -> None:
        [self.scenario.node, self.scenario.receiver][value % 3 // 2].loop.deliver()

    def round(self, _: int) -> None:
        self.scenario.round()

    async def wait(self, value: int) -> None:
        await asyncio.sleep([0.01, 0.1, 0.3, 1.1, LEASE_S + 0.1][value % 5])

    def stall(self, _: int) -> None:
        self._disturb()
        if self.scenario.network.flows.is_set():
            self.scenario.network.flows.clear()
        else:
            self.scenario.network.flows.set()

    def cut(self, value: int) -> None:
        self._disturb()
        self.scenario.network.breaks = True
        self.scenario.network.loses_releases = value % 2 == 0

    def _disturb(self) -> None:
        for call in self.scenario.calls:
            call.is_disturbed = True

    def drain(self, value: int) -> None:
        if value % 4 == 0 and self.scenario.drain is None:
            self.scenario.node.host.draining = True
            self.scenario.drain = asyncio.create_task(self.scenario.node.prefill.drain())

    def crash(self, value: int) -> None:
        if value % 8 == 0:
            self.scenario.node.device.broken = True
