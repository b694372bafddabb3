"""Parts of a request at scripted workers; output token k of an output is `token_at(k)` everywhere.

A schedule chooses what happens next: a step or, where it harms the request, a fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from decant.protos import worker_pb2 as wire
from decant.runtime.packed import pack, unpack

if TYPE_CHECKING:
    from tests.router.scripted_workers import ScriptedWorker

PROMPT = (1, 2, 3)
EOS = 2
RunStatus = wire.RunStatus
Step = Callable[[], object]


def token_at(k: int, stops_at: int | None) -> int:
    return EOS if k == stops_at else 10 + k


def rpc_error(code: grpc.StatusCode, details: str, metadata: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


class Connection:
    """One call as the router sees it: what `grpc.aio` returns for a stream."""

    def __init__(self, on_write: Callable[[Any], None], on_cancel: Callable[[], None]) -> None:
        self.is_open = True
        self._on_write = on_write
        self._on_cancel = on_cancel
        self._to_router = asyncio.Queue[Any]()

    async def read(self) -> Any:
        message = await self._to_router.get()
        if isinstance(message, grpc.aio.AioRpcError):
            raise message
        return message

    async def write(self, message: Any) -> None:
        if not self.is_open:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "the stream is broken")
        self._on_write(type(message).FromString(message.SerializeToString()))

    def cancel(self) -> None:
        if self.is_open:
            self.is_open = False
            self._on_cancel()

    def deliver(self, message: Any) -> None:
        self._to_router.put_nowait(message)
        self.is_open = self.is_open and message is not grpc.aio.EOF

    def break_off(self, error: grpc.aio.AioRpcError) -> None:
        self.is_open = False
        self._to_router.put_nowait(error)


@dataclass(eq=False)
class Export:
    """The KV cache that a ticket offers. `tokens` are committed: its source decodes no more.

    Closed when the target owns or abandoned the sequence, or when there will be no commit; `cause` says why.
    """

    ticket: wire.Ticket
    is_fetching: bool = False
    is_closed: bool = False
    tokens: dict[int, list[int]] | None = None  # of each output
    ends: dict[int, wire.OutputEnd] = field(default_factory=dict)  # of the outputs that ended at the source
    cause: wire.Cause | None = None
    renewed_at: float = 0.0

    def fail(self, cause: wire.Cause) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.cause = cause


@dataclass(eq=False)
class ScriptedRun:
    worker: ScriptedWorker
    start: wire.Start
    first_slot: int
    run: wire.Run = field(init=False)
    phase: wire.RunStatus.Phase = RunStatus.PHASE_WAITING
    tokens: dict[int, list[int]] = field(init=False)  # of each output
    ends: dict[int, wire.OutputEnd] = field(default_factory=dict)
    source: Export | None = None  # what it fetches
    export: Export | None = None  # what it gives away
    is_attached: bool = True  # to this router's session; an earlier owner's run is, once it is adopted
    is_decoding: bool = False
    is_to_migrate: bool = False  # asked for before it decoded
    stopped_early: set[int] = field(default_factory=set)  # outputs that were cancelled before it decoded

    def __post_init__(self) -> None:
        self.run = wire.Run.FromString(self.start.run.SerializeToString())
        self.tokens = written_tokens(self.start.engine_request)
        self.slots = {index: self.first_slot + place for place, index in enumerate(self.tokens)}

    @property
    def live(self) -> list[int]:
        return [index for index in self.tokens if index not in self.ends]

    @property
    def has_ended(self) -> bool:
        return not self.live

    @property
    def is_committed(self) -> bool:
        return self.export is not None and self.export.tokens is not None

    @property
    def held(self) -> wire.RunStatus:
        slots = [
            wire.Slot(slot=self.slots[index], output=index, position=len(PROMPT) + len(tokens))
            for index, tokens in self.tokens.items()
        ]
        shown = slots if self.is_decoding else []
        return RunStatus(run=self.run, phase=self.phase, slots=shown, ended=list(self.ends.values()))

    def steps(self) -> Iterator[Step]:
        if self.phase == RunStatus.PHASE_WAITING and not self.worker.is_full:
            yield self.schedule
        elif self.phase == RunStatus.PHASE_ARRIVING and self.source is not None:
            if self.source.cause is not None:
                yield partial(self.fail, self.source.cause, self.source.ticket.sender)
            elif self.source.tokens is not None:
                yield self.join
        elif self.phase == RunStatus.PHASE_RUNNING and not self.is_decoding:
            yield self.join
        elif self.phase == RunStatus.PHASE_RUNNING and not self.is_committed:
            yield from (partial(self.decode, index) for index in self.live)
            if self.export is not None and self.export.is_fetching and not self.export.is_closed:
                yield self.commit

    def faults(self) -> Iterator[Step]:
        if self.phase == RunStatus.PHASE_WAITING:
            yield partial(self.refuse, wire.CAUSE_BUSY)
        if self.phase != RunStatus.PHASE_ENDED and not self.is_committed:
            yield partial(self.fail, wire.CAUSE_ENGINE)
        if self.phase == RunStatus.PHASE_ARRIVING and self.source is not None:
            yield partial(self.fail, wire.CAUSE_CORRUPT, self.source.ticket.sender)
        if self.phase == RunStatus.PHASE_RUNNING and self.is_decoding and not self.is_committed:
            yield from (partial(self.decode, index, is_lost=True) for index in self.live)
        if self.phase != RunStatus.PHASE_ENDED:
            yield self.supersede

    def schedule(self) -> None:
        if self.start.HasField("ticket"):
            self.source = self.worker.world.exports.get(self.start.ticket.id)
            if self.source is None or (self.source.is_closed and self.source.cause != wire.CAUSE_CANCELLED):
                self.source = None
                self.fail(wire.CAUSE_LEASE_EXPIRED)
                return
            self.source.is_fetching = True
            self.phase = RunStatus.PHASE_ARRIVING
        else:
            self.phase = RunStatus.PHASE_RUNNING
        self.send(scheduled=wire.Scheduled(run=self.run))
        self.send_prompt_logprobs()

    def join(self) -> None:
        slots = [wire.Slot(slot=slot, output=index) for index, slot in self.slots.items()]
        decode_started = wire.DecodeStarted(run=self.run, slots=slots)
        if self.source is not None:
            assert self.source.tokens is not None
            self.tokens |= {
                index: tokens for index, tokens in copied(self.source.tokens).items() if index in self.tokens
            }
            self.ends |= {index: end for index, end in self.source.ends.items() if index in self.tokens}
            self.source.is_closed = True
            decode_started.handoff.SetInParent()
        else:
            decode_started.from_tokens.SetInParent()
        self.phase, self.is_decoding = RunStatus.PHASE_RUNNING, True
        self.send(decode_started=decode_started)
        for index in self.tokens:
            self.send_tokens(index, 0)
        self.send_ends()
        for index in sorted(self.stopped_early):
            self.finish_output(index, wire.OutputEnd.REASON_CANCELLED)
        if self.is_to_migrate and not self.has_ended:
            self.offer()

    def decode(self, index: int, *, is_lost: bool = False) -> None:
        k = len(self.tokens[index])
        token, end = self.worker.world.next_token(index, k)
        self.tokens[index].append(token)
        if not is_lost:
            self.send_tokens(index, k)
        if end is not None:
            self.finish_output(index, end.reason)

    def commit(self) -> None:
        assert self.export is not None
        self.export.tokens, self.export.ends = copied(self.tokens), dict(self.ends)

    def offer(self) -> None:
        if self.export is None or self.export.is_closed:
            self.export = self.worker.offer(self.run, {index: self.tokens[index] for index in self.live})
        self.send(ticket=self.export.ticket)

    def finish(self, reason: wire.OutputEnd.Reason) -> None:
        for index in self.live:
            self.finish_output(index, reason)

    def finish_output(self, index: int, reason: wire.OutputEnd.Reason, end_position: int | None = None) -> None:
        if index in self.ends:
            return
        if end_position is not None:
            del self.tokens[index][end_position - len(PROMPT) :]
        position = len(PROMPT) + len(self.tokens[index])
        end = self.ends[index] = wire.OutputEnd(output=index, reason=reason, end_position=position)
        if self.has_ended:
            self.phase = RunStatus.PHASE_ENDED
            self.release(wire.CAUSE_CANCELLED)
        elif self.export is not None and not self.is_committed and index == self.export.ticket.outputs[0]:
            self.export.fail(wire.CAUSE_CANCELLED)
        self.send(ended=wire.Ended(run=self.run, end=end))

    def send_ends(self) -> None:
        for end in self.ends.values():
            self.send(ended=wire.Ended(run=self.run, end=end))

    def fail(self, cause: wire.Cause, peer: wire.Peer | None = None) -> None:
        self.release(wire.CAUSE_PEER_LOST)
        self.worker.forget(self)
        self.send(failed=wire.Failed(run=self.run, failure=failure(cause, peer)))

    def refuse(self, cause: wire.Cause) -> None:
        self.worker.forget(self)
        self.send(refused=wire.Refused(run=self.run, failure=failure(cause)))

    def supersede(self) -> None:
        self.release(wire.CAUSE_PEER_LOST)
        self.worker.forget(self)
        self.send(superseded=wire.Superseded(run=self.run, epoch=self.run.epoch + 1))

    def release(self, cause: wire.Cause) -> None:
        if self.source is not None:
            self.source.fail(wire.CAUSE_PEER_LOST)
        if self.export is not None and not self.is_committed:
            self.export.fail(cause)

    def send(self, **message: Any) -> None:
        if self.is_attached:
            self.worker.send(**message)

    def catch_up(self, resume: Iterable[wire.ResumePosition]) -> None:
        self.send_prompt_logprobs()
        for each in resume:
            self.send_tokens(each.output, each.position - len(PROMPT))

    def send_prompt_logprobs(self) -> None:
        is_computed_here = self.source is None and self.phase != RunStatus.PHASE_WAITING
        if is_computed_here and self.start.engine_request.HasField("prompt_logprobs"):
            self.send(prompt_logprobs=self.worker.world.prompt_logprobs(self.run))

    def send_tokens(self, index: int, k: int) -> None:
        tokens = self.tokens[index][k:]
        if tokens and self.is_decoding:
            positions = range(len(PROMPT) + k, len(PROMPT) + len(self.tokens[index]))
            slots = pack([self.slots[index]] * len(tokens))
            self.send(frame=wire.Frame(slots=slots, positions=pack(list(positions)), tokens=pack(tokens)))


def written_tokens(request: wire.EngineRequest) -> dict[int, list[int]]:
    return {prefix.output: list(unpack(prefix.tokens)) for prefix in request.outputs}


def copied(tokens: dict[int, list[int]]) -> dict[int, list[int]]:
    return {index: list(each) for index, each in tokens.items()}


RunKey = tuple[str, int, int]


def key_of(run: wire.Run) -> RunKey:
    return run.request, run.epoch, run.attempt


def failure(cause: wire.Cause, peer: wire.Peer | None = None) -> wire.Failure:
    return wire.Failure(cause=cause, detail="scripted", peer=peer)
