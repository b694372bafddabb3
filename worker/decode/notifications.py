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
    from decant.worker.decode.output import Output
    from decant.worker.decode.run import DecodeRun
    from decant.worker.decode.session import RouterSession


class RunNotifier:
    def __init__(self, run: DecodeRun) -> None:
        self._run = run
        self._prompt_logprobs: list[wire.PromptLogprobs] = []  # for a later owner
        self._decode_started: wire.DecodeStarted | None = None  # not sent yet: the run had no session
        self.sent_first_token = False

    def scheduled(self, cached_tokens: int) -> None:
        waited = microseconds(asyncio.get_running_loop().time() - self._run.received)
        self._send(scheduled=wire.Scheduled(run=self._run.ref, cached_tokens=cached_tokens, waited_us=waited))

    def arrived(self, message: wire.DecodeStarted) -> None:
        """Report a fetched cache, and all tokens since the earlier attempts."""
        self._decode_started = message
        self._send_decode_started({output: output.prior_tokens for output in self._run.outputs})

    def first_token(self) -> None:
        """Report the first token of a run that computed its prompt here."""
        run = self._run
        self.sent_first_token = True
        timeline = run.root.timeline
        if run.ticket is None and timeline and timeline.scheduled is not None and timeline.first_token is not None:
            path = wire.DecodeStarted.FromTokens(prefill_us=microseconds(timeline.first_token - timeline.scheduled))
            self._decode_started = wire.DecodeStarted(from_tokens=path)
            self._send_decode_started({output: output.prior_tokens for output in run.outputs})

    def prompt_logprobs(self, part: PromptLogprobs) -> None:
        entries = [logprobs_to_wire(entry, logprobs) for entry, logprobs in enumerate(part.entries)]
        message = wire.PromptLogprobs(run=self._run.ref, first_position=part.position, logprobs=entries)
        self._prompt_logprobs.append(message)
        self._send(prompt_logprobs=message)

    def tokens_from(self, output: Output, index: int, step: int) -> None:
        session = self._run.owner.session
        if session is not None:
            for frame in replay_frames(output, index, step):
                session.send(frame)

    def resend(self, resume: Iterable[wire.ResumePosition], step: int) -> None:
        for each in resume:
            if (output := self._run.output(each.output)) is not None:
                self.tokens_from(output, output.index_of(each.position), step)

    def catch_up(self, resume: Iterable[wire.ResumePosition], step: int) -> None:
        for message in self._prompt_logprobs:
            self._send(prompt_logprobs=message)
        self._send_decode_started({output: len(output.tokens) for output in self._run.outputs})
        self.resend(resume, step)

    def ended(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if output.end is not None:
                preemptions = output.timeline.preemptions if output.timeline else 0
                self._send(ended=wire.Ended(run=self._run.ref, end=output.end, preemptions=preemptions))

    def failed(self, failure: wire.Failure) -> None:
        self._send(failed=wire.Failed(run=self._run.ref, failure=failure))

    def refused(self, failure: wire.Failure) -> None:
        self._send(refused=wire.Refused(run=self._run.ref, failure=failure))

    def superseded(self, epoch: int) -> None:
        self._send(superseded=wire.Superseded(run=self._run.ref, epoch=epoch))

    def _send_decode_started(self, first: Mapping[Output, int]) -> None:
        """Send DecodeStarted once, to the first owner with a session; frames from the indexes ``first`` on follow."""
        run, message = self._run, self._decode_started
        if run.owner.session is not None and message is not None:
            self._decode_started = None
            message.run.CopyFrom(run.ref)
            for output, index in first.items():
                position = output.request.prompt_len + index
                message.slots.add(slot=output.slot, output=output.index, position=position)
            self._send(decode_started=message)

    def _send(self, **message: object) -> None:
        if self._run.owner.session is not None:
            self._run.owner.session.send(wire.WorkerMessage(**message))  # type: ignore[arg-type]


def send_step_tokens(outputs: Mapping[str, Output], tokens: Iterable[Token], step: int) -> None:
    frames: dict[RouterSession, Frame] = {}
    running = wire.RunStatus.PHASE_RUNNING
    for token in tokens:
        output = outputs.get(token.id)
        if output is None:
            continue
        run = output.run
        if run.phase != running:
            output.early_tokens.append(token)
            continue
        output.add_token(token)
        if not run.notify.sent_first_token:
            run.notify.first_token()
        session = run.owner.session
        if session is not None:
            frame = frames.get(session)
            if frame is None:
                frame = frames[session] = Frame()
            frame.slots.append(output.slot)
            frame.positions.append(output.request.prompt_len + token.position)
            frame.tokens.append(token.token)
            if token.logprobs is not None:
                frame.add_logprobs(token.logprobs)
    for session, frame in frames.items():
        session.send(frame.message(step))
