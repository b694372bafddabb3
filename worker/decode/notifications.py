"""What the owner of a run is told of it. An orphan has nobody to be told: what matters is told to who takes it over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from decant.engine.output import PromptLogprobs, Token
from decant.protos import worker_pb2 as wire
from decant.worker.decode.frames import Frame, replay_frames
from decant.worker.decode.runs import DecodeRun
from decant.worker.decode.session import RouterSession
from decant.worker.wire_codec import logprobs_to_wire


def microseconds(seconds: float) -> int:
    """As durations travel."""
    return max(0, round(seconds * 1e6))


def scheduled(run: DecodeRun, cached_tokens: int) -> None:
    """It has its room and began."""
    if run.session is not None:
        waited = microseconds(asyncio.get_running_loop().time() - run.received)
        message = wire.Scheduled(run=run.ref, cached_tokens=cached_tokens, waited_us=waited)
        run.session.send(wire.WorkerMessage(scheduled=message))


def decode_started(run: DecodeRun, position: int) -> None:
    """It is in the batch; its tokens from ``position`` on follow. Told once, to its first owner that is here."""
    if run.session is not None and run.decode_started is not None:
        message, run.decode_started = run.decode_started, None
        message.run.CopyFrom(run.ref)
        message.slots.add(slot=run.slot, output=run.output, position=position)
        run.session.send(wire.WorkerMessage(decode_started=message))


def written(known: Mapping[str, DecodeRun], tokens: Iterable[Token], step: int) -> None:
    """Note the tokens of a step, and tell each session its own in one frame. ``known``: runs by the engine's name."""
    frames: dict[RouterSession, Frame] = {}
    running = wire.RunStatus.PHASE_RUNNING
    for token in tokens:
        run = known.get(token.id)
        if run is None:
            continue
        if run.phase != running:
            run.tokens_before_join.append(token)
            continue
        run.note(token)
        if not run.sent_first_token:
            _on_first_token(run)
        if run.session is not None:
            frame = frames.get(run.session)
            if frame is None:
                frame = frames[run.session] = Frame()
            frame.slots.append(run.slot)
            frame.positions.append(run.request.prompt_len + token.position)
            frame.tokens.append(token.token)
            if token.logprobs is not None:
                frame.add_logprobs(token.logprobs)
    for session, frame in frames.items():
        session.send(frame.message(step))


def _on_first_token(run: DecodeRun) -> None:
    """A token, the first that a frame brings."""
    run.sent_first_token = True
    timeline = run.timeline
    if run.ticket is None and timeline and timeline.scheduled is not None and timeline.first_token is not None:
        path = wire.DecodeStarted.FromTokens(prefill_us=microseconds(timeline.first_token - timeline.scheduled))
        run.decode_started = wire.DecodeStarted(from_tokens=path)
        decode_started(run, run.position - 1)


def explained(run: DecodeRun, told: PromptLogprobs) -> None:
    """Log-probabilities of a part of its prompt; kept, for a later owner lacks them."""
    entries = [logprobs_to_wire(entry, logprobs) for entry, logprobs in enumerate(told.entries)]
    message = wire.PromptLogprobs(run=run.ref, first_position=told.position, logprobs=entries)
    run.prompt_logprobs.append(message)
    if run.session is not None:
        run.session.send(wire.WorkerMessage(prompt_logprobs=message))


def repeated(run: DecodeRun, next: Iterable[wire.ResumePosition], step: int) -> None:
    """Its tokens from ``next`` on, once more."""
    if run.session is None:
        return
    for wish in next:
        if wish.output == run.output:
            for frame in replay_frames(run, run.index_of(wish.position), step):
                run.session.send(frame)


def ended(run: DecodeRun) -> None:
    """Its output is written."""
    if run.session is not None and run.end is not None:
        preemptions = run.timeline.preemptions if run.timeline else 0
        message = wire.Ended(run=run.ref, end=run.end, preemptions=preemptions)
        run.session.send(wire.WorkerMessage(ended=message))


def failed(run: DecodeRun, failure: wire.Failure) -> None:
    """It ended here before its output did."""
    if run.session is not None:
        run.session.send(wire.WorkerMessage(failed=wire.Failed(run=run.ref, failure=failure)))


def refused(run: DecodeRun, failure: wire.Failure) -> None:
    """It was never taken up."""
    if run.session is not None:
        run.session.send(wire.WorkerMessage(refused=wire.Refused(run=run.ref, failure=failure)))
