"""Messages about a run to its owner. An orphan's are not sent: an owner that attaches gets its state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from decant.engine.output import PromptLogprobs, Token
from decant.protos import worker_pb2 as wire
from decant.worker.decode.frames import Frame, replay_frames
from decant.worker.wire_codec import logprobs_to_wire, microseconds

if TYPE_CHECKING:
    from decant.worker.decode.run import DecodeRun
    from decant.worker.decode.session import RouterSession


class RunNotifier:
    def __init__(self, run: DecodeRun) -> None:
        self._run = run

    def scheduled(self, cached_tokens: int) -> None:
        waited = microseconds(asyncio.get_running_loop().time() - self._run.received)
        self._send(scheduled=wire.Scheduled(run=self._run.ref, cached_tokens=cached_tokens, waited_us=waited))

    def decode_started(self, position: int) -> None:
        """Send DecodeStarted once, to the first owner with a session; frames from ``position`` on follow."""
        run = self._run
        if run.session is not None and run.decode_started is not None:
            message, run.decode_started = run.decode_started, None
            message.run.CopyFrom(run.ref)
            message.slots.add(slot=run.slot, output=run.output, position=position)
            self._send(decode_started=message)

    def first_token(self) -> None:
        run = self._run
        run.sent_first_token = True
        timeline = run.timeline
        if run.ticket is None and timeline and timeline.scheduled is not None and timeline.first_token is not None:
            path = wire.DecodeStarted.FromTokens(prefill_us=microseconds(timeline.first_token - timeline.scheduled))
            run.decode_started = wire.DecodeStarted(from_tokens=path)
            self.decode_started(run.position - 1)

    def prompt_logprobs(self, part: PromptLogprobs) -> None:
        entries = [logprobs_to_wire(entry, logprobs) for entry, logprobs in enumerate(part.entries)]
        message = wire.PromptLogprobs(run=self._run.ref, first_position=part.position, logprobs=entries)
        self._run.prompt_logprobs.append(message)
        self._send(prompt_logprobs=message)

    def tokens_from(self, index: int, step: int) -> None:
        if self._run.session is not None:
            for frame in replay_frames(self._run, index, step):
                self._run.session.send(frame)

    def resend(self, resume: Iterable[wire.ResumePosition], step: int) -> None:
        for each in resume:
            if each.output == self._run.output:
                self.tokens_from(self._run.index_of(each.position), step)

    def catch_up(self, resume: Iterable[wire.ResumePosition], step: int) -> None:
        for message in self._run.prompt_logprobs:
            self._send(prompt_logprobs=message)
        self.decode_started(self._run.position)
        self.resend(resume, step)

    def ended(self) -> None:
        run = self._run
        if run.end is not None:
            preemptions = run.timeline.preemptions if run.timeline else 0
            self._send(ended=wire.Ended(run=run.ref, end=run.end, preemptions=preemptions))

    def failed(self, failure: wire.Failure) -> None:
        self._send(failed=wire.Failed(run=self._run.ref, failure=failure))

    def refused(self, failure: wire.Failure) -> None:
        self._send(refused=wire.Refused(run=self._run.ref, failure=failure))

    def superseded(self, epoch: int) -> None:
        self._send(superseded=wire.Superseded(run=self._run.ref, epoch=epoch))

    def _send(self, **message: object) -> None:
        if self._run.session is not None:
            self._run.session.send(wire.WorkerMessage(**message))  # type: ignore[arg-type]


def send_step_tokens(runs: Mapping[str, DecodeRun], tokens: Iterable[Token], step: int) -> None:
    frames: dict[RouterSession, Frame] = {}
    running = wire.RunStatus.PHASE_RUNNING
    for token in tokens:
        run = runs.get(token.id)
        if run is None:
            continue
        if run.phase != running:
            run.early_tokens.append(token)
            continue
        run.add_token(token)
        if not run.sent_first_token:
            run.notify.first_token()
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
