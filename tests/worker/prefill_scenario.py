"""A prefill worker between calls of routers and a receiver.

routers ── Prefill ──> worker p <── fetches ── worker e
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from decant.engine.errors import EngineError
from decant.handoff.errors import HandoffFailed, SequenceAlreadyFinished
from decant.protos import worker_pb2 as wire
from decant.runtime.packed import unpack
from decant.worker.wire_codec import to_requests
from tests.router.virtual_time import settle
from tests.worker.decode_actions import check_is_expected
from tests.worker.scenario import Scenario
from tests.worker.stepped_worker import Node


class PrefillCall:
    """Call of a router that checks the order and content of its events."""

    def __init__(self, node: Node, request: wire.PrefillRequest, texts: list[list[int]]) -> None:
        self.node = node
        self.request = request
        self.texts = texts
        """By output."""
        self.ticket: wire.Ticket | None = None
        self.first: wire.FirstTokens | None = None
        self.end: str | None = None
        """The name of the last event, "complete", or "broken"."""
        self.cause: wire.Cause | None = None
        self.is_receiving = False
        self.is_disturbed = False
        """The receiver released the cache early, or the fetch met a fault."""
        self._next_logprobs = 1
        self._called = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._read())

    @property
    def is_open(self) -> bool:
        return not self._task.done()

    @property
    def is_at_worker(self) -> bool:
        key = self.request.run.request, self.request.run.attempt
        return key in {(ref.request, ref.attempt) for ref, *_ in self.node.prefill.runs()}

    @property
    def has_open_fetch(self) -> bool:
        lease = self.node.host.sender.leases.find(self.ticket.id) if self.ticket else None
        return lease is not None and lease.is_opened

    def ends_with_first(self, output: int) -> bool:
        text = self.texts[output]
        return len(text) == 1 or text[0] in self.request.engine_request.stopping.stop_token_ids

    async def break_off(self) -> None:
        """Break the connection. The worker frees the run at once, unless its fetch is open."""
        if self.is_open:
            self.end = self.end or "broken"
            self._task.cancel()
            await asyncio.wait([self._task])
            await settle()
            assert self.has_open_fetch or not self.is_at_worker, "a run without a call and a fetch"

    async def result(self) -> None:
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _read(self) -> None:
        context: Any = None
        async with aclosing(self.node.prefill.Prefill(self.request, context)) as events:  # type: ignore[type-var]
            async for event in events:
                kind = event.WhichOneof("event")
                assert self.end is None, f"{kind} after {self.end}"
                getattr(self, f"_on_{kind}")(getattr(event, kind))
        if self.end is None:
            assert self.first is not None, "the call ended without the first token"
            self.end = "complete"
        assert self.end == "superseded" or not self.is_at_worker, "the call ended before its run"
        work, seconds = self.request.engine_request, asyncio.get_running_loop().time() - self._called
        assert not work.HasField("remaining_ms") or seconds <= work.remaining_ms / 1000 + 0.01, (
            "ended after its deadline"
        )

    def _on_ticket(self, ticket: wire.Ticket) -> None:
        assert self.request.handoff
        assert self.ticket is None
        assert ticket.run == self.request.run
        self.ticket = ticket

    def _on_prompt_logprobs(self, part: wire.PromptLogprobs) -> None:
        assert self.first is None, "prompt logprobs after the first token"
        assert part.first_position == self._next_logprobs
        self._next_logprobs += len(part.logprobs)

    def _on_first(self, first: wire.FirstTokens) -> None:
        assert self.first is None
        work = self.request.engine_request
        assert not work.HasField("prompt_logprobs") or self._next_logprobs == len(work.prompt) // 4
        self.first = first
        assert [each.output for each in first.tokens] == list(range(len(self.texts)))
        for each, text in zip(first.tokens, self.texts, strict=True):
            assert each.token == text[0]
            assert each.HasField("finished") == (self.ends_with_first(each.output))
        if all(each.HasField("finished") for each in first.tokens):
            self.end = "complete"

    def _on_failed(self, failed: wire.Failed) -> None:
        self.end, self.cause = "failed", failed.failure.cause
        match self.cause:
            case wire.CAUSE_DEADLINE:
                assert self.request.engine_request.HasField("remaining_ms")
            case wire.CAUSE_ENGINE:
                assert self.node.device.broken
            case wire.CAUSE_LEASE_EXPIRED:
                assert self.ticket is not None
            case wire.CAUSE_PEER_LOST | wire.CAUSE_RECLAIMED:
                assert self.is_disturbed
            case _:
                raise AssertionError(f"unexpected {failed}")

    def _on_refused(self, refused: wire.Refused) -> None:
        assert self.ticket is None
        assert self.first is None
        self.end, self.cause = "refused", refused.failure.cause

    def _on_superseded(self, superseded: wire.Superseded) -> None:
        assert superseded.epoch > self.request.run.epoch
        assert self.has_open_fetch or not self.is_at_worker, "a run whose owner is superseded, without a fetch"
        self.end = "superseded"


class PrefillScenario(Scenario):
    def __init__(self) -> None:
        super().__init__()
        self.node = Node("p", self.nodes, self.network, 14)
        self.receiver = Node("e", self.nodes, self.network, 64)
        self.calls: list[PrefillCall] = []
        self.fetches: set[asyncio.Task[None]] = set()

    def pick(self, value: int) -> PrefillCall | None:
        recent = self.calls[-3:] if value % 2 else self.calls
        return recent[value // 2 % len(recent)] if recent else None

    def receive(self, call: PrefillCall) -> None:
        call.is_receiving = True
        self.fetches.add(asyncio.create_task(self._receive(call)))

    async def _receive(self, call: PrefillCall) -> None:
        assert call.ticket is not None
        requests = to_requests(f"moved/{len(self.fetches)}", call.request.engine_request, model="m")
        root, *forks = requests
        host, outputs = self.receiver.host, range(len(call.texts))
        try:
            arrival = await host.loop.call(
                lambda engine: engine.transfers.reserve(root, forks), undo=lambda _, made: made.abort()
            )
            transfer = await host.receiver.receive(self.receiver.source("p"), call.ticket, arrival)
        except (HandoffFailed, EngineError) as error:
            check_is_expected(error)
            call.is_disturbed = True
        except SequenceAlreadyFinished:
            assert all(call.ends_with_first(output) for output in outputs)
        else:
            committed = {each.output: each for each in transfer.outputs}
            assert sorted(committed) == list(outputs)
            for output, each in committed.items():
                assert list(unpack(each.tokens)) == call.texts[output][:1]
                assert each.HasField("finished") == call.ends_with_first(output)

    async def finish(self) -> None:
        self.end_faults()
        await self.until(
            lambda: not any(call.is_open for call in self.calls) and all(fetch.done() for fetch in self.fetches),
            lambda: f"calls without an end; the worker has {list(self.node.prefill.runs())}",
        )
        for call in self.calls:
            await call.result()
        for fetch in self.fetches:
            fetch.result()
        await self.assert_empty(self.receiver, rounds=6)
        await self.await_drain()
        for node in self.nodes.values():
            await node.decode.close()
            await node.prefill.close()
        await self.assert_closed()
