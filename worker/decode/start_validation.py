from __future__ import annotations

import asyncio
from itertools import count
from typing import TypeVar

from decant.engine.block_hashes import cache_salt
from decant.engine.request import Request
from decant.protos import worker_pb2 as wire
from decant.runtime.telemetry import tracing
from decant.worker.checks import check_accepts, rejected
from decant.worker.decode.run import DecodeRun, key_of
from decant.worker.decode.run_table import RunTable
from decant.worker.engine_host import EngineHost
from decant.worker.wire_codec import RequestRejected, queue_key, to_requests

_Message = TypeVar("_Message", wire.Run, wire.Stopping, wire.Ticket)


class StartValidator:
    def __init__(self, host: EngineHost, runs: RunTable) -> None:
        self._host = host
        self._runs = runs
        self._numbers = count(1)

    def validate(self, start: wire.Start) -> DecodeRun:
        self._check_now(start)
        if start.HasField("ticket"):
            self._check_ticket(start)
        number, now = next(self._numbers), asyncio.get_running_loop().time()
        ref, engine_request = start.run, start.engine_request
        name = f"decode/{ref.request}/{ref.attempt}/{number}"  # never reused: a late event belongs to no other run
        host = self._host
        requests = to_requests(name, engine_request, model=host.model, guides=host.guides, adapters=host.adapters)
        if start.HasField("ticket"):
            requests = _owner_first(requests, start.ticket)
        tokens = max(max(len(each.token_ids), each.prompt_len + (each.stop.max_tokens or 0)) for each in requests)
        if tokens > self._host.context_length:
            detail = f"{tokens} tokens in all; the maximum context length is {self._host.context_length}"
            raise rejected(wire.CAUSE_NEVER_FITS, detail)
        run = DecodeRun(
            _copy(ref),
            requests,
            _copy(engine_request.stopping),
            (queue_key(engine_request, now), number),
            now,
            _copy(start.ticket) if start.HasField("ticket") else None,
        )
        run.span = tracing.span("decode", engine_request.traceparent, worker=self._host.peer.id)
        return run

    def _check_now(self, start: wire.Start) -> None:
        if self._runs.has_tombstone(start.run):
            raise rejected(wire.CAUSE_CANCELLED, "cancelled before the Start came")
        num_waiting = sum(run.phase == wire.RunStatus.PHASE_WAITING for run in self._runs)
        check_accepts(self._host, start.engine_request, num_waiting)

    def _check_ticket(self, start: wire.Start) -> None:
        ticket, layout_hash = start.ticket, self._host.layout_hash
        if key_of(ticket.run) != key_of(start.run):
            raise RequestRejected.because("ticket.run", "the run of the Start", key_of(ticket.run))
        if ticket.layout_hash != layout_hash:
            raise rejected(wire.CAUSE_LAYOUT_DIFFERS, f"layout hash {ticket.layout_hash:x}, not {layout_hash:x}")
        if ticket.salt != cache_salt(start.engine_request.salt, start.engine_request.adapter):
            raise rejected(wire.CAUSE_SALT_DIFFERS, "the salts of ticket and request differ")


def _owner_first(requests: list[Request], ticket: wire.Ticket) -> list[Request]:
    """Put the output first whose KV the ticket offers. Raises RequestRejected."""
    if not ticket.outputs:
        return requests
    owner = next((each for each in requests if each.sampling.output_index == ticket.outputs[0]), None)
    if owner is None:
        raise RequestRejected.because("outputs", f"output {ticket.outputs[0]}, as in the ticket", "none")
    return [owner, *(each for each in requests if each is not owner)]


def _copy(submessage: _Message) -> _Message:
    """Copy a submessage, which keeps its whole message alive, prompt included."""
    copy = type(submessage)()
    copy.CopyFrom(submessage)
    return copy
