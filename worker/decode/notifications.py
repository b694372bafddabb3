"""What the owner of a run is told of it. An orphan has nobody to be told: what matters is told to who takes it over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from decant.engine.output import PromptLogprobs, Token
from decant.protos import worker_pb2 as wire
from decant.worker.decode.frames import Frame, again
from decant.worker.decode.runs import DecodeRun
from decant.worker.decode.session import RouterSession
from decant.worker.wire_codec import token_logprobs


def microseconds(seconds: float) -> int:
    """As durations travel."""
    return max(0, round(seconds * 1e6))


def scheduled(held: DecodeRun, cached_tokens: int) -> None:
    """It has its room and began."""
    if held.session is not None:
        waited = microseconds(asyncio.get_running_loop().time() - held.received)
        message = wire.Scheduled(run=held.run, cached_tokens=cached_tokens, waited_us=waited)
        held.session.tell(wire.WorkerMessage(scheduled=message))


def decode_started(held: DecodeRun, position: int) -> None:
    """It is in the batch; its tokens from ``position`` on follow. Told once, to its first owner that is here."""
    if held.session is not None and held.decode_started is not None:
        message, held.decode_started = held.decode_started, None
        message.run.CopyFrom(held.run)
        message.slots.add(slot=held.slot, output=held.output, position=position)
        held.session.tell(wire.WorkerMessage(decode_started=message))


def written(known: Mapping[str, DecodeRun], tokens: Iterable[Token], step: int) -> None:
    """Note the tokens of a step, and tell each session its own in one frame. ``known``: runs by the engine's name."""
    frames: dict[RouterSession, Frame] = {}
    running = wire.RunStatus.PHASE_RUNNING
    for token in tokens:
        held = known.get(token.id)
        if held is None:
            continue
        if held.phase != running:
            held.early.append(token)
            continue
        held.note(token)
        if not held.wrote:
            _wrote_first(held)
        if held.session is not None:
            frame = frames.get(held.session)
            if frame is None:
                frame = frames[held.session] = Frame()
            frame.slots.append(held.slot)
            frame.positions.append(held.request.prompt_len + token.position)
            frame.tokens.append(token.token)
            if token.logprobs is not None:
                frame.explain(token.logprobs)
    for session, frame in frames.items():
        session.tell(frame.message(step))


def _wrote_first(held: DecodeRun) -> None:
    """A token, the first that a frame brings."""
    held.wrote = True
    timeline = held.timeline
    if held.ticket is None and timeline and timeline.scheduled is not None and timeline.first_token is not None:
        path = wire.DecodeStarted.FromTokens(prefill_us=microseconds(timeline.first_token - timeline.scheduled))
        held.decode_started = wire.DecodeStarted(from_tokens=path)
        decode_started(held, held.position - 1)


def explained(held: DecodeRun, told: PromptLogprobs) -> None:
    """Log-probabilities of a part of its prompt; kept, for a later owner lacks them."""
    entries = [token_logprobs(entry, logprobs) for entry, logprobs in enumerate(told.entries)]
    message = wire.PromptLogprobs(run=held.run, first_position=told.position, logprobs=entries)
    held.prompt_logprobs.append(message)
    if held.session is not None:
        held.session.tell(wire.WorkerMessage(prompt_logprobs=message))


def repeated(held: DecodeRun, next: Iterable[wire.ResumePosition], step: int) -> None:
    """Its tokens from ``next`` on, once more."""
    if held.session is None:
        return
    for wish in next:
        if wish.output == held.output:
            for frame in again(held, held.index_of(wish.position), step):
                held.session.tell(frame)


def ended(held: DecodeRun) -> None:
    """Its output is written."""
    if held.session is not None and held.end is not None:
        preemptions = held.timeline.preemptions if held.timeline else 0
        message = wire.Ended(run=held.run, end=held.end, preemptions=preemptions)
        held.session.tell(wire.WorkerMessage(ended=message))


def failed(held: DecodeRun, failure: wire.Failure) -> None:
    """It ended here before its output did."""
    if held.session is not None:
        held.session.tell(wire.WorkerMessage(failed=wire.Failed(run=held.run, failure=failure)))


def refused(held: DecodeRun, failure: wire.Failure) -> None:
    """It was never taken up."""
    if held.session is not None:
        held.session.tell(wire.WorkerMessage(refused=wire.Refused(run=held.run, failure=failure)))
