"""The calls of a scripted prefill worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from decant.protos import worker_pb2 as wire
from decant.runtime.error_details import Reason, trailers
from decant.runtime.errors import Unavailable
from tests.router.scripted_runs import Connection, Export, Step, copied, failure, rpc_error, written_tokens

if TYPE_CHECKING:
    from tests.router.scripted_workers import ScriptedWorker


@dataclass(eq=False)
class ScriptedPrefill:
    worker: ScriptedWorker
    request: wire.PrefillRequest
    connection: Connection = field(init=False)
    outbox: deque[Any] = field(default_factory=deque)
    export: Export | None = None
    has_logprobs: bool = False
    has_first: bool = False
    is_last: bool = False  # the first token ended the output
    is_over: bool = False

    def __post_init__(self) -> None:
        self.connection = Connection(lambda _: None, self.on_cancel)
        self.written = written_tokens(self.request.engine_request)
        self.ends: dict[int, wire.OutputEnd] = {}

    @property
    def is_started(self) -> bool:
        return self.export is not None or self.has_logprobs or self.has_first

    @property
    def is_kept(self) -> bool:
        return self.export is not None and self.export.is_fetching and not self.export.is_closed

    def steps(self) -> Iterator[Step]:
        if self.outbox and self.connection.is_open:
            yield self.deliver
        if self.is_over:
            return
        wants_logprobs = self.request.engine_request.HasField("prompt_logprobs") and not self.has_logprobs
        if self.request.handoff and self.export is None and not self.is_last:
            yield self.issue
        if wants_logprobs:
            yield self.explain
        elif not self.has_first:
            yield self.sample
        elif self.is_last or not self.request.handoff or (self.export is not None and self.export.is_closed):
            yield self.finish

    def faults(self) -> Iterator[Step]:
        if self.is_over or not self.connection.is_open:
            return
        yield from (self.fail, partial(self.break_off, grpc.StatusCode.INTERNAL))
        if not self.is_started:
            yield from (partial(self.refuse, cause) for cause in (wire.CAUSE_BUSY, wire.CAUSE_DRAINING))
            yield self.refuse_as_draining

    def deliver(self) -> None:
        self.connection.deliver(self.outbox.popleft())

    def issue(self) -> None:
        self.export = self.worker.offer(self.request.run, self.written)
        self.outbox.append(wire.PrefillEvent(ticket=self.export.ticket))
        if self.has_first:
            self._seal()

    def explain(self) -> None:
        self.has_logprobs = True
        self.outbox.append(wire.PrefillEvent(prompt_logprobs=self.worker.world.prompt_logprobs(self.request.run)))

    def sample(self) -> None:
        self.has_first = True
        firsts = []
        for index, written in self.written.items():
            token, end = self.worker.world.next_token(index, len(written))
            firsts.append(wire.FirstTokens.First(output=index, token=token, finished=end))
            written.append(token)
            if end is not None:
                self.ends[index] = end
        self.is_last = len(self.ends) == len(self.written) or not self.request.handoff
        self.outbox.append(wire.PrefillEvent(first=wire.FirstTokens(tokens=firsts)))
        self._seal()

    def _seal(self) -> None:
        if self.export is not None and self.is_last:
            self.export.fail(wire.CAUSE_CANCELLED)
        elif self.export is not None:
            self.export.tokens, self.export.ends = copied(self.written), dict(self.ends)

    def finish(self) -> None:
        self.is_over = True
        self.outbox.append(grpc.aio.EOF)

    def fail(self) -> None:
        self._end_with(wire.PrefillEvent(failed=wire.Failed(run=self.request.run, failure=failure(wire.CAUSE_ENGINE))))

    def refuse(self, cause: wire.Cause) -> None:
        refused = wire.Refused(run=self.request.run, failure=failure(cause))
        self._end_with(wire.PrefillEvent(refused=refused))

    def _end_with(self, event: wire.PrefillEvent) -> None:
        self.outbox.append(event)
        self.finish()
        if self.export is not None:
            self.export.fail(wire.CAUSE_PEER_LOST)

    def refuse_as_draining(self) -> None:
        error = Unavailable(Reason.DRAINING, "this worker drains", retry_after=1.0)
        self.break_off(grpc.StatusCode.UNAVAILABLE, trailers(error.detail))

    def break_off(self, code: grpc.StatusCode, metadata: Any = ()) -> None:
        self.outbox.clear()
        self.connection.break_off(rpc_error(code, "the prefill call broke", metadata))
        self.on_cancel()

    def on_cancel(self) -> None:
        if not self.is_kept:
            self.lose()

    def lose(self) -> None:
        self.is_over = True
        if self.export is not None:
            self.export.fail(wire.CAUSE_PEER_LOST)
