"""A start that came over the wire becomes a run that can be taken up, or WorkRefused says why not."""

from __future__ import annotations

import asyncio
from itertools import count

from decant.engine.errors import EngineStopped
from decant.protos import worker_pb2 as wire
from decant.worker.decode.run import DecodeRun, key_of
from decant.worker.decode.run_table import RunTable
from decant.worker.engine_host import EngineHost
from decant.worker.wire_codec import RequestRejected, queue_key, to_request


class StartValidator:
    """Who may come in. ``stopped`` is set once the engine has crashed."""

    def __init__(self, host: EngineHost, runs: RunTable) -> None:
        self.stopped: EngineStopped | None = None
        self._host = host
        self._runs = runs
        self._numbers = count(1)

    def validate(self, start: wire.Start) -> DecodeRun:
        """The run, not yet among the others. Raises WorkRefused."""
        self._check_now(start)
        if start.HasField("ticket"):
            self._check_ticket(start)
        number, now = next(self._numbers), asyncio.get_running_loop().time()
        ref, work = start.run, start.engine_request
        name = f"decode/{ref.request}/{ref.attempt}/{number}"  # never used twice: a late word is nobody else's
        request = to_request(name, work, model=self._host.model)
        tokens = max(len(request.token_ids), request.prompt_len + (request.stop.max_tokens or 0))
        if tokens > self._host.window:
            detail = f"{tokens} tokens in all; {self._host.window} are served here"
            raise _refused(wire.CAUSE_NEVER_FITS, detail)
        # Copies: a part of a message keeps all of it alive, the prompt too.
        run = DecodeRun(wire.Run(), request, wire.Stopping(), (queue_key(work, now), number), now)
        run.ref.CopyFrom(ref)
        run.stopping.CopyFrom(work.stopping)
        if start.HasField("ticket"):
            run.ticket = wire.Ticket()
            run.ticket.CopyFrom(start.ticket)
        return run

    def _check_now(self, start: wire.Start) -> None:
        """Whether this run, or any run, can be taken up now."""
        most, work = self._host.max_waiting, start.engine_request
        if self._runs.has_tombstone(start.run):
            raise _refused(wire.CAUSE_CANCELLED, "cancelled before it came")
        if self.stopped is not None:
            raise _refused(wire.CAUSE_ENGINE, str(self.stopped))
        if self._host.draining:
            raise _refused(wire.CAUSE_DRAINING, "this worker is draining")
        if sum(run.phase == wire.RunStatus.PHASE_WAITING for run in self._runs) >= most:
            raise _refused(wire.CAUSE_BUSY, f"at most {most} runs wait here")
        if work.HasField("remaining_ms") and not work.remaining_ms:
            raise _refused(wire.CAUSE_DEADLINE, "nothing is left of its time")

    def _check_ticket(self, start: wire.Start) -> None:
        """Whether the ticket is this run's, and its cache of use here."""
        ticket, layout = start.ticket, self._host.layout
        if key_of(ticket.run) != key_of(start.run):
            raise RequestRejected.because("ticket.run", "that of the start", key_of(ticket.run))
        if ticket.layout != layout:
            raise _refused(wire.CAUSE_LAYOUT_DIFFERS, f"a cache of layout {ticket.layout:x}, {layout:x} is needed here")
        if ticket.salt != start.engine_request.salt:
            raise _refused(wire.CAUSE_SALT_DIFFERS, "the ticket has another salt than the work")


def _refused(cause: wire.Cause, detail: str) -> RequestRejected:
    return RequestRejected(wire.Failure(cause=cause, detail=detail))
